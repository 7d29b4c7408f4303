"""What a measuring pair is made of: every choice, in one frozen dataclass. No torch here: `--help`
needs it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from forerun.errors import ConfigError
from forerun.utils import check_numbers

SPECIAL = ("<s>", "</s>", "<pad>")  # tokens 0, 1 and 2
SMALLEST_VOCAB = 256 + len(SPECIAL)  # every byte must have a token


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecipe:
    """The target, its draft, their agreement and the prompts. The defaults are the pair of
    docs/performance.md.

    Args:
        layers: layers of the target.
        draft_layers: layers of the draft: the target's first ones.
        middle_layers: of a third model between the two, for cascades: the target's first ones; 0
            makes none.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: channels of a head.
        intermediate: width of the MLP.
        vocab: tokens.
        context: positions the models claim to serve.
        seed: of the random weights; the same seed gives the same pair.
        agree: share of the target's greedy tokens that the draft should say too; 0 keeps eps as it
            is given.
        eps: scale of what the target's later layers add, the first to be tried.
        tolerance: how far from agree is near enough.
        beta: how strongly a token calls for its successors.
        nsucc: likely successors of a token.
        temp: scale of the logits.
        qk: standard deviation of queries and keys, which sharpens attention.
        ctx: scale of what the draft's layers add.
        emb: standard deviation of the embeddings.
        prompts: how many prompts to write.
        prompt_tokens: tokens of each prompt.
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
        lowest = {
            "layers": 2,
            "seed": 0,
            "vocab": SMALLEST_VOCAB,
            "head_dim": 2,
            "context": 64,
            "middle_layers": 0,
        }
        check_numbers(self, {field.name: 1 for field in fields(self)} | lowest)
        if self.draft_layers >= self.layers:
            raise ConfigError(
                f"draft_layers={self.draft_layers} is not under layers={self.layers}: the draft is the target's start"
            )
        if self.middle_layers and not self.draft_layers < self.middle_layers < self.layers:
            raise ConfigError(
                f"middle_layers={self.middle_layers} is not between draft_layers={self.draft_layers} and"
                f" layers={self.layers}: the middle model has more of the target's first layers than the draft"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads={self.heads} cannot share kv_heads={self.kv_heads}: give a divisor"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim={self.head_dim} is odd: rotary embeddings turn channels in pairs"
            )
        if self.agree and not self.eps:
            raise ConfigError(
                "eps=0 makes the models one: give another to begin the search with, or agree=0"
            )
        if self.agree >= 1:
            raise ConfigError(
                f"agree={self.agree} is out of range: give a share under 1, or 0 to keep eps"
            )
        if self.prompt_tokens >= self.context:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens} leaves no room in context={self.context}"
            )
