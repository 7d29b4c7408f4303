"""Published heads, one a level: their files tell what they are, and damaged ones are refused in one
line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LoadError
from forerun.catalog.facts import facts_at
from forerun.catalog.fit import checks, fits, sizes_of
from forerun.draft.head_files import tensor_names
from forerun.draft.head_modules import with_native_products
from forerun.draft.registry import MEDUSA_LOADERS, kind_of
from forerun.kernels import native
from tests import tiny
from tests.draft import published
from tests.draft.heads import CASES, SHAPES
from tests.draft.published import change, damage, random
from tests.draft.twins import target

FAMILIES = {
    f"{kind}: {shape}": SHAPES[kind][shape]["made"] for kind, shape in CASES if kind in MEDUSA_LOADERS
}


@pytest.mark.parametrize("name", FAMILIES)
def test_files_tell_what_they_are_and_fit(name: str, tmp_path: Path) -> None:
    made = FAMILIES[name]()
    directory, draft = made.write(tmp_path / "heads"), made.draft
    assert kind_of(directory) == draft and tensor_names(directory)
    facts, wanted = facts_at(directory, "heads"), sizes_of(facts_at(tiny.family("llama"), "target"))
    found = checks(facts, wanted)
    assert facts.kind.draft == draft and fits(found) and f"--draft {draft}:heads" in found[-1].text


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not compiled")
@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("name", ["mlp: IBM's", "medusa: its authors'"])
def test_native_products_are_those_of_torch(name: str, form: str, tmp_path: Path) -> None:
    native.start(2)
    made = FAMILIES[name]()
    heads = MEDUSA_LOADERS[made.draft](made.write(tmp_path / "heads"))
    heads.attach(target())
    fast, tokens = with_native_products(heads, form), torch.tensor([3, 9])
    slow_state = fast_state = heads.enter(random(2, published.HIDDEN).float())
    for level in range(heads.levels):
        expected, slow_state = heads.step(level, slow_state, tokens)
        said, fast_state = fast.step(level, fast_state, tokens)
        assert (said - expected).norm() / expected.norm() < (0.05 if form == "int8" else 1e-5)


IBM, ARCTIC = "mlp: IBM's", "mlp: Arctic's, recurrent"
MEDUSA, SOME = "medusa: its authors'", "medusa: vLLM's, some tokens"
BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a level less": (IBM, lambda d: damage(d, "speculator.emb.2.weight"), "emb.2.weight"),
    "another shape": (IBM, lambda d: damage(d, "speculator.proj.0.weight", torch.zeros(3, 3)), r"\[3, 3\]"),
    "more than it says": (IBM, lambda d: change(d, n_predict=2), "which no MLP speculator"),
    "too many levels": (IBM, lambda d: change(d, n_predict=65), "from 1 to 64"),
    "no levels": (IBM, lambda d: change(d, n_predict=True), "n_predict in config.json is True"),
    "another class": (IBM, lambda d: change(d, architectures=["GPT"]), "its architecture is"),
    "an infinite number": (
        IBM, lambda d: damage(d, "speculator.ln.0.bias", torch.full((24,), torch.inf)), "not finite",
    ),
    "no flag": (IBM, lambda d: change(d, tie_weights="yes"), "true or false"),
    "several sizes": (ARCTIC, lambda d: change(d, inner_dim="24.24"), "only one size"),
    "unequal sizes": (ARCTIC, lambda d: change(d, emb_dim="25"), "only equal ones"),
    "a cell": (ARCTIC, lambda d: change(d, method="sum_lstm"), "only sum_rnn is supported"),
    "another method": (ARCTIC, lambda d: change(d, method="gru"), "only sum_rnn is supported"),
    "no head": (MEDUSA, lambda d: damage(d, "1.1.weight"), "lm_heads.1.weight"),
    "another shape of a head": (MEDUSA, lambda d: damage(d, "1.1.weight", torch.zeros(3, 3)), r"\[3, 3\]"),
    "no map": (SOME, lambda d: damage(d, "token_map"), "no token_map of 40"),
    "a map of others": (
        SOME, lambda d: damage(d, "token_map", torch.arange(40) + 40), "40 different tokens of 64",
    ),
    "too many heads": ("medusa: vLLM's", lambda d: change(d, num_heads=9), "has no blocks.3"),
    "no scale": ("medusa: vLLM's", lambda d: change(d, logit_scale="1"), "logit_scale"),
    "nothing shared": (
        "medusa: vLLM's, all else", lambda d: damage(d, "lm_heads.0.weight"), "has no lm_heads.0.weight",
    ),
    "no configuration": (MEDUSA, lambda d: (d / "config.json").unlink(), "no config.json"),
    "no file": (MEDUSA, lambda d: (d / "medusa_lm_head.pt").unlink(), "neither"),
    "garbage": (MEDUSA, lambda d: (d / "medusa_lm_head.pt").write_bytes(b"x" * 99), "download it again"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    name, breaking, says = BROKEN[case]
    made = FAMILIES[name]()
    directory = made.write(tmp_path / "heads")
    breaking(directory)
    with pytest.raises(LoadError, match=says) as error:
        MEDUSA_LOADERS[made.draft](directory)
    assert "\n" not in str(error.value)


def test_nothing_pickled_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    directory = published.medusa().write(tmp_path / "heads")
    torch.save({"0.1.weight": Evil()}, directory / "medusa_lm_head.pt")
    assert not tensor_names(directory)
    with pytest.raises(LoadError, match="cannot be read"):
        MEDUSA_LOADERS["medusa"](directory)
    assert not (tmp_path / "ran").exists()
