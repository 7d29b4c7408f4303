"""Loading: vocabularies of draft models, formats, threads, notes and imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun import load
from forerun.config import Config
from forerun.draft.eagle.module import save_head
from forerun.errors import ConfigError
from forerun.kernels import native
from tests import gguf_files, tiny


def tokenizer(*texts: str) -> Any:
    return SimpleNamespace(vocabulary=lambda: {text: i for i, text in enumerate(texts)})


def test_padding_tokens_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one family are padded to different sizes, but other tokens must be equal."""
    target = tokenizer("a", "b", "[PAD2]", "[PAD3]")
    for theirs, fits in (
        (tokenizer("a", "b"), True),
        (tokenizer("a", "b", "[PAD2]"), True),
        (tokenizer("a", "c", "[PAD2]", "[PAD3]"), False),
        (tokenizer("a", "b", "[PAD]"), False),
    ):
        monkeypatch.setattr(load, "load_tokenizer", lambda path, theirs=theirs: theirs)
        if fits:
            load.check_vocabulary(target, Path("m"), 4)
        else:
            with pytest.raises(
                ConfigError,
                match=r"another vocabulary .*, the first is [12]: '(c|\[PAD\])' instead of",
            ):
                load.check_vocabulary(target, Path("m"), 4)


def test_tokens_without_an_embedding_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face tokenizers may have more tokens than the embedding; GGUF files do not."""
    monkeypatch.setattr(load, "load_tokenizer", lambda path: tokenizer("a", "b", "<image>"))
    load.check_vocabulary(tokenizer("a", "b"), Path("m"), 2)


@pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
@pytest.mark.parametrize(
    ("stored", "requested", "precision"),
    [
        ("Q4_0", "auto", "int4"),
        ("Q5_1", "auto", "q5_1"),
        ("Q5_1", "int4", "int4 and int8"),
        ("F16", "auto", "int8"),
    ],
)
def test_a_draft_model_keeps_its_stored_format(stored: str, requested: str, precision: str) -> None:
    """Another format can be requested; floats are rounded, as in all draft models."""
    path = gguf_files.written("llama", stored).path
    config = Config.of(draft_quantization=requested, kv_tokens=512, max_rows=1)
    target = load.make_runner(config, path, torch.device("cpu"))
    drafter = load.make_runner(config, path, torch.device("cpu"), target).decoder
    assert drafter.precision.startswith(f"{precision}, native")


def test_missing_native_kernels_give_a_note_at_each_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models then run on torch, many times slower; the note says how to install the kernels."""
    path = tiny.family("llama")
    for reason, hint in (
        (
            "they were not compiled when forerun was installed (no C++ compiler?)",
            "install a C++ compiler",
        ),
        ("there are none for this processor (arm64), only for x86-64", "arm64"),
    ):
        monkeypatch.setattr(native, "_load", lambda reason=reason: (None, reason))
        load.make_runner(Config.of(kv_tokens=64, max_rows=1), path, torch.device("cpu"))
        printed = capsys.readouterr().err
        assert hint in printed
        assert printed.startswith("note: the native kernels are missing")
        assert len(printed.splitlines()) == 1
        load.make_runner(
            Config.of(kv_tokens=64, max_rows=1, kernels="torch"), path, torch.device("cpu")
        )
        assert capsys.readouterr().err == "", "torch was requested"


@pytest.mark.parametrize(
    "options", [{"threads": 999}, {"threads": 3}, {"draft_threads": 1000}, {"threads": 1}]
)
def test_threads_are_limited_to_the_processors(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """More threads than processors spin while they wait for each other."""
    monkeypatch.setattr(load, "cores", lambda: 2)
    ((name, value),) = options.items()
    assert getattr(load.within_machine(Config.of(**options)), name) == min(value, 2)
    printed = capsys.readouterr().err
    assert printed == (
        f"note: {name}={value} is cut to 2, the processors that this process may use\n"
        if value > 2
        else ""
    )


def test_a_normal_run_imports_neither_transformers_nor_dynamo(tmp_path: Path) -> None:
    """Their imports take seconds, so no family may need them.

    Creating a module on torch's meta device would import 800 others, dynamo among them.
    """
    save_head(tiny.eagle(tiny.eagle_config("llama", draft_vocab=50)), tmp_path / "head")
    runs = [(str(tiny.family(name)), "off") for name in [*tiny.FAMILIES, *tiny.VARIANTS]]
    runs += [(str(tiny.repetitive()), "off"), (runs[0][0], f"suffix+eagle3:{tmp_path}/head")]
    code = (
        "import sys\nfrom forerun import LLM, SamplingParams\n"
        f"for model, draft in {runs!r}:\n"
        "    llm = LLM(model, draft=draft, context=64, kv_tokens=128)\n"
        "    llm.generate([[1, 2, 3]], SamplingParams.pure(max_tokens=8), depth=2)\n"
        "from forerun.models.chat_template import ChatTemplate\n"
        "template = '{{ messages[0].content }}'\n"
        "text = ChatTemplate({'default': template}, {}).render([{'content': 'x'}], (), {})\n"
        "assert text == 'x'\n"
        "assert not {'transformers', 'torch._dynamo'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


CUDA = torch.device("cuda")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantization_on_a_gpu_packs_matrices(precision: str) -> None:
    """This holds for targets and draft models; activations are bfloat16."""
    raw = {"dtype": "float16"}
    target, draft = Config.of(quantization=precision), Config.of(draft_quantization=precision)
    for config, drafter in ((target, False), (draft, True)):
        assert load.pick_form(config, CUDA, raw, drafter) == (False, "bfloat16")
        assert load.pick_packing(config, own_kernels=False, drafter=drafter) == precision
        assert load.pick_packing(config, own_kernels=False, drafter=not drafter) == ""
    on_torch = Config.of(quantization=precision, kernels="torch")
    assert load.pick_form(on_torch, CUDA, raw, drafter=False) == (False, "bfloat16")
    with pytest.raises(ConfigError, match=r"needs the native kernels: kernels=torch was asked for"):
        load.pick_form(on_torch, torch.device("cpu"), raw, drafter=False)


def test_stored_weights_stay_packed_with_own_kernels() -> None:
    """Plain torch would dequantize them in every forward pass; an explicit dtype does so once."""
    assert load.pick_packing(Config.of(), own_kernels=True, drafter=False) == "stored"
    assert load.pick_packing(Config.of(), own_kernels=True, drafter=True) == "stored"
    assert load.pick_packing(Config.of(), own_kernels=False, drafter=False) == ""
    config = Config.of(dtype="bfloat16")
    assert load.pick_packing(config, own_kernels=True, drafter=False) == ""


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_models_on_a_gpu(precision: str) -> None:
    """The weights of the target and of its draft model are packed."""
    path = tiny.family("llama")
    options = dict(quantization=precision, draft_quantization=precision, kv_tokens=512, max_rows=1)
    target = load.make_runner(Config.of(**options), path, CUDA)
    drafter = load.make_runner(Config.of(**options), path, CUDA, target)
    on_cpu = load.load_decoder(path, torch.bfloat16, torch.device("cpu"), packing=precision)
    for runner in (target, drafter):
        prefix = "int8, " if precision == "int8" else "int4 and int8"
        assert runner.decoder.precision.startswith(prefix)
        for found, expected in zip(
            runner.decoder.weights.layers, on_cpu.weights.layers, strict=True
        ):
            assert torch.equal(found.up.weight.dequantize().cpu(), expected.up.weight.dequantize())
