"""Two vocabularies beside one another: what tokens mean as bytes, and which of them a target and its drafter share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.load import named
from forerun.models.text import Tokenizer

BEFORE = "\n"  # text that nothing joins: what is encoded behind it is spelled as in the middle of a text


class Words:
    """A tokenizer as its model sees it.

    Attributes:
        meanings: the bytes of each of the model's tokens; none where it has no text.
        special: its special tokens, with their text.
        opening: what stands before every text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """`vocab` is how many tokens the model has."""
        self.tokenizer = tokenizer
        self.meanings = tokenizer.spellings(vocab)
        self.special = {token: tokenizer.piece(token) for token in tokenizer.special if token < vocab}
        whole, own = tokenizer.encode("a"), tokenizer.encode("a", special=False)
        found = [i for i in range(len(whole)) if whole[i : i + len(own)] == own]
        self.opening = [token for token in whole[: found[0]] if token < vocab] if found else []
        self._before = tokenizer.encode(BEFORE, special=False)

    def encode(self, texts: Sequence[str], begins: bool = False) -> list[list[int]]:
        """The tokens of parts of a text, each by itself; the first of them begins it if `begins`."""
        whole = [text if begins and i == 0 else BEFORE + text for i, text in enumerate(texts)]
        encoded, skip = self.tokenizer.encode_all(whole), len(self._before)
        for i, text in enumerate(texts):
            if begins and i == 0:
                continue
            behind = encoded[i][:skip] == self._before
            encoded[i] = encoded[i][skip:] if behind else self.tokenizer.encode(text, special=False)
        return encoded

    def first(self, token: int) -> bytes:
        """The bytes of the token that begins a text: SentencePiece writes a space there that is none."""
        meaning = self.meanings[token]
        is_bare = meaning.startswith(b" ") and not self.tokenizer.decode([token]).startswith(" ")
        return meaning[1:] if is_bare else meaning

    def by_meaning(self) -> dict[bytes | str, int]:
        """Tokens by their bytes, special ones by their text. Of several that mean the same it is the one that is
        written: single bytes of SentencePiece stand back behind characters."""
        found: dict[bytes | str, int] = {}
        spare = [len(m) == 1 and self.tokenizer.piece(t).startswith("<0x") for t, m in enumerate(self.meanings)]
        for token in sorted(range(len(self.meanings)), key=spare.__getitem__):
            meaning = self.special.get(token) or self.meanings[token]
            if meaning:
                found.setdefault(meaning, token)
        return found


class Shared:
    """The tokens that two vocabularies share: those of the same bytes, and special ones of the same text.

    Attributes:
        to_target: for each of the drafter's tokens the target's that means the same, -1 where there is none.
        to_draft: for each of the target's tokens the drafter's.
        share: what part of the target's tokens is shared, and what part of the drafter's.
        told: that in words.
    """

    def __init__(self, target: Words, drafter: Words) -> None:
        self.target, self.drafter = target, drafter
        ours, theirs = target.by_meaning(), drafter.by_meaning()
        pairs = sorted((ours[meaning], theirs[meaning]) for meaning in ours.keys() & theirs.keys())
        self.to_target, self.to_draft = [-1] * len(drafter.meanings), [-1] * len(target.meanings)
        for own, other in pairs:
            self.to_draft[own], self.to_target[other] = other, own
        self.share = len(pairs) / max(len(ours), 1), len(pairs) / max(len(theirs), 1)
        self.told = (
            f"the draft model has another vocabulary: {len(pairs):,} of its {len(theirs):,} tokens"
            f" ({self.share[1]:.0%}) are the target's too"
        ).replace("%", " %")
        self._own = torch.tensor([own for own, _ in pairs], dtype=torch.int64)
        self._other = torch.tensor([other for _, other in pairs], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._own)

    def across(self, scores: Tensor) -> Tensor:
        """The drafter's scores of shared tokens as scores of the target's; nothing for all others. [M, D] -> [M, V]"""
        found = scores.new_full((len(scores), len(self.to_draft)), -torch.inf)
        found[:, self._own.to(scores.device)] = scores[:, self._other.to(scores.device)]
        return found

    def others(self, scores: Tensor) -> Tensor:
        """The drafter's scores of what is not shared alone. [M, D] -> [M, D]"""
        return scores.index_fill(-1, self._other.to(scores.device), -torch.inf)


def same_tokens(one: Tokenizer, other: Tokenizer, vocab: int) -> bool:
    """Whether the ids below `vocab` mean the same in both, the padding in GGUF files aside."""
    return named(one, vocab) == named(other, vocab)
