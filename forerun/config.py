"""Config: every option of the engine, in one frozen dataclass. The CLI's flags and the library's
keywords are these."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from forerun.draft_spec import joined
from forerun.errors import ConfigError, shorten, suggest
from forerun.utils import check_integer, check_number

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
RULE_NAMES = (
    "match",
    "token",
    "block",
    "tree",
    "typical",
)  # verify.RULES, named here so that --help needs no torch
CHOICES: dict[str, tuple[str, ...]] = {
    "rule": RULE_NAMES,
    "dtype": DTYPES,
    "quantization": ("none", "int8", "int4"),
    "draft_quantization": ("auto", "none", "int8", "int4"),
    "kernels": ("auto", "native", "torch"),
    "objective": ("throughput", "latency", "energy"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How an engine is built.

    Args:
        model: a GGUF file, a Hugging Face directory, ollama:NAME, lmstudio:NAME, or a Hub id
            (ORG/REPO:QUANT for GGUF); None is the default model, SmolLM2-135M-Instruct.
        draft: off, ngram, suffix, recycle (or recycle:TABLE), retrieval:INDEX (or several, by
            commas), self:int4 (the model itself, rounded), self:layers=N or self:window=N (with
            fewer layers or keys), model:, medusa:, mlp:, eagle:, eagle3:, mtp: or
            block:DIR_OR_HUB_ID; a|b (or a+b) asks b where a has nothing, a?b whichever is measured
            to do better, a&b makes one tree of both, a>b has a draft for the draft model b,
            ahead(a) lets the draft model a draft on while the target verifies, parentheses nest:
            suffix|model:.. copies what repeats and drafts the rest; auto is suffix, and for the
            default model the drafter that comes with it behind that. Several (a list, or --draft
            once for each): the best of them, as a?b.
        depth: most tokens drafted ahead: a number, or auto to choose by measured cost and
            acceptance, zero included.
        width: nodes a level of the trees of a draft with weights; 1 drafts chains.
        draft_threshold: a block drafter with a confidence head goes no further along a path whose
            chance to stand, as the head says, is below it; 0 follows all.
        rule: match (same tokens as plain decoding), token, block or tree (same distribution), or
            typical (lossy).
        dtype: auto is the checkpoint's own, but float32 where the native CPU kernels cannot compute
            it.
        quantization: int8 or int4 weights for the target, rounded while loading with the native
            kernels. none keeps the numbers of a GGUF file, the integers of a quantised checkpoint
            where int8 or int4 hold them exactly, or else the dtype; a dtype given by name
            dequantises them.
        draft_quantization: the same for a draft model, whose precision never changes the text; auto
            is int8 with the native kernels (but a quantised checkpoint's own integers first), none
            keeps the dtype.
        draft_shortlist: a file of the tokens that a draft model (model:, self:int8 or self:int4)
            scores, made by forerun train --recipe shortlist: no others are drafted, and only their
            rows of its head are read. Without it, what lies beside the model as
            shortlist.safetensors, or all tokens.
        kernels: native (compiled, exact in every dtype), torch, or auto: native on CPU where they
            can be used.
        device: auto takes CUDA where there is one.
        draft_device: of a draft model (model:); auto is the target's. One of its own, as cuda:1, or
            cpu beside a GPU, leaves the target's its memory, and drafts ahead (ahead(..)) while
            that computes: only tokens pass between.
        tensor_parallel: processes that the target is divided between, each with its own heads,
            channels and part of the KV cache, on GPUs of its own (cuda:0, cuda:1, ..) or on the
            CPU; they compute with torch. For a target that
            one device cannot hold: on one CPU it brings nothing.
        threads: CPU threads; 0 leaves torch's choice.
        draft_threads: of these, those that draft ahead while the target verifies (ahead(..)); 0 is
            half of them.
        context: most tokens of one request, prompt included; None is the model's own limit.
        max_rows: requests that run at the same time.
        chunk: most prompt tokens of one request read in one pass.
        objective: what depth auto looks for: throughput (most tokens a second of all requests
            together), or latency (least time for a token, in the mean over requests: who gains
            little is held up less by who gains much), or energy (most tokens a joule, where the
            machine counts joules).
        slo_ms: milliseconds that no step should take while requests are being answered, if it can
            be helped: by drafting less, and by reading other prompts in smaller pieces; 0 is no
                bound.
        page: tokens in one page of the KV cache; multiples of 16 are fastest on CPU.
        kv_tokens: tokens the KV cache holds over all requests, and so does that of each draft with
            weights; None fits all of them to a quarter of the free memory.
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
        if self.quantization and self.kernels == "torch":
            raise ConfigError(
                f"quantization={self.quantization} needs the native kernels, but kernels=torch was asked for"
            )
        if self.tensor_parallel > 1 and (self.kernels == "native" or self.quantization):
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel} computes with torch: leave kernels=native and quantization out"
            )
        if self.quantization and self.dtype != "auto":
            raise ConfigError(
                f"quantization={self.quantization} and dtype={self.dtype} contradict each other: give one"
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
                f"rule {self.rule} verifies chains, but width={self.width} drafts trees: use rule match or tree"
            )

    @classmethod
    def of(cls, **options: Any) -> Config:
        """Config from keyword arguments; an unknown name is an error that names the nearest."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"there is no option {name!r}: {suggest(name, known)}")
        return cls(**options)


def parse_depth(depth: int | str) -> int | str:
    """`auto`, or a number of tokens from 0 to 64."""
    if isinstance(depth, str) and depth.isdigit():
        depth = int(depth)
    if depth != "auto" and (
        not isinstance(depth, int) or isinstance(depth, bool) or not 0 <= depth <= 64
    ):
        raise ConfigError(
            f"depth={shorten(depth)} is out of range: give auto or a whole number from 0 to 64"
        )
    return depth
