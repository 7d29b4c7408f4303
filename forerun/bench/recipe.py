"""Parameters of a random-weight model pair. Imports no torch, for a quick `--help`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from forerun.bench.shapes import BLOCK, FORMATS, GGUF_ONLY, MIXTURES, ModelShape, named_shape
from forerun.errors import ConfigError, suggest

SPECIAL = ("<s>", "</s>", "<pad>")  # tokens 0, 1 and 2
MIN_VOCAB = 256 + len(SPECIAL)  # every byte needs a token
# Options of pairs whose draft model is the start of the target.
OF_SCALED_PAIRS = ("middle_layers", "eps", "beta", "nsucc", "temp", "qk", "ctx", "emb")
DRAFT_HIDDEN, DRAFT_HEAD_DIM = 512, 64  # of the draft models of packed pairs, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecipe(ModelShape):
    """Target, draft model, agreement and prompts; the defaults are those of docs/performance.md.

    Args:
        format: bfloat16 writes Hugging Face directories; q8_0, q4_k_m and mxfp4 (experts in MXFP4,
            the rest in Q8_0) write GGUF files.
        draft_layers: Number of layers of the draft model, which are the target's first ones if
            that is a Llama in bfloat16.
        draft_shape: Named shape of the draft model, with the target's vocabulary. Without it, and
            unless it is the start of the target, the draft model is a Llama of up to 512 channels.
        middle_layers: Number of layers of a third model between the two, for cascades; 0 makes
            none.
        seed: Seed of the random weights; the same seed gives the same pair.
        agree: Share of the target's greedy tokens that the draft model should predict; 0 keeps eps.
        eps: Scale of the target's later layers that is tried first.
        tolerance: Accepted deviation from agree.
        beta: How strongly a token predicts its successors.
        nsucc: Number of likely successors of a token.
        temp: Scale of the logits.
        qk: Standard deviation of queries and keys, which sharpens attention.
        ctx: Scale of the draft model's layers.
        emb: Standard deviation of the embeddings.
        prompts: Number of prompts to write.
        prompt_tokens: Number of tokens of each prompt.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    format: str = "bfloat16"
    draft_layers: int = 3
    draft_shape: str = ""
    middle_layers: int = 0
    seed: int = 0
    agree: float = 0.8
    eps: float = 0.19
    tolerance: float = 0.02
    beta: float = 1.5
    nsucc: int = 2
    temp: float = 2.0
    qk: float = 1.2
    ctx: float = 1.0
    emb: float = 0.5
    prompts: int = 16
    prompt_tokens: int = 128

    def __post_init__(self) -> None:
        lowest = {field.name: 1 for field in fields(self)}
        lowest |= {"layers": 2, "seed": 0, "vocab": MIN_VOCAB, "head_dim": 2, "context": 64}
        self.check(lowest | {"middle_layers": 0})
        if self.format not in FORMATS:
            raise ConfigError(f"format={self.format!r}: {suggest(self.format, FORMATS)}")
        if self.agree >= 1:
            raise ConfigError(f"agree={self.agree} is out of range: give less than 1, or 0 for eps")
        if self.prompt_tokens >= self.context:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens} leaves no room in context={self.context}"
            )
        if self.is_packed:
            self._check_packed()
        else:
            self._check_scaled()

    @property
    def is_packed(self) -> bool:
        """True if weights are drawn in the form in which they are stored (`packed_pair`)."""
        return bool(self.family or self.experts or self.draft_shape or self.format != "bfloat16")

    @property
    def draft(self) -> ModelShape:
        """The shape of the draft model of a packed pair."""
        if self.draft_shape:
            named = named_shape(self.draft_shape)
            known = {field.name for field in fields(ModelShape)}
            sizes = {name: value for name, value in named.items() if name in known}
            return ModelShape(**sizes | {"vocab": self.vocab, "context": self.context})
        hidden = min(self.hidden, DRAFT_HIDDEN)
        head_dim = min(hidden, DRAFT_HEAD_DIM)
        return ModelShape(
            family="llama",
            layers=self.draft_layers,
            hidden=hidden,
            heads=hidden // head_dim,
            kv_heads=1,
            head_dim=head_dim,
            intermediate=4 * hidden,
            vocab=self.vocab,
            context=self.context,
        )

    def _check_packed(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in OF_SCALED_PAIRS:
            if getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"{name} is an option of pairs whose draft model is the start of the target:"
                    " Llamas in bfloat16 without family, experts or draft_shape"
                )
        if self.format == "mxfp4" and not self.experts:
            raise ConfigError("format=mxfp4 is one of experts: use q4_k_m for a dense model")
        draft = self.draft
        if self.format == "bfloat16":
            for shape, option in ((self, "format=q8_0"), (draft, "another draft_shape")):
                if shape.architecture in GGUF_ONLY:
                    raise ConfigError(
                        f"{shape.architecture} is not written in bfloat16: use {option}"
                    )
            return
        for shape in (self, draft):
            widths = {"hidden": shape.hidden, "heads * head_dim": shape.heads * shape.head_dim}
            if shape.experts:
                widths["expert_size"] = shape.expert_size
            if shape.shared_expert_size:
                widths["shared_expert_size"] = shape.shared_expert_size
            if shape.linear_heads:
                widths["linear_heads * linear_head_dim"] = (
                    shape.linear_heads * shape.linear_head_dim
                )
            if shape.architecture not in MIXTURES:
                widths["intermediate"] = shape.intermediate
            for name, width in widths.items():
                if width % BLOCK:
                    raise ConfigError(
                        f"{name}={width} is no multiple of {BLOCK}, the size of a block"
                    )

    def _check_scaled(self) -> None:
        if self.draft_layers >= self.layers:
            raise ConfigError(
                f"draft_layers={self.draft_layers} is not less than layers={self.layers}:"
                " the draft model is the start of the target"
            )
        if self.middle_layers and not self.draft_layers < self.middle_layers < self.layers:
            raise ConfigError(
                f"middle_layers={self.middle_layers} is not between"
                f" draft_layers={self.draft_layers} and layers={self.layers}"
            )
        if self.agree and not self.eps:
            raise ConfigError("eps=0 makes the models equal: give another start, or agree=0")
