"""Config: every option of the engine, in one frozen dataclass.

The flags of the command line and the keyword arguments of `LLM` are generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypedDict

from forerun.draft_spec import joined
from forerun.errors import ConfigError, shorten, suggest
from forerun.utils import check_integer, check_number

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# The keys of verify.RULES, repeated here so that --help needs no torch.
RULE_NAMES = ("match", "token", "block", "tree", "typical")
CHOICES: dict[str, tuple[str, ...]] = {
    "rule": RULE_NAMES,
    "dtype": DTYPES,
    "quantization": ("none", "int8", "int4"),
    "draft_quantization": ("auto", "none", "int8", "int4"),
    "backend": ("auto", "forerun", "transformers"),
    "kernels": ("auto", "native", "torch", "triton"),
    "objective": ("throughput", "latency", "energy"),
}


class Options(TypedDict, total=False):
    """The options of `Config` except model and draft, for editors and type checkers."""

    depth: int | str
    width: int
    draft_threshold: float
    rule: str
    dtype: str
    quantization: str | None
    draft_quantization: str
    draft_shortlist: str | None
    backend: str
    kernels: str
    device: str
    draft_device: str
    tensor_parallel: int
    threads: int
    draft_threads: int
    context: int | None
    max_rows: int
    chunk: int
    objective: str
    slo_ms: int
    page: int
    kv_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of an engine.

    Args:
        model: Model to run, the target: a GGUF file, a Hugging Face directory, ollama:NAME,
            lmstudio:NAME, or a Hub id (ORG/REPO:QUANT for GGUF). By default
            SmolLM2-135M-Instruct.
        draft: Drafter whose tokens the target verifies: off, ngram, suffix, recycle (or
            recycle:TABLE), lookahead (or lookahead:window=8,ngram=4,pool=6), retrieval:INDEX
            (several separated by commas), self:int4 (the target itself, quantized), self:layers=N
            or self:window=N (with fewer layers or a shorter attention window), or model:, medusa:,
            mlp:, eagle:, eagle3:, mtp: or block: with a directory, file or Hub id. mtp alone is the
            multi-token module in the target's own checkpoint or GGUF file. auto is suffix and,
            after that, the drafter that comes with the model: the bundled one of the default model,
            or mtp. Drafters can be combined: a|b (or a+b) uses b where a has no draft, a?b uses the
            one that is measured to be better, a&b merges both into one tree, a>b drafts for the
            draft model b with a, ahead(a) lets the draft model a continue while the target
            verifies; parentheses group. For example, suffix|model:DIR copies repeated text and
            drafts the rest. Several drafts (a list, or --draft given repeatedly) are combined as
            a?b.
        depth: Maximum number of tokens drafted ahead, from 0 to 64, or auto to choose it by
            measured cost and acceptance.
        width: Maximum number of nodes per level of the draft trees of a drafter with weights; 1
            drafts chains.
        draft_threshold: Estimated acceptance probability, from 0 to 1, below which a block drafter
            with a confidence head stops extending a path; 0 never stops.
        rule: Verification rule: match (same tokens as plain decoding), token, block or tree (same
            distribution), or typical (lossy).
        dtype: Number format of the target's weights: auto, float32, bfloat16, float16 or float64.
            auto is the format of the checkpoint, or float32 if the native CPU kernels do not
            support that.
        quantization: Quantization of the target's weights while loading: int8, int4 or none. int8
            and int4 need the native kernels or a GPU; on a GPU they save memory, and time only with
            kernels=triton (not measured yet). none keeps the numbers of a GGUF file, the integers
            of a quantized checkpoint if int8 or int4 represent them exactly (on a GPU only with
            kernels=triton), or else the dtype; an explicit dtype dequantizes them.
        draft_quantization: Quantization of a draft model, whose precision never changes the text:
            int8, int4, none or auto. auto is int8 with the native kernels (or the integers of a
            quantized checkpoint), none keeps the dtype, and so does auto on a GPU.
        draft_shortlist: File of the only tokens that a draft model (model:, self:int8 or
            self:int4) scores, made by forerun train --recipe shortlist; only their rows of the
            output head are read. By default shortlist.safetensors beside the model if it exists, or
            else all tokens.
        backend: What runs the target: forerun (its own decoder, for the families that it has),
            transformers (the family's own module in transformers, on torch, for any causal language
            model whose layers keep keys and values), or auto. auto is forerun where it has the
            family, otherwise transformers, also for a draft model. transformers is slower, has no
            quantization and no self: drafts, and its results are equal up to rounding.
        kernels: Implementation of the forward pass: native (compiled, exact in every dtype), torch
            (plain operations), triton (forerun's own kernels on a GPU, not measured yet; elsewhere,
            and for models that they cannot compute, as auto), or auto, which is native on CPU where
            possible, and CUDA graphs of torch's operations on a GPU.
        device: Device of the target, such as cpu or cuda:0; auto is CUDA if available.
        draft_device: Device of a draft model (model:); auto is that of the target. A separate
            device, such as cuda:1, or cpu beside a GPU, saves memory of the target's device and
            lets ahead(..) draft while the target computes; only tokens are transferred.
        tensor_parallel: Number of processes that share the target, each with some of the heads,
            channels and KV cache, on separate GPUs (cuda:0, cuda:1, ..) or on the CPU. They use
            torch. It is meant for targets that do not fit on one device, and gives no speedup on
            one CPU.
        threads: Number of CPU threads; 0 uses torch's default.
        draft_threads: Number of the CPU threads that draft while the target verifies (ahead(..)); 0
            is half of them.
        context: Maximum number of tokens of one request, its prompt included. By default the
            model's own limit.
        max_rows: Maximum number of requests that run at the same time.
        chunk: Maximum number of prompt tokens of one request in one forward pass.
        objective: Goal of automatic depth: throughput (most tokens per second over all requests),
            latency (least time per token, averaged over requests, so that requests with little gain
            are delayed less by the others), or energy (most tokens per joule, if the machine has an
            energy counter).
        slo_ms: Target for the maximum duration of a step in milliseconds while requests are being
            answered; it is met by drafting less and by reading prompts in smaller chunks. 0 is no
            limit.
        page: Number of tokens per page of the KV cache; multiples of 16 are fastest on CPU.
        kv_tokens: Capacity in tokens of the KV cache over all requests, and of the cache of each
            drafter with weights. By default as many as fit into a quarter of the free memory, or on
            a GPU into 85 % of it less 1 GB.
    """

    model: str | None = None
    draft: str = "auto"
    depth: int | str = "auto"
    width: int = 1
    draft_threshold: float = 0.0
    rule: str = "match"
    dtype: str = "auto"
    quantization: str | None = None
    draft_quantization: str = "auto"
    draft_shortlist: str | None = None
    backend: str = "auto"
    kernels: str = "auto"
    device: str = "auto"
    draft_device: str = "auto"
    tensor_parallel: int = 1
    threads: int = 0
    draft_threads: int = 0
    context: int | None = None
    max_rows: int = 16
    chunk: int = 512
    objective: str = "throughput"
    slo_ms: int = 0
    page: int = 16
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known and not (value is None and name == "quantization"):
                raise ConfigError(f"there is no {name} {value!r}: {suggest(str(value), known)}")
        if self.quantization == "none":
            object.__setattr__(self, "quantization", None)
        if self.backend == "transformers" and (
            self.kernels == "native" or self.quantization or self.tensor_parallel > 1
        ):
            raise ConfigError(
                "backend=transformers computes with torch in one process: leave kernels=native,"
                " quantization and tensor_parallel out"
            )
        if self.tensor_parallel > 1 and (self.kernels == "native" or self.quantization):
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel} computes with torch:"
                " leave kernels=native and quantization out"
            )
        if self.quantization and self.dtype != "auto":
            raise ConfigError(
                f"quantization={self.quantization} and dtype={self.dtype} contradict each other:"
                " give one"
            )
        drafts = [self.draft] if isinstance(self.draft, str) else self.draft
        if (
            not isinstance(drafts, (list, tuple))
            or not drafts
            or not all(isinstance(draft, str) for draft in drafts)
        ):
            raise ConfigError(
                f"draft={self.draft!r} is no draft: give a name such as 'suffix', or 'off'"
            )
        object.__setattr__(self, "draft", joined(drafts))
        listed = self.draft_shortlist
        if listed is not None and not isinstance(listed, str):
            raise ConfigError(f"draft_shortlist={listed!r} is no file: give its path as text")
        object.__setattr__(self, "depth", parse_depth(self.depth))
        for name, low, high in (
            ("width", 1, 16),
            ("tensor_parallel", 1, 64),
            ("threads", 0, 1024),
            ("draft_threads", 0, 1024),
            ("context", 2, 1 << 24),
            ("max_rows", 1, 1024),
            ("chunk", 1, 1 << 20),
            ("slo_ms", 0, 1 << 20),
            ("page", 1, 1024),
            ("kv_tokens", 2, 1 << 32),
        ):
            value = getattr(self, name)
            if value is None and name in ("context", "kv_tokens"):
                continue
            check_integer(name, value, low, high)
        check_number("draft_threshold", self.draft_threshold, 0, 1)
        if self.slo_ms and self.objective == "energy":
            raise ConfigError(
                f"slo_ms={self.slo_ms} bounds time, and objective=energy counts joules: give one"
            )
        if self.width > 1 and self.rule in ("token", "block"):
            raise ConfigError(
                f"rule {self.rule} verifies chains, but width={self.width} drafts trees:"
                " use rule match or tree"
            )

    @classmethod
    def of(cls, **options: Any) -> Config:
        """Create a Config; the error for an unknown keyword suggests the nearest option."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"there is no option {name!r}: {suggest(name, known)}")
        return cls(**options)


def parse_depth(depth: int | str) -> int | str:
    """Parse a depth: `auto`, or a number of tokens from 0 to 64. Raises ConfigError."""
    if isinstance(depth, str) and depth.isdigit():
        depth = int(depth)
    if depth != "auto" and (
        not isinstance(depth, int) or isinstance(depth, bool) or not 0 <= depth <= 64
    ):
        raise ConfigError(
            f"depth={shorten(depth)} is out of range: give auto or a whole number from 0 to 64"
        )
    return depth
