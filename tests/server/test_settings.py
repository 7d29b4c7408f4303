"""Settings and their file: every mistake is reported in one line that names it."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.cli import main as cli
from forerun.config import Config
from forerun.errors import ConfigError
from forerun.server import run
from forerun.server.app import served_name
from forerun.server.settings import Settings, read_file
from tests import tiny


def test_defaults_are_local_and_without_origins_or_keys() -> None:
    settings = Settings()
    assert settings.host == "127.0.0.1"
    assert settings.allowed_origins == () and settings.api_key == ()


NAN = float("nan")
WRONG: dict[str, list[Any]] = {
    "port": [-1, 65536, "8000", 80.5, True, None],
    "max_queue": [-1, 1.5, 1 << 21],
    "max_body": [0, "8M"],
    "max_bodies": [0],
    "max_connections": [0],
    "max_prompt": [-1],
    "timeout": [-1, NAN, float("inf"), "10", True],
    "shutdown_timeout": [-0.5],
    "header_timeout": [-1],
    "body_timeout": ["1"],
    "write_timeout": [NAN],
    "metrics_compat": ["prometheus", 5, ["vllm"]],
    "api_key": ["", ("a", ""), 5, [5], None, True],
    "allowed_origins": [5, ["http://a", None]],
    "allowed_hosts": [5, [""]],
    "host": [5, ""],
    "served_name": [5, ["a"]],
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_value_is_named_in_one_line(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ConfigError, match=name) as error:
            Settings(**{name: value})
        assert len(str(error.value).splitlines()) == 1


def test_a_single_string_is_a_list_of_one() -> None:
    listed = Settings(api_key=("k",), allowed_origins=["http://a"])  # type: ignore[arg-type]
    assert Settings(api_key="k", allowed_origins="http://a") == listed  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "given", "name"),
    [
        (None, "", "SmolLM2-135M-Instruct"),
        ("org/some-model", "", "some-model"),
        (None, "mine", "mine"),
    ],
)
def test_the_name_of_the_model(model: str | None, given: str, name: str) -> None:
    llm: Any = SimpleNamespace(config=Config(model=model))
    assert served_name(llm, Settings(served_name=given)) == name


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "server.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_holds_options_of_engine_and_server(tmp_path: Path) -> None:
    lines = ["port = 9000", "kv-tokens = 4096", 'api_key = ["a", "b"]', 'model = "x"']
    file = write(tmp_path, "\n".join([*lines, "shutdown-timeout = 2", "depth = 4"]))
    engine, server = read_file(file)
    assert engine == {"kv_tokens": 4096, "model": "x", "depth": 4}
    assert Settings(**server) == Settings(port=9000, api_key=("a", "b"), shutdown_timeout=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "did you mean 'port'"),
        ("[server]\nport = 1", "there is no option 'server'"),
        ("port = ", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        ("port = 1\nport = 2", "is not TOML"),
    ],
)
def test_file_errors_are_reported_in_one_line(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_file(write(tmp_path, text))
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_file(path)


def started(monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[dict[str, Any], Settings, bool]:
    """Return the options, the settings and `verbose` with which `serve` starts a server."""
    calls: list[Any] = []
    monkeypatch.setattr(run, "run", lambda *arguments: calls.append(arguments) or 0)
    monkeypatch.setattr("forerun.server.cli.listen", lambda settings: None)
    monkeypatch.setattr(sys, "argv", ["forerun", "serve", str(tiny.repetitive()), *args])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 0
    ((options, settings, _, verbose),) = calls
    return options, settings, verbose


def test_flags_override_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, 'port = 9000\nmax-queue = 3\ndraft = "ngram"\nmodel = "./a"\n')
    flags = ("--config", str(file), "--port", "0", "--depth", "2")
    options, settings, _ = started(monkeypatch, *flags)
    assert options == {"model": str(tiny.repetitive()), "draft": "ngram", "depth": "2"}
    assert (settings.port, settings.max_queue) == (0, 3)


@pytest.mark.parametrize(
    "flags", [["--port", "99999"], ["--metrics-compat", "x"], ["--api-key", ""], ["--rule", "x"]]
)
def test_invalid_flags_are_reported_in_one_line(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["forerun", "serve", *flags])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and not out and len(err.splitlines()) == 1


def test_every_limit_is_in_the_documented_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    rows = page.split("## Limits")[1].split("## ")[0].splitlines()
    limits = [f for f in fields(Settings) if f.name.startswith("max_") or "timeout" in f.name]
    assert len(limits) >= 10
    for limit in limits:
        flag = f"`--{limit.name.replace('_', '-')}`"
        row = next((line for line in rows if flag in line), "")
        value = {0: "the context", 8 << 20: "8 MiB", 64 << 20: "64 MiB"}.get(
            limit.default, f"{limit.default:g}"
        )
        assert f"| {value}" in row, limit.name


@pytest.mark.parametrize(
    "args",
    [
        ["--port", "0", "--served-name", "x", "--context", "64", "--max-rows", "2"],
        ["-p", "0", "--served-model-name", "x", "--max-model-len", "64", "--max-num-seqs", "2"],
        ["-p", "0", "--alias", "x", "-c", "64", "--parallel", "2", "-v"],
    ],
)
def test_serve_accepts_the_flags_of_other_servers(
    args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model": str(tiny.repetitive()), "context": 64, "max_rows": 2}
    expected = (options, Settings(port=0, served_name="x"), "-v" in args)
    assert started(monkeypatch, *args) == expected
