"""Hostile model files load and work or are refused in one line: no crash, no hang, no code runs.

Run more mutations with `python -m tests.hostile`."""

from __future__ import annotations

import builtins
import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import load
from forerun.errors import CapacityError, LoadError, RequestError
from forerun.kernels import native
from forerun.llm import LLM
from forerun.models import packed_cache
from forerun.models.chat_template import recommended
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import load_config, note
from forerun.models.packed_cache import MAGIC, TRAILER
from forerun.models.tokenizer import Tokenizer as Text
from forerun.runtime.native import NativeDecoder
from forerun.sampling.params import SamplingParams
from tests import hostile, tiny
from tests.models.checks import compiled, logits

SETTINGS: dict[str, Any] = dict(
    kernels="torch", dtype="float32", kv_tokens=64, max_rows=2, draft="off", threads=1
)


@pytest.fixture(autouse=True)
def _notes() -> None:
    note.cache_clear()


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    return lambda base: Path(shutil.copytree(base, tmp_path / "model"))


def set_json(path: Path, **changes: Any) -> Path:
    """Change an object in a JSON file; return its folder."""
    raw = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(raw | changes))
    return path.parent


def refused(load: Callable[[], object], *words: str) -> None:
    """Assert that loading raises LoadError in one line with all of `words`."""
    with pytest.raises(LoadError) as caught:
        load()
    hostile.check_line(str(caught.value))
    for word in words:
        assert word in str(caught.value)


def test_mutated_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", "off")
    outcomes = hostile.run_mutations(150, 0, tmp_path)
    assert outcomes["fine"] > 15 and outcomes["refused"] > 50


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize("base", ["llama", "gpt2"])
@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", [[-1], [64], [2, 1 << 40, -5, 2]], ids=repr)
def test_end_tokens_outside_the_vocabulary_are_ignored(
    base: str,
    where: str,
    ids: list[int],
    copy: Callable[[Path], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With min_tokens, such an end token made the batches of all requests fail."""
    directory = copy(tiny.family(base))
    (directory / "generation_config.json").unlink(missing_ok=True)
    llm = LLM(set_json(directory / where, eos_token_id=ids), **SETTINGS)
    assert llm.decoder.config.end_ids == tuple({i: i for i in ids if 0 <= i < 64})
    assert (
        len(llm.generate([[3, 4]], SamplingParams.pure(min_tokens=3, max_tokens=3))[0].token_ids)
        == 3
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: ") and "is outside the vocabulary of 64" in line


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_hidden_layers": 10**12}, "layers"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"max_position_embeddings": 10**9}, "context"),
        ({"hidden_size": 10**30}, "hidden"),
        ({"rms_norm_eps": float("nan")}, "norm_eps"),
        ({"rms_norm_eps": 1e-300}, "norm_eps"),
        ({"rms_norm_eps": 1e30}, "norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e-300}}, "rope"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e300}}, "rope"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e-300}}, "rope"),
        ({"rope_parameters": {"rope_type": "x" * 10_000 + "\x1b[2J\n", "rope_theta": 1e4}}, "rope"),
        ({"model_type": "\x1b[2J" * 1000}, "model_type"),
        ({"rms_norm_eps": 10**400}, "norm_eps"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_sizes_and_factors_are_refused(
    changes: dict[str, Any], word: str, copy: Callable[[Path], Path]
) -> None:
    directory = set_json(copy(tiny.family("llama")) / "config.json", **changes)
    refused(lambda: LLM(directory, **SETTINGS), word)


def test_a_context_larger_than_the_memory_is_refused(
    copy: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration may state any context; tables are checked before they are allocated."""
    directory = set_json(
        copy(tiny.family("llama")) / "config.json", max_position_embeddings=1 << 24
    )
    monkeypatch.setattr(load, "free_ram", lambda: 1 << 30)
    with pytest.raises(CapacityError, match=r"16777216 positions.*set a lower context"):
        LLM(directory, **SETTINGS)
    assert LLM(directory, context=64, **SETTINGS).room == 64


@pytest.mark.parametrize(
    "value", [v for v in hostile.VALUES if not isinstance(v, list)], ids=lambda v: repr(v)[:20]
)
def test_invalid_recommended_parameters_are_ignored(value: object, tmp_path: Path) -> None:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    set_json(tmp_path / "generation_config.json", do_sample=True, **dict.fromkeys(names, value))
    SamplingParams.pure(**recommended(tmp_path))


# ---------------------------------------------------------------- tokenizers and templates


def test_a_template_with_a_syntax_error_refuses_only_chats(
    copy: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A note is printed when the model is loaded, and completions still work."""
    directory = copy(tiny.with_tokenizer())
    (directory / "chat_template.jinja").write_text("{% for m in messages %}\x1b[2J")
    llm = LLM(directory, **SETTINGS)
    (line,) = capsys.readouterr().err.splitlines()
    assert "chat template" in line and "chats will be refused" in line
    with pytest.raises(RequestError, match="refuses this conversation"):
        llm.generate([[{"role": "user", "content": "a"}]])
    assert llm.generate(["a"], SamplingParams.pure(max_tokens=2, ignore_eos=True))[0].token_ids


def test_checking_a_template_does_not_run_it(copy: Callable[[Path], Path]) -> None:
    """Compiling it would fold constants, and these would take all memory."""
    directory = copy(tiny.with_tokenizer())
    (directory / "chat_template.jinja").write_text("{{ 'x' * 10 ** 12 }}{{ 2 ** 10 ** 10 }}")
    assert Text(directory).check(tiny.PADDED_VOCAB) == ""


@pytest.mark.parametrize("plain", [True, False], ids=["beside tokenizer.json", "alone"])
def test_code_of_a_tokenizer_is_refused_without_a_question(
    plain: bool, copy: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers would ask on a terminal whether to trust the code."""
    directory, marker = copy(tiny.with_tokenizer()), tmp_path / "was run"
    (directory / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: ...\n")
    auto = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
    settings = {"tokenizer_class": "Evil", "auto_map": auto}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    set_json(directory / "config.json", auto_map=auto, model_type="llama")
    if not plain:
        (directory / "tokenizer.json").unlink()

    def fail_to_ask(*_: object) -> str:
        raise AssertionError("there was a question")

    monkeypatch.setattr(builtins, "input", fail_to_ask)
    monkeypatch.setattr("sys.stdin", None)
    refused(lambda: Text(directory), "code", str(directory))
    assert not marker.exists()


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "\0", ".."])
def test_an_index_with_outside_paths_is_refused(name: str, copy: Callable[[Path], Path]) -> None:
    directory = set_json(
        copy(tiny.family("llama")) / "model.safetensors.index.json", weight_map={"a": name}
    )
    refused(lambda: Checkpoint(directory), "outside its directory")


def test_a_huge_config_file_is_refused(copy: Callable[[Path], Path]) -> None:
    directory = copy(tiny.family("llama"))
    with (directory / "config.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    refused(lambda: load_config(directory), "config.json", "MB")


# ---------------------------------------------------------------- cache of packed weights


@pytest.fixture
def cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[[], torch.Tensor], Path]:
    """Return a function that loads a model and gives its logits, and the file in the cache."""
    native.start(1)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)
    path = tiny.family("llama")

    def load_and_run() -> torch.Tensor:
        return logits(NativeDecoder(load_config(path), path, "int8", 64, False), [*range(3, 12)])

    load_and_run()
    (file,) = (tmp_path / "cache" / "packed").iterdir()
    return load_and_run, file


@compiled
def test_corrupt_packed_files_are_ignored(cached: tuple[Callable[[], torch.Tensor], Path]) -> None:
    """The logits stay equal, since a corrupt file counts as a missing one."""
    load_and_run, file = cached
    content = file.read_bytes()
    expected = load_and_run()
    rng = random.Random(3)
    for i in range(60):
        data = bytearray(content)
        if i % 3 == 0:
            del data[rng.randrange(len(data)) :]
        else:
            end = rng.choice((1, 200, len(data)))  # the trailer, the index, anywhere
            for _ in range(rng.choice((1, 1, 4))):
                data[-rng.randint(1, end)] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        assert torch.equal(load_and_run(), expected), i


@compiled
@pytest.mark.parametrize(
    "entry",
    [
        ["float7", [1, 2], []],
        ["int4", [32, 32], [[0, 2**62, 0], [0, 2**62, 0]]],
        [None, [2**40, -1], [[-1, 4, 0], [2**80, 4, 0]]],
        ["int8", "ab", [[0.5, 4.0, None]] * 2],
        [1, 2],
        None,
    ],
    ids=str,
)
def test_packed_files_with_an_impossible_index_are_ignored(
    entry: Any, cached: tuple[Callable[[], torch.Tensor], Path]
) -> None:
    """Their checksums are right, but the index has impossible entries."""
    load_and_run, file = cached
    content = file.read_bytes()
    expected = load_and_run()
    start, length, _, _ = TRAILER.unpack(content[-TRAILER.size :])
    own, index = json.loads(content[start : start + length])
    index["0.qkv"] = entry
    content = json.dumps([own, index]).encode()
    trailer = TRAILER.pack(start, len(content), zlib.crc32(content), MAGIC)
    file.write_bytes(content[:start] + content + trailer)
    assert torch.equal(load_and_run(), expected)
