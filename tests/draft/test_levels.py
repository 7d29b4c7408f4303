"""Published heads, one a level: read from their files alone, they say what their families' formulas say.

Protects: the layouts of IBM's and Arctic's MLP speculators, Hydra and both kinds of Medusa; that drafted logits are
those of a naive twin for each node of chains and trees; that damaged directories are refused in one line.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, LoadError, SamplingParams
from forerun.catalogue.facts import facts_at
from forerun.catalogue.fit import checks, fits, sizes_of
from forerun.draft.base import Row
from forerun.draft.layers import with_native_products
from forerun.draft.level_heads import LevelHeads
from forerun.draft.levels import Levels
from forerun.draft.native_levels import NativeLevels
from forerun.draft.prefixed import Prefixed
from forerun.draft.registry import LEVELS, kind_of
from forerun.draft.stored import tensor_names
from forerun.draft.view import view_of
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.native import NativeDecoder
from forerun.types import BESIDE, SIXTEENTHS, Draft
from forerun.verify import Noise
from tests import tiny
from tests.draft import published
from tests.draft.published import Published, change, damage, random, target

FAMILIES: dict[str, tuple[str, Callable[[], Published]]] = {
    "IBM's": ("mlp", published.ibm),
    "IBM's, tied": ("mlp", lambda: published.ibm(tied=True, scaled=True)),
    "IBM's, of one level": ("mlp", lambda: published.ibm(levels=1, prefix="")),
    "Arctic's, recurrent": ("mlp", lambda: published.arctic("sum_rnn")),
    "Arctic's, not tied": ("mlp", lambda: published.arctic("sum_rnn", tied=False)),
    "Arctic's, with a cell": ("mlp", lambda: published.arctic("sum_lstm")),
    "Arctic's, gates apart": ("mlp", lambda: published.arctic("sum_lstm", shared=False)),
    "Hydra": ("hydra", published.hydra),
    "Hydra of one layer": ("hydra", lambda: published.hydra(layers=1, file="model.safetensors")),
    "Hydra, not grounded": ("hydra", lambda: published.hydra(grounded=False)),
    "Hydra++": ("hydra", lambda: published.hydra("prefix-mlp")),
    "Hydra++, not grounded": ("hydra", lambda: published.hydra("prefix-mlp", grounded=False)),
    "Medusa's authors'": ("medusa", published.medusa),
    "Medusa's, two layers": ("medusa", lambda: published.medusa(2, "medusa_head.", "medusa_lm_head.safetensors")),
    "vLLM's Medusa": ("medusa", published.medusa_of_vllm),
    "vLLM's, some tokens": ("medusa", lambda: published.medusa_of_vllm(said=40)),
    "vLLM's, rows of all": ("medusa", lambda: published.medusa_of_vllm(said=40, whole=True)),
    "vLLM's, all else": ("medusa", lambda: published.medusa_of_vllm(bias=True, shared=True, scale=0.5)),
}


def load(name: str, directory: Path) -> tuple[Published, LevelHeads]:
    draft, make = FAMILIES[name]
    made = make()
    return made, LEVELS[draft](made.write(directory), target())


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_node_has_the_logits_of_its_family(
    name: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, heads = load(name, tmp_path / "heads")
    published.assert_as_published(made, heads, width, monkeypatch)


@pytest.mark.parametrize("name", FAMILIES)
def test_files_tell_what_they_are_and_fit(name: str, tmp_path: Path) -> None:
    draft, make = FAMILIES[name]
    directory = make().write(tmp_path / "heads")
    assert kind_of(directory) == draft and tensor_names(directory)
    facts, wanted = facts_at(directory, "heads"), sizes_of(facts_at(tiny.family("llama"), "target"))
    found = checks(facts, wanted)
    assert facts.kind.draft == draft and fits(found) and f"--draft {draft}:heads" in found[-1].text


@pytest.mark.parametrize("name", ["IBM's", "Arctic's, with a cell", "Hydra", "Hydra++", "vLLM's, some tokens"])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_user_s_directory(name: str, kernels: str, tmp_path: Path) -> None:
    """Beside plain decoding, in chains and trees."""
    draft, make = FAMILIES[name]
    spec = f"{draft}:{make().write(tmp_path / 'heads')}"
    for width in (1, 2):
        llm = LLM(tiny.family("llama"), draft=spec, kv_tokens=512, kernels=kernels, width=width)
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
            drafted = llm.generate([5, 6, 7, 8], params, depth=3)[0]
            assert drafted.token_ids == llm.generate([5, 6, 7, 8], params, draft="off")[0].token_ids
            assert drafted.stats.by_source[draft].drafted > 20


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not compiled")
@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("name", ["IBM's", "Arctic's, with a cell", "Hydra", "Medusa's authors'"])
def test_native_products_are_those_of_torch(name: str, form: str, tmp_path: Path) -> None:
    native.start(2)
    _, heads = load(name, tmp_path / "heads")
    fast, tokens = with_native_products(heads, form), torch.tensor([3, 9])
    slow_state = fast_state = heads.enter(random(2, published.HIDDEN).float())
    for level in range(heads.levels):
        expected, slow_state = heads.step(level, slow_state, tokens)
        said, fast_state = fast.step(level, fast_state, tokens)
        assert (said - expected).norm() / expected.norm() < (0.05 if form == "int8" else 1e-5)


NATIVE = [name for name in FAMILIES if "a cell" not in name and "gates" not in name]


def rounds_of(name: str, directory: Path) -> Any:
    """The heads, what makes a native proposer of them in float32, rows, and what lets it draft for these."""
    native.start(2)
    draft, make = FAMILIES[name]
    path = tiny.family("llama")
    view = view_of(NativeDecoder(load_config(path), path, "float32", 256), form="float32")
    heads = LEVELS[draft](make().write(directory), view)

    def proposer(form: str | None = "float32") -> Any:
        target = replace(view, form=form)
        if heads.prefix is None:
            return Levels(draft, heads, target)
        return Prefixed(draft, heads, target, tokens=1024, page=4, slots=8)

    rows = [
        Row(slot, tuple(range(5 + slot, 12 + slot)), SamplingParams(temperature=t), Noise(slot, 6), depth)
        for slot, (depth, t) in enumerate(((2, 0.8), (1, 0.0), (9, 1.3), (3, 0.0)))
    ]
    states = [random(6, published.HIDDEN, seed=slot).float() for slot in range(len(rows))]

    def drafts(drafter: Any, rows: list[Row] = rows) -> list[Draft]:
        for row, shown in zip(rows, states, strict=True):
            drafter.open(row.slot, row.tokens)
            drafter.observe(row.slot, 0, {view.layers: shown})
        return drafter.propose(rows)

    return heads, proposer, rows, drafts


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not compiled")
@pytest.mark.parametrize("name", NATIVE)
def test_a_round_in_one_call_is_the_chain_level_by_level(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests, each with its own depth and temperature, on the native kernels and on torch."""
    heads, proposer, rows, drafts = rounds_of(name, tmp_path / "heads")
    calls, done = [], NativeLevels.round
    monkeypatch.setattr(NativeLevels, "round", lambda *a: (calls.append(a[1]), done(*a))[1])
    one_call, by_levels, torchs = proposer(), proposer(), proposer(None)
    by_levels.grower.native = None
    found = [drafts(each) for each in (one_call, by_levels, torchs)]
    assert len(calls) == 1 and len(calls[0]) == len(rows)
    assert found[0] == found[1] == found[2]
    assert [len(draft) - 1 for draft in found[0]] == [min(row.depth, heads.levels) for row in rows]
    assert len({token for draft in found[0] for token in draft.tokens[1:]}) > min(4, heads.levels)


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not compiled")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["IBM's", "Hydra", "Hydra++", "vLLM's, some tokens"])
def test_chains_end_where_they_are_not_sure_any_more(name: str, temperature: float, tmp_path: Path) -> None:
    """Behind the token with which the product of what its sixteenths stand for falls below the row's floor; beside them
    stand the likeliest of what was not said."""
    _, proposer, rows, drafts = rounds_of(name, tmp_path / "heads")
    rows = [replace(row, params=SamplingParams(temperature=temperature), depth=3) for row in rows]
    stands = array("f", [*(0.5 + i / 32 for i in range(16)), *(0.2 + i / 64 for i in range(16))])
    assert proposer().stops and proposer().beside == BESIDE
    whole = drafts(proposer(), [replace(row, stands=stands) for row in rows])
    kept = drafts(proposer(), [replace(row, stands=stands, floor=0.95) for row in rows])
    ended = 0
    for all_of_it, draft in zip(whole, kept, strict=True):
        chain = [node for node in range(1, len(all_of_it)) if all_of_it.sure[node - 1] < SIXTEENTHS]
        chance, wanted = 1.0, []
        for node in chain:
            if chance < 0.95:
                break
            wanted.append(all_of_it.tokens[node])
            chance *= min(stands[all_of_it.sure[node - 1]], 1.0)
        found = [draft.tokens[n] for n in range(1, len(draft)) if draft.sure[n - 1] < SIXTEENTHS]
        assert found == wanted and len(draft) - 1 <= len(found) + BESIDE
        ended += len(wanted) < len(chain)
    assert ended, "no chain ended early: nothing was tested"


BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a level less": ("IBM's", lambda d: damage(d, "speculator.emb.2.weight"), "emb.2.weight"),
    "another shape": ("IBM's", lambda d: damage(d, "speculator.proj.0.weight", torch.zeros(3, 3)), r"\[3, 3\]"),
    "more than it says": ("IBM's", lambda d: change(d, n_predict=2), "which no MLP speculator"),
    "too many levels": ("IBM's", lambda d: change(d, n_predict=65), "from 1 to 64"),
    "no levels": ("IBM's", lambda d: change(d, n_predict=True), "n_predict in config.json is True"),
    "another class": ("IBM's", lambda d: change(d, architectures=["GPT"]), "its architecture is"),
    "an infinite number": (
        "IBM's", lambda d: damage(d, "speculator.ln.0.bias", torch.full((24,), torch.inf)), "not finite",
    ),
    "no flag": ("IBM's", lambda d: change(d, tie_weights="yes"), "true or false"),
    "no gate": ("Arctic's, with a cell", lambda d: damage(d, "output_proj.1.weight"), "output_proj.1.weight"),
    "several sizes": ("Arctic's, with a cell", lambda d: change(d, inner_dim="24.24"), "only one size"),
    "unequal sizes": ("Arctic's, with a cell", lambda d: change(d, emb_dim="25"), "only equal ones"),
    "another method": ("Arctic's, with a cell", lambda d: change(d, method="gru"), "sum_rnn and sum_lstm"),
    "cells that are not tied": ("Arctic's, with a cell", lambda d: change(d, tie_weights=False), "tie_weights"),
    "no projection": ("Hydra", lambda d: damage(d, "hydra_mlp.1.0.res_connection.weight"), "first.1.res_connection"),
    "layers that differ": (
        "Hydra", lambda d: damage(d, "hydra_mlp.1.2.linear.bias", torch.zeros(32)), "all but the first are one",
    ),
    "another kind of Hydra": ("Hydra", lambda d: change(d, hydra_head_arch="cross-attn"), "only mlp and prefix-mlp"),
    "an earlier state": ("Hydra", lambda d: change(d, hidden_state_offset=1), "hidden_state_offset"),
    "more layers": ("Hydra", lambda d: change(d, hydra_num_layers=1), "which no set of Hydra heads"),
    "too many layers": ("Hydra", lambda d: change(d, hydra_num_layers=1000), "from 1 to 64"),
    "no layer before them": (
        "Hydra++", lambda d: damage(d, "prefix_embeding_layer.layers.0.mlp.up_proj.weight"), "up_proj",
    ),
    "no head": ("Medusa's authors'", lambda d: damage(d, "1.1.weight"), "lm_heads.1.weight"),
    "another shape of a head": ("Medusa's authors'", lambda d: damage(d, "1.1.weight", torch.zeros(3, 3)), r"\[3, 3\]"),
    "no map": ("vLLM's, some tokens", lambda d: damage(d, "token_map"), "no token_map of 40"),
    "a map of others": (
        "vLLM's, some tokens", lambda d: damage(d, "token_map", torch.arange(40) + 40), "40 different tokens of 64",
    ),
    "too many heads": ("vLLM's Medusa", lambda d: change(d, num_heads=9), "has no blocks.3"),
    "no scale": ("vLLM's Medusa", lambda d: change(d, logit_scale="1"), "logit_scale"),
    "nothing shared": (
        "vLLM's, all else", lambda d: damage(d, "lm_heads.0.weight"), "has no lm_heads.0.weight",
    ),
    "no configuration": ("Hydra", lambda d: (d / "config.json").unlink(), "no config.json"),
    "no file": ("Hydra", lambda d: (d / "hydra_lm_head.pt").unlink(), "neither"),
    "garbage": ("Hydra", lambda d: (d / "hydra_lm_head.pt").write_bytes(b"x" * 99), "download it again"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    name, breaking, says = BROKEN[case]
    draft, make = FAMILIES[name]
    directory = make().write(tmp_path / "heads")
    breaking(directory)
    with pytest.raises(LoadError, match=says) as error:
        LEVELS[draft](directory, target())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["IBM's", "Hydra", "Medusa's authors'", "vLLM's Medusa"])
@pytest.mark.parametrize("other", [{"hidden": 16}, {"vocab": 99}])
def test_heads_of_another_target_are_refused(name: str, other: dict[str, int], tmp_path: Path) -> None:
    draft, make = FAMILIES[name]
    view = replace(target(), **other)
    with pytest.raises(LoadError, match="trained for it"):
        Levels(draft, LEVELS[draft](make().write(tmp_path / "heads"), view), view)


def test_a_layer_before_hydra_s_heads_is_a_llama_s(tmp_path: Path) -> None:
    directory = published.hydra("prefix-mlp").write(tmp_path / "heads")
    with pytest.raises(LoadError, match="the target is of gemma2"):
        LEVELS["hydra"](directory, view_of(tiny.decoder(tiny.family("gemma2"))))


def test_nothing_pickled_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    directory = published.hydra().write(tmp_path / "heads")
    torch.save({"hydra_lm_head.0.weight": Evil()}, directory / "hydra_lm_head.pt")
    assert not tensor_names(directory)
    with pytest.raises(LoadError, match="cannot be read"):
        LEVELS["hydra"](directory, target())
    assert not (tmp_path / "ran").exists()
