"""Which layers a model leaves out where it drafts for itself (`self:layers=auto`): remembered, or found now.

They are looked for once for each model, on prompts that are given or on a few of our own, and kept in a small file: the
numbers of layers, and what they were worth. It holds no text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.draft.skipping import Kept, continued, search
from forerun.errors import CapacityError, ForerunError, shown
from forerun.models.config import note
from forerun.models.packed_cache import cache_folder, model_digest
from forerun.models.text import Tokenizer
from forerun.progress import Tell, nothing
from forerun.runner import Runner
from forerun.whole import recalled, write_whole

VERSION = "skips 1"  # of what a file holds
OWN = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words of a text.",
    "Tom has 12 apples and buys 3 bags of 8. How many apples has he now?",
    "Write a short letter that cancels a hotel room.",
)
SAID, SECONDS, MOST = 64, 20.0, 8  # tokens behind each prompt; of searching; prompts
LONGEST = 512  # tokens of a prompt that are read


def layers_of(target: Runner, directory: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Those that this model keeps, as they were found before, or as they are found now on prompts of our own."""
    found = recall(target, directory)
    if found is None:
        found = find(target, directory, _own(tokenizer))
    note(
        f"self:layers=auto drafts with {len(found.layers)} of {target.decoder.config.layers} layers"
        f" ({written(found.layers)}), which say what all say at {found.agrees:.0%} of the places: at best"
        f" {found.times:.2f} times plain decoding"
    )
    return found.layers


def find(
    target: Runner, directory: Path, prompts: Sequence[Sequence[int]], seconds: float = SECONDS, tell: Tell = nothing
) -> Kept:
    """Look for them on what the model says to these prompts, and remember them. The model's cache must be empty. Raises
    CapacityError where it has no room for a prompt."""
    pages = target.cache.pages
    room = min(target.decoder.context, pages.count * pages.size) - SAID
    if room < 1:
        raise CapacityError(f"self:layers=auto needs room for {SAID + 1} tokens and more: set a larger kv_tokens")
    tell("writing texts to look for layers with")
    known = [prompt[-min(LONGEST, room) :] for prompt in prompts[:MOST]]
    found = search(target, continued(target, known, SAID, target.decoder.config.end_ids), seconds, tell)
    path = _place(target, directory)
    if path is not None:
        with suppress(OSError, ForerunError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(found)))
    return found


def recall(target: Runner, directory: Path) -> Kept | None:
    """What was found before; None where nothing was, or what is there is no such file."""
    path, count = _place(target, directory), target.decoder.config.layers

    def read(said: Any) -> Kept:
        layers, agrees, times = tuple(said["layers"]), float(said["agrees"]), float(said["times"])
        if not layers or list(layers) != sorted(set(layers) & set(range(count))):
            raise ValueError(f"these are no layers of {count}: {shown(layers)}")
        if not (0 <= agrees <= 1 and 0 < times < math.inf):
            raise ValueError(f"these are no figures: {agrees}, {times}")
        return Kept(layers, agrees, int(said["depth"]), times)

    return None if path is None else recalled(path, read)


def written(layers: Sequence[int]) -> str:
    """0-9,20 for the layers 0 to 9 and 20, as `self:layers=` takes them."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and spans[-1][-1] == layer - 1:
            spans[-1][-1:] = [layer] if len(spans[-1]) > 1 else [spans[-1][-1], layer]
        else:
            spans.append([layer])
    text = ",".join("-".join(map(str, span)) for span in spans)
    return f"{text}-{text}" if text.isdigit() else text  # a number alone says how many of the first


def _place(target: Runner, directory: Path) -> Path | None:
    folder = cache_folder()
    with suppress(OSError):
        if folder is not None:
            return folder / "layers" / f"{model_digest(directory, [VERSION, target.decoder.precision])}.json"
    return None


def _own(tokenizer: Tokenizer | None) -> list[list[int]]:
    """Our prompts in tokens; of a model without a tokenizer some tokens that are any."""
    if tokenizer is None:
        return [[i + 3] for i in range(len(OWN))]
    if tokenizer.has_chat_template:
        return [tokenizer.chat([{"role": "user", "content": text}]) for text in OWN]
    return [tokenizer.encode(text) for text in OWN]
