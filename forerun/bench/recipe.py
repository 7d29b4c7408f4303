"""Parameters of a random-weight model pair. Imports no torch, for a quick `--help`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from forerun.errors import ConfigError
from forerun.utils import check_numbers

SPECIAL = ("<s>", "</s>", "<pad>")  # tokens 0, 1 and 2
MIN_VOCAB = 256 + len(SPECIAL)  # every byte needs a token


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecipe:
    """Target, draft model, agreement and prompts; the defaults are those of docs/performance.md.

    Args:
        layers: Number of layers of the target.
        draft_layers: Number of layers of the draft model, which are the target's first ones.
        middle_layers: Number of layers of a third model between the two, for cascades; 0 makes
            none.
        hidden: Width of the residual stream.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Channels of a head.
        intermediate: Width of the MLP.
        vocab: Vocabulary size.
        context: Maximum number of positions.
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

    layers: int = 24
    draft_layers: int = 3
    middle_layers: int = 0
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 2816
    vocab: int = 8192
    context: int = 2048
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
        check_numbers(self, lowest | {"middle_layers": 0})
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
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd: rotary embeddings rotate pairs")
        if self.agree and not self.eps:
            raise ConfigError("eps=0 makes the models equal: give another start, or agree=0")
        if self.agree >= 1:
            raise ConfigError(f"agree={self.agree} is out of range: give less than 1, or 0 for eps")
        if self.prompt_tokens >= self.context:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens} leaves no room in context={self.context}"
            )
