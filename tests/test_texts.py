"""Text files in any common encoding are read wherever users give one, and streams with other
encodings or closed pipes cause no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import conversation
from forerun.errors import ForerunError, LoadError
from forerun.measure.workloads import read_tasks
from forerun.models.chat_template import recommended
from forerun.models.config import load_config
from forerun.models.files import POINTER, read_header, read_json, read_text
from forerun.models.tokenizer import Tokenizer
from forerun.server.auth import read_keys
from forerun.server.batch import read_requests
from forerun.server.settings import read_file
from forerun.utils import UnreadableError, decoded, text_of
from tests import tiny
from tests.cli.test_main import MODEL, SMALL, forerun  # noqa: F401

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32")  # the last two write a byte order mark
JOB = json.dumps(
    {"custom_id": "é", "url": "/v1/completions", "body": {"prompt": "x"}}, ensure_ascii=False
)
# name: (content of the file, its reader, expected result)
READERS: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "batch": (f"{JOB}\n", lambda path: read_requests(path)[0]["custom_id"], "é"),
    "keys": ("anna key-of-anna\n", read_keys, [("anna", "key-of-anna")]),
    "configuration": ('model = "é"\n', lambda path: read_file(path)[0], {"model": "é"}),
    "conversation": (
        '[{"role": "user", "content": "é"}]', conversation.read, [{"role": "user", "content": "é"}],
    ),
    "prompts": ("é", lambda path: [task.prompt for task in read_tasks(path)], ["é"]),
    "of a model": ('{"a": "é"}', read_json, {"a": "é"}),
}  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", READERS)
def test_byte_order_marks_are_removed(name: str, encoding: str, tmp_path: Path) -> None:
    """Editors on Windows write them at the beginning of files."""
    text, read, found = READERS[name]
    path = tmp_path / "file.txt"
    path.write_bytes(text.replace("\n", "\r\n").encode(encoding))
    assert read(path) == found


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["not UTF-8", "directory", "missing"])
def test_files_that_are_not_text_give_one_line(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    if kind == "not UTF-8":
        path.write_bytes(b"a\nb\n\xe9\n")
    elif kind == "directory":
        path.mkdir()
    with pytest.raises(ForerunError) as error:
        READERS[name][1](path)
    message = str(error.value)
    assert str(path) in message and "\n" not in message and "codec" not in message
    assert kind != "not UTF-8" or "not UTF-8 text (line 3)" in message


def test_text_is_decoded_as_utf8() -> None:
    assert decoded(b"\xef\xbb\xbf") == decoded(b"") == ""
    assert decoded("a\ufeffb".encode()) == "a\ufeffb"
    for content, line in ((b"\xff", 1), (b"\xef\xbb\xbfa\n\xff", 2), (b"\xff\xfe\x00", 1)):
        with pytest.raises(UnreadableError, match=rf"not UTF-8 text \(line {line}\)"):
            decoded(content)


def test_files_have_a_maximum_size(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * (1 << 20))
    assert len(text_of(tmp_path / "x", 1 << 20)) == 1 << 20
    with pytest.raises(UnreadableError, match="over 0 MB"):
        text_of(tmp_path / "x", (1 << 20) - 1)


def test_pipes_are_read_except_as_files_of_models(tmp_path: Path) -> None:
    """`--json-schema <(make schema)` works; files of models must be regular files."""
    os.mkfifo(tmp_path / "pipe")
    writer = subprocess.Popen(["sh", "-c", f"printf 'a b' > {tmp_path / 'pipe'}"])
    assert text_of(tmp_path / "pipe") == "a b" and writer.wait(10) == 0
    with pytest.raises(LoadError, match="is not a regular file"):
        read_text(tmp_path / "pipe")


def test_files_of_a_model_may_have_byte_order_marks(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.repetitive(), model)
    (model / "generation_config.json").write_text(
        '{"do_sample": true, "top_k": 7, "eos_token_id": 2}'
    )
    for file in [*model.glob("*.json")]:
        file.write_bytes(file.read_text().encode("utf-8-sig"))
    assert load_config(model).vocab == load_config(tiny.repetitive()).vocab
    assert recommended(model)["top_k"] == 7
    assert Tokenizer(model).encode("def f") == Tokenizer(tiny.repetitive()).encode("def f")


def test_a_schema_and_a_prompt_may_have_byte_order_marks(
    forerun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    (tmp_path / "s.json").write_bytes('{"enum": ["é"]}'.encode("utf-16"))
    code, out, err = forerun(
        "generate", "x", "--json", "--json-schema", str(tmp_path / "s.json"), *SMALL
    )
    assert code == 0 and json.loads(json.loads(out)["text"]) == "é", err
    counts = []
    for text in ("def add", "\ufeffdef add"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        counts.append(
            json.loads(forerun("generate", "--json", *SMALL)[1])["stats"]["prompt_tokens"]
        )
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"]
)
def test_a_git_lfs_pointer_in_a_model_is_named(file: str, tmp_path: Path) -> None:
    """Clones without Git LFS contain pointers instead of files."""
    model = tmp_path / "model"
    shutil.copytree(tiny.repetitive(), model)
    (model / file).write_bytes(POINTER + b".github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(
        LoadError, match=rf"{file} is a Git LFS pointer, not the file itself: run git lfs pull"
    ):
        from forerun import LLM

        LLM(model, draft="off", kv_tokens=64)


def test_a_git_lfs_pointer_instead_of_a_drafter_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(POINTER + b".github.com/spec/v1\n")
    with pytest.raises(LoadError, match="is a Git LFS pointer"):
        read_header(tmp_path / "model.safetensors")


GENERATE = [sys.executable, "-m", "forerun", "generate", "hi", "--kv-tokens", "2048", *MODEL]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "ascii:strict"])
def test_characters_outside_the_output_encoding_are_escaped(encoding: str) -> None:
    """This must not end in a traceback."""
    command = [*GENERATE, "--regex", "café → 你"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    text = "café → 你".encode(encoding.partition(":")[0], "backslashreplace")
    assert done.stdout.rstrip() == text


@pytest.mark.parametrize("streams", ["stdout", "both"])
def test_a_closed_pipe_prints_no_traceback(streams: str) -> None:
    """An example is `forerun models | head -1`."""
    read, write = os.pipe()
    os.close(read)
    error = write if streams == "both" else subprocess.PIPE
    done = subprocess.run([*GENERATE, "--max-tokens", "4"], stdout=write, stderr=error)
    os.close(write)
    assert done.returncode in (0, 1) and (streams == "both" or b"Traceback" not in done.stderr)
    assert streams == "both" or b"Broken" not in done.stderr
