"""What a draft model must share with its target."""

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


def test_padding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one family are padded to different sizes; other ids mean other things."""
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


def test_tokens_without_a_row_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers of Hugging Face may name more than a model has rows for; GGUF files do not."""
    monkeypatch.setattr(load, "load_tokenizer", lambda path: tokenizer("a", "b", "<image>"))
    load.check_vocabulary(tokenizer("a", "b"), Path("m"), 2)


@pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
@pytest.mark.parametrize(
    ("kinds", "asked", "form"),
    [
        ("Q4_0", "auto", "int4"),
        ("Q5_1", "auto", "q5_1"),
        ("Q5_1", "int4", "int4 and int8"),
        ("F16", "auto", "int8"),
    ],
)
def test_a_draft_model_stays_as_it_is_stored(kinds: str, asked: str, form: str) -> None:
    """Unless another form is asked for; floats are rounded, as those of any draft model are."""
    path = gguf_files.written("llama", kinds).path
    config = Config.of(draft_quantization=asked, kv_tokens=512, max_rows=1)
    target = load.make_runner(config, path, torch.device("cpu"))
    drafter = load.make_runner(config, path, torch.device("cpu"), target).decoder
    assert drafter.precision.startswith(f"{form}, native")


def test_without_compiled_kernels_each_load_says_so_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a compiler models run on torch: that was silent, and many times slower."""
    path = tiny.family("llama")
    for why, says in (
        (
            "they were not compiled when forerun was installed (no C++ compiler?)",
            "install a C++ compiler",
        ),
        ("there are none for this processor (arm64), only for x86-64", "arm64"),
    ):
        monkeypatch.setattr(native, "_load", lambda why=why: (None, why))
        load.make_runner(Config.of(kv_tokens=64, max_rows=1), path, torch.device("cpu"))
        said = capsys.readouterr().err
        assert says in said
        assert said.startswith("note: the native kernels are missing")
        assert len(said.splitlines()) == 1
        load.make_runner(
            Config.of(kv_tokens=64, max_rows=1, kernels="torch"), path, torch.device("cpu")
        )
        assert capsys.readouterr().err == "", "who asks for torch knows"


@pytest.mark.parametrize(
    "options", [{"threads": 999}, {"threads": 3}, {"draft_threads": 1000}, {"threads": 1}]
)
def test_no_more_threads_than_processors(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads beyond the processors wait for each other: 999 of them gave 0 tokens a second."""
    monkeypatch.setattr(load, "cores", lambda: 2)
    ((name, value),) = options.items()
    assert getattr(load.within_machine(Config.of(**options)), name) == min(value, 2)
    said = capsys.readouterr().err
    assert said == (
        f"note: {name}={value} is cut to 2, the processors that this process may use\n"
        if value > 2
        else ""
    )


def test_a_normal_run_imports_neither_transformers_nor_dynamo(tmp_path: Path) -> None:
    """Their imports take seconds: nothing that a normal run needs may cause them, of no family.

    A module that is built on torch's meta device would import 800 others, dynamo among them.
    """
    save_head(tiny.eagle(tiny.eagle_config("llama", draft_vocab=50)), tmp_path / "head")
    runs = [(str(tiny.family(name)), "off") for name in [*tiny.FAMILIES, *tiny.VARIANTS]]
    runs += [(str(tiny.spoken()), "off"), (runs[0][0], f"suffix+eagle3:{tmp_path}/head")]
    code = (
        "import sys\nfrom forerun import LLM, SamplingParams\n"
        f"for model, draft in {runs!r}:\n"
        "    llm = LLM(model, draft=draft, context=64, kv_tokens=128)\n"
        "    llm.generate([[1, 2, 3]], SamplingParams.pure(max_tokens=8), depth=2)\n"
        "from forerun.models.chat_template import ChatTemplate\n"
        "template = '{{ messages[0].content }}'\n"
        "said = ChatTemplate({'default': template}, {}).render([{'content': 'x'}], (), {})\n"
        "assert said == 'x'\n"
        "assert not {'transformers', 'torch._dynamo'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


CUDA = torch.device("cuda")


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantization_on_a_gpu_packs_matrices(form: str) -> None:
    """Of the target and of draft models, beside activations in bfloat16."""
    raw = {"dtype": "float16"}
    target, draft = Config.of(quantization=form), Config.of(draft_quantization=form)
    for config, drafter in ((target, False), (draft, True)):
        assert load.pick_form(config, CUDA, raw, drafter) == (False, "bfloat16")
        assert load.pick_packing(config, own_kernels=False, drafter=drafter) == form
        assert load.pick_packing(config, own_kernels=False, drafter=not drafter) == ""
    on_torch = Config.of(quantization=form, kernels="torch")
    assert load.pick_form(on_torch, CUDA, raw, drafter=False) == (False, "bfloat16")
    with pytest.raises(ConfigError, match=r"needs the native kernels: kernels=torch was asked for"):
        load.pick_form(on_torch, torch.device("cpu"), raw, drafter=False)


def test_stored_numbers_stay_packed_with_kernels_of_ones_own() -> None:
    """Plain torch would dequantize them in every pass; an explicit dtype dequantizes them once."""
    assert load.pick_packing(Config.of(), own_kernels=True, drafter=False) == "stored"
    assert load.pick_packing(Config.of(), own_kernels=True, drafter=True) == "stored"
    assert load.pick_packing(Config.of(), own_kernels=False, drafter=False) == ""
    config = Config.of(dtype="bfloat16")
    assert load.pick_packing(config, own_kernels=True, drafter=False) == ""


@pytest.mark.cuda
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_models_on_a_gpu(form: str) -> None:
    """The target and a draft model of it have the numbers of their weights in packed forms."""
    path = tiny.family("llama")
    options = dict(quantization=form, draft_quantization=form, kv_tokens=512, max_rows=1)
    target = load.make_runner(Config.of(**options), path, CUDA)
    drafter = load.make_runner(Config.of(**options), path, CUDA, target)
    on_cpu = load.load_decoder(path, torch.bfloat16, torch.device("cpu"), packing=form)
    for runner in (target, drafter):
        assert runner.decoder.precision.startswith("int8, " if form == "int8" else "int4 and int8")
        for found, expected in zip(
            runner.decoder.weights.layers, on_cpu.weights.layers, strict=True
        ):
            assert torch.equal(found.up.weight.dequantize().cpu(), expected.up.weight.dequantize())
