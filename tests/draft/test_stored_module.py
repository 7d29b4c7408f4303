"""Modules from `forerun train` in the GGUF files of their targets: what a copy holds, its use, and
errors for modules that cannot be stored or used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from forerun import LLM, LoadError, SamplingParams
from forerun.catalog.facts import facts_at
from forerun.catalog.search import find_local
from forerun.catalog.survey import survey
from forerun.draft import kinds
from forerun.draft.eagle import own_module
from forerun.draft.eagle.module import save_head
from forerun.draft.eagle.mtp import MtpModule, save_module
from forerun.draft.eagle.mtp_formats import has_own_module
from forerun.draft.eagle.own_module import load_own_module, store_module
from forerun.draft.head_modules import layer_like
from forerun.draft.proposer import view_of
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.models.gguf.config import TRAINED_BLOCK
from forerun.models.gguf.container import NewTensor, append_tensors, open_gguf
from forerun.models.local import LocalModel
from tests import tiny
from tests.cli.test_main import run
from tests.draft.heads import head_of
from tests.draft.helpers import needs_native, refused
from tests.gguf_files import finish, written, written_with_module

# dense models of three kinds of norms, a hybrid, and models with modules of their own
TARGETS = (
    "llama/F32",
    "qwen3/Q8_0",
    "gemma2/q4_1",
    "qwen3_5/Q8_0",
    "qwen3_5/q4_1+",
    "glm4_moe/F32+",
)


def target_file(name: str) -> Path:
    """Return a GGUF file; + marks one that comes with a module."""
    family, kind = name.rstrip("+").split("/")
    return (written_with_module if name.endswith("+") else written)(family, kind).path


def trained(
    directory: Path, target: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """Write a module for a model as `forerun train --recipe mtp` does."""
    config = load_config(target)
    torch.manual_seed(3)
    module = MtpModule(replace(layer_like(config, 48), **changes), config.layers)
    save_module(module, directory, str(target), dtype)
    return directory


@needs_native
@pytest.mark.parametrize("name", TARGETS)
def test_a_stored_module_drafts_what_it_drafts_from_a_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` prefers it to a module that the file came with; the target is unchanged."""
    monkeypatch.setattr(kinds, "HEAD_PAYS", (native.start(),))
    path, out = target_file(name), tmp_path / "both.gguf"
    module = trained(tmp_path / "module", path)
    store_module(module, path, out)
    assert load_config(out) == load_config(path)
    assert facts_at(out, "x").raw["num_hidden_layers"] == load_config(path).layers
    (listed,) = survey([LocalModel("x", out, "here")])
    assert listed.draft == "suffix+mtp"
    found, _ = find_local(str(out))
    own = [one for one in found if one.origin == "checkpoint"]
    assert [(one.draft, one.reason) for one in own] == [(f"mtp:{out}", "")]
    params = SamplingParams.pure(max_tokens=30, temperature=0.8, seed=5, ignore_eos=True)
    prompts, results = [[5, 6, 7], [3, 1, 4, 1, 5]], []
    for place, draft in ((path, f"mtp:{module}"), (out, "auto"), (out, f"mtp:{out}")):
        llm = LLM(place, draft=draft, kv_tokens=1024)
        assert llm.draft == ("suffix+mtp" if draft == "auto" else "mtp")
        plain = [c.token_ids for c in llm.generate(prompts, params, draft="off")]
        drafted = llm.generate(prompts, params, draft="mtp", depth=3)
        assert [c.token_ids for c in drafted] == plain
        counts = [c.stats.by_source["mtp"] for c in drafted]
        results.append((plain, [(count.drafted, count.accepted) for count in counts]))
    assert results[0] == results[1] == results[2] and results[0][1][0][0] > 20


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "BF16"), (torch.float32, "F32")])
def test_a_copy_holds_everything_and_the_module_to_the_bit(
    dtype: torch.dtype, kind: str, tmp_path: Path
) -> None:
    """The copy is read with the `gguf` package."""
    path, out = target_file("qwen3/Q8_0"), tmp_path / "both.gguf"
    module = trained(tmp_path / "module", path, dtype)
    store_module(module, path, out)
    old, new = gguf.GGUFReader(path), gguf.GGUFReader(out)
    changed = {name for name, field in new.fields.items() if name not in old.fields}
    assert changed == {"qwen3.nextn_predict_layers", TRAINED_BLOCK}
    for name, field in old.fields.items():
        if not name.startswith("GGUF.") and name != "qwen3.block_count":
            assert field.contents() == new.fields[name].contents()
    layers = load_config(path).layers
    assert new.fields["qwen3.block_count"].contents() == layers + 1
    stored = {tensor.name: tensor for tensor in new.tensors}
    for tensor in old.tensors:
        copy = stored.pop(tensor.name)
        assert copy.tensor_type == tensor.tensor_type and np.array_equal(copy.data, tensor.data)
    assert len(stored) == 15 and {name.split(".")[1] for name in stored} == {str(layers)}
    assert stored[f"blk.{layers}.nextn.eh_proj.weight"].tensor_type.name == kind
    view = replace(view_of(tiny.native_decoder(path, form="float32")), form=None)
    apart, own = own_module.load_any_module(module, view), load_own_module(out, view)
    for name, weight in apart.state_dict().items():
        assert torch.equal(own.state_dict()[name], weight), name


# ---------------------------------------------------------------- what is refused


def without(part: str) -> Callable[[list[NewTensor]], list[NewTensor]]:
    return lambda tensors: [tensor for tensor in tensors if part not in tensor.name]


def instead(part: str, values: np.ndarray) -> Callable[[list[NewTensor]], list[NewTensor]]:
    def change(tensors: list[NewTensor]) -> list[NewTensor]:
        return [
            NewTensor(tensor.name, "F32", values.shape, values) if part in tensor.name else tensor
            for tensor in tensors
        ]

    return change


ZEROS, NAN = np.zeros((32, 32), np.float32), np.full(96, np.nan, np.float32)
BROKEN: list[tuple[Any, dict[str, int], str]] = [
    (without("nextn.enorm"), {}, "no blk.3.nextn.enorm.weight"),
    (without("ffn_up"), {}, "no blk.3.ffn_up.weight"),
    (instead("eh_proj", ZEROS), {}, r"input_proj.weight is .*\[32, 32\]"),
    (instead("ffn_norm", NAN), {}, "not finite"),
    (list, {TRAINED_BLOCK: 2}, "is 2, not one of the multi-token blocks 3 to 3"),
    (list, {TRAINED_BLOCK: 4}, "is 4, not one of"),
    (list, {"llama.nextn_predict_layers": 0, "llama.block_count": 3}, "no multi-token layers"),
]  # fmt: skip


@needs_native
@pytest.mark.parametrize(("edit", "keys", "message"), BROKEN)
def test_a_stored_module_that_cannot_be_used_is_refused_in_one_line(
    edit: Any, keys: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` goes on without it."""
    path, out = target_file("llama/F32"), tmp_path / "both.gguf"

    def append_edited(source: Path, to: Path, tensors: Any, own: Any) -> None:
        append_tensors(source, to, edit(tensors), dict(own) | keys)

    monkeypatch.setattr(own_module, "append_tensors", append_edited)
    store_module(trained(tmp_path / "module", path), path, out)
    view = view_of(tiny.native_decoder(path, form="float32"))
    with refused(LoadError, message):
        load_own_module(out, view)
    monkeypatch.setattr(kinds, "HEAD_PAYS", (native.start(),))
    if keys.get("llama.block_count") != 3:  # else the target has a block too much
        assert LLM(out, kv_tokens=256).draft == "suffix"


def test_a_module_that_cannot_be_stored_is_refused_in_one_line(tmp_path: Path) -> None:
    path, out = target_file("llama/F32"), tmp_path / "both.gguf"
    module = trained(tmp_path / "module", path)
    store_module(module, path, out)
    config = load_config(path)
    some = MtpModule(layer_like(config), config.layers, 40)
    save_module(some, tmp_path / "some", None, torch.float32)
    save_head(head_of("eagle3"), tmp_path / "eagle")
    other = trained(tmp_path / "eps", path, norm_eps=1e-3)
    shards = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    shards.add_uint16("split.count", 2)
    finish(shards)
    for directory, target, message in (
        (module, out, "has a module of forerun train already"),
        (tmp_path / "some", path, "predicts part of the vocabulary"),
        (tmp_path / "eagle", path, "does not describe one"),
        (other, path, "not the one that forerun train makes"),
        (module, target_file("qwen3_5/Q8_0"), "MTP module"),
        (tmp_path, path, "no config.json"),
    ):
        with pytest.raises(LoadError, match=message) as error:
            store_module(directory, target, tmp_path / "new.gguf")
        assert "\n" not in str(error.value) and not (tmp_path / "new.gguf").exists()
    norm = open_gguf(path).tensors["output_norm.weight"]
    twice = NewTensor(norm.name, "F32", norm.shape, np.zeros(norm.shape, np.float32))
    for source, tensors, keys, message in (
        (path, [twice], {}, "has the tensor output_norm.weight already"),
        (path, [], {"general.architecture": 3}, "is not a whole number"),
        (tmp_path / "part.gguf", [], {}, "one of several shards"),
    ):
        with pytest.raises(LoadError, match=message):
            append_tensors(source, tmp_path / "new.gguf", tensors, keys)
        assert not (tmp_path / "new.gguf").exists()


def test_the_command_reports_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = target_file("llama/F32")
    module = trained(tmp_path / "module", path)
    (tmp_path / "there").write_text("x")
    for target, out, message in (
        (tiny.family("llama"), tmp_path / "new.gguf", "is no GGUF file"),
        (path, tmp_path / "there", "is there already"),
        (path, tmp_path / "no" / "new.gguf", "cannot be written"),
    ):
        words = ("drafters", "embed", str(module), str(target), "--out", str(out))
        code, _, err = run(monkeypatch, capsys, *words)
        assert code and message in err and len(err.strip().splitlines()) == 1, err
    assert has_own_module(path) is False
