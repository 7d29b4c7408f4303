"""Whether a drafter fits a target: one check for each thing that must agree, from headers and
configurations alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forerun.catalogue.facts import Facts
from forerun.catalogue.layout import layer_of, refusal
from forerun.catalogue.survey import DRAFT_SHARE
from forerun.draft.block.formats import as_speculators, is_block
from forerun.draft.eagle.formats import read_dialect
from forerun.draft.registry import Json, inner
from forerun.errors import LoadError, shown
from forerun.models.config import is_integer
from forerun.models.files import LABEL, title

LEVELS = ("medusa", "mlp")  # drafts by heads, one a level
LARGEST = 1 << 31  # of any size in a configuration


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: whether it is as it must be (None: it cannot be told), and
    why."""

    name: str
    ok: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """A target as its drafters see it before it is loaded."""

    name: str
    hidden: int
    layers: int
    vocab: int
    parameters: int = 0
    bytes: int = 0
    vocabulary: str = ""


def sizes_of(target: Facts) -> Sizes:
    """The sizes of a target. Raises LoadError where its configuration does not say them."""
    raw = target.raw | inner(target.raw, "text_config")
    hidden, layers, vocab = (
        _whole(raw, *names)
        for names in (("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("vocab_size",))
    )
    if not (hidden and layers and vocab):
        raise LoadError(
            f"{target.name} is no target: its configuration lacks a hidden size, layers or a vocabulary"
        )
    return Sizes(
        target.name, hidden, layers, vocab, target.parameters, target.bytes, target.vocabulary
    )


def same_model(name: str, other: str) -> bool:
    """Whether two names mean one model, whatever its format or quantisation."""
    return bool(name and other) and bare(name) == bare(other)


def bare(name: str) -> str:
    """The name of a model without owner, format and quantisation, in small letters."""
    if name.startswith("ollama:"):
        name = name.removeprefix("ollama:").removesuffix(":latest").replace(":", "-")
    tagged = re.fullmatch(r"(.*/.*):[\w.-]+", name)
    short = LABEL.sub("", f"{title(tagged[1] if tagged else name)}.").rstrip(".-_")
    return re.sub(r"[-_.](gguf|gptq|awq|fp8|int4|int8|bnb|4bit|8bit)$", "", short.lower())


def checks(drafter: Facts, target: Sizes | None) -> list[Check]:
    """What was looked at, whether forerun can draft with it last; without a target only what needs
    none."""
    reason = refusal(drafter)
    able = Check(
        "forerun",
        not reason,
        reason or f"forerun drafts with it: --draft {drafter.kind.draft}:{drafter.name}",
    )
    if target is None:
        return [able]
    found = list(
        _of_models(drafter, target)
        if drafter.kind.family in ("lm", "pard")
        else _of_heads(drafter, target)
    )
    if able.ok and not fits(found):
        able = Check(
            "forerun",
            True,
            f"forerun reads drafters of this kind, but not this one for {target.name}",
        )
    return [*found, able]


def fits(found: Sequence[Check]) -> bool:
    """Whether nothing speaks against a drafter."""
    return all(check.ok is not False for check in found)


def _of_models(drafter: Facts, target: Sizes) -> Iterator[Check]:
    """An ordinary model: its tokens must mean the same, and it must be smaller."""
    own = _whole(drafter.raw, "vocab_size")
    same = bool(drafter.vocabulary) and drafter.vocabulary == target.vocabulary
    if same:
        text = "the same tokenizer file as the target's"
    elif not own:
        text = "its config.json says no vocab_size"
    elif abs(own - target.vocab) > max(own, target.vocab) // 50:
        text = f"another vocabulary ({own} tokens, the target {target.vocab}): it drafts through text, so less is accepted"
    else:
        text = f"{own} tokens, the target {target.vocab}: whether they mean the same is seen when both are loaded"
    yield Check("vocabulary", same or None, text)
    sizes = (drafter.parameters, target.parameters)
    mine, theirs = sizes if all(sizes) else (drafter.bytes, target.bytes)
    if mine and theirs:
        share = (
            f"it has {mine / theirs:.0%} of the target's {'parameters' if all(sizes) else 'bytes'}"
        )
        small = mine <= theirs * DRAFT_SHARE
        yield Check(
            "size", small, share if small else f"{share}, over {DRAFT_SHARE:.0%}, so it cannot pay"
        )


def _of_heads(drafter: Facts, target: Sizes) -> Iterator[Check]:
    """A drafter that reads the target's hidden states."""
    made_for = drafter.made_for
    if made_for and not same_model(made_for, target.name):
        yield Check(
            "target", None, f"it was made for {made_for}: for {target.name} it may draft badly"
        )
    elif made_for:
        yield Check("target", True, f"it was made for {made_for}")
    yield from _vocabulary(drafter, target)
    yield from _hidden(drafter, target)
    yield from _layers(drafter, target)
    yield from _embedding(drafter, target)


def _vocabulary(drafter: Facts, target: Sizes) -> Iterator[Check]:
    raw = drafter.raw
    said = _whole(layer_of(raw), "vocab_size")
    # an EAGLE-3 head may leave out the padding at the end of a vocabulary, other heads may not
    if said and (said > target.vocab if drafter.kind.draft == "eagle3" else said != target.vocab):
        yield Check("vocabulary", False, f"it is for {said} tokens, the target has {target.vocab}")
        return
    small = _whole(raw, "draft_vocab_size") or _rows(drafter, "lm_head.weight")
    if not small or small >= (said or target.vocab):
        yield Check(
            "vocabulary",
            bool(said) or None,
            f"{said or 'unsaid'} tokens, the target has {target.vocab}",
        )
        return
    named = _rows(drafter, "d2t")
    if drafter.shapes and named != small:
        yield Check(
            "vocabulary",
            False,
            f"it says {small} tokens, but d2t, which tells which, has {named or 'none'}",
        )
    else:
        yield Check("vocabulary", True, f"it says {small} of the target's {target.vocab} tokens")


def _hidden(drafter: Facts, target: Sizes) -> Iterator[Check]:
    said = _whole(drafter.raw, "target_hidden_size")
    if drafter.kind.draft == "mlp":
        said = _whole(drafter.raw, "input_hidden_dim", "emb_dim")
    if drafter.kind.family in (
        "medusa",
        "mtp",
        "eagle",
    ):  # they compute in states of the target's size
        said = said or _whole(layer_of(drafter.raw), "hidden_size")
    if said:
        yield Check(
            "hidden size",
            said == target.hidden,
            f"it reads states of {said}, the target has {target.hidden}",
        )


def _layers(drafter: Facts, target: Sizes) -> Iterator[Check]:
    try:
        ids = aux_hidden_layers(drafter, target)
    except LoadError as error:
        yield Check("layers", False, str(error))
        return
    if ids is None:
        return
    if not ids or len(set(ids)) < len(ids) or not all(0 <= i <= target.layers for i in ids):
        text = f"it reads the hidden states {list(ids)}, not different numbers from 0 to {target.layers}"
        yield Check("layers", False, f"{text}, the target's layers")
    else:
        yield Check(
            "layers", True, f"it reads the hidden states {list(ids)} of 0 to {target.layers}"
        )
    width, fused = _columns(drafter, "fc.weight"), len(ids) * target.hidden
    if width:
        text = f"fc.weight reads {width} numbers, {len(ids)} states of {target.hidden} have {fused}"
        yield Check("fusion", width == fused, text)


def aux_hidden_layers(drafter: Facts, target: Sizes) -> tuple[int, ...] | None:
    """The target's hidden states that a drafter reads, i being what enters layer i; None where it
    reads the last alone, or nobody knows. Raises LoadError."""
    raw, kind = drafter.raw, drafter.kind
    if kind.draft == "eagle3":
        return read_dialect(raw, target.layers).aux_hidden_layers
    name = "aux_hidden_state_layer_ids"
    ids = (as_speculators(raw) if is_block(raw) else raw).get(name)
    if ids is not None and (
        not isinstance(ids, list) or not ids or not all(is_integer(i) for i in ids)
    ):
        raise LoadError(
            f"{name} in config.json is {shown(ids)}, not a list of hidden states to read"
        )
    return None if ids is None else tuple(ids)


def _embedding(drafter: Facts, target: Sizes) -> Iterator[Check]:
    if drafter.kind.draft in LEVELS:
        return
    hidden, rows = (
        _whole(layer_of(drafter.raw), "hidden_size"),
        _rows(drafter, "embed_tokens.weight"),
    )
    if (
        rows
        and drafter.kind.draft == "block"
        and hidden != target.hidden
        and not _rows(drafter, "lm_head.weight")
    ):
        yield Check(
            "embedding",
            False,
            f"it has its own, but takes the target's head, of {target.hidden} numbers",
        )
    elif rows:
        enough = rows <= target.vocab
        yield Check(
            "embedding", enough, f"it has its own, of {rows} tokens, the target has {target.vocab}"
        )
    elif hidden and drafter.shapes:
        text = f"it takes the target's, of {target.hidden} numbers a token, for states of {hidden}"
        yield Check("embedding", hidden == target.hidden, text)


def _shape(drafter: Facts, name: str) -> tuple[int, ...]:
    return drafter.shapes.get(name) or drafter.shapes.get(f"model.{name}") or ()


def _rows(drafter: Facts, name: str) -> int:
    return next(iter(_shape(drafter, name)), 0)


def _columns(drafter: Facts, name: str) -> int:
    shape = _shape(drafter, name)
    return shape[1] if len(shape) == 2 else 0


def _whole(raw: Json, *names: str) -> int:
    """The first of these that is a size; 0 where none is."""
    found = [raw.get(name) for name in names]
    return next(
        (n for n in found if isinstance(n, int) and not isinstance(n, bool) and 0 < n <= LARGEST), 0
    )
