"""Settings and the file they may come from: every mistake is one line that says what and how."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun.config import Config
from forerun.errors import ConfigError
from forerun.server.app import served_name
from forerun.server.settings import Settings, read_file
from tests import tiny


def test_defaults_are_careful() -> None:
    settings = Settings()
    assert (
        settings.host == "127.0.0.1" and settings.allowed_origins == () and settings.api_key == ()
    )


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"port": "8000"},
        {"port": 80.5},
        {"port": True},
        {"port": None},
        {"max_queue": -1},
        {"max_queue": 1.5},
        {"max_queue": 1 << 21},
        {"max_body": 0},
        {"max_body": "8M"},
        {"max_prompt": -1},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"timeout": "10"},
        {"timeout": True},
        {"shutdown_timeout": -0.5},
        {"metrics_compat": "prometheus"},
        {"metrics_compat": 5},
        {"metrics_compat": ["vllm"]},
        {"api_key": ""},
        {"api_key": ("a", "")},
        {"api_key": 5},
        {"api_key": [5]},
        {"api_key": None},
        {"api_key": True},
        {"allowed_origins": 5},
        {"allowed_origins": ["http://a", None]},
        {"allowed_hosts": 5},
        {"allowed_hosts": [""]},
        {"max_bodies": 0},
        {"max_connections": 0},
        {"header_timeout": -1},
        {"body_timeout": "1"},
        {"write_timeout": float("nan")},
        {"host": 5},
        {"host": ""},
        {"served_name": 5},
        {"served_name": ["a"]},
    ],
    ids=str,
)
def test_a_bad_value_is_one_line_that_names_it(options: dict) -> None:
    with pytest.raises(ConfigError) as error:
        Settings(**options)
    assert len(str(error.value).splitlines()) == 1 and next(iter(options)) in str(error.value)


def test_a_single_text_is_a_list_of_one() -> None:
    assert Settings(api_key="k", allowed_origins="http://a") == Settings(
        api_key=("k",), allowed_origins=["http://a"]
    )


@pytest.mark.parametrize(
    ("model", "given", "name"),
    [
        (None, "", "SmolLM2-135M-Instruct"),
        ("org/some-model", "", "some-model"),
        (None, "mine", "mine"),
    ],
)
def test_what_the_model_is_called(model: str | None, given: str, name: str) -> None:
    """Clients name it in every request: what it is called must not depend on where its file
    lies."""
    llm = SimpleNamespace(config=Config(model=model))
    assert served_name(llm, Settings(served_name=given)) == name  # type: ignore[arg-type]


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "server.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_holds_options_of_both_kinds(tmp_path: Path) -> None:
    text = 'port = 9000\nkv-tokens = 4096\napi_key = ["a", "b"]\nmodel = "x"\nshutdown-timeout = 2\ndepth = 4\n'
    engine, server = read_file(write(tmp_path, text))
    assert engine == {"kv_tokens": 4096, "model": "x", "depth": 4}
    assert Settings(**server) == Settings(port=9000, api_key=("a", "b"), shutdown_timeout=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "did you mean 'port'"),
        ("[server]\nport = 1", "there is no option 'server'"),
        ("port = ", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        ("port = 1\nport = 2", "is not TOML"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_file(write(tmp_path, text))
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_file(path)


def test_flags_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from forerun.cli import main as cli
    from forerun.server import run

    taken: list = []
    monkeypatch.setattr(run, "run", lambda *args: taken.append(args) or 0)
    file = write(tmp_path, 'port = 9000\nmax-queue = 3\ndraft = "ngram"\nmodel = "./a"\n')
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "forerun",
            "serve",
            str(tiny.spoken()),
            "--config",
            str(file),
            "--port",
            "0",
            "--depth",
            "2",
        ],
    )
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    ((options, settings, listener, _),) = taken
    listener.close()
    assert exit_.value.code == 0 and options == {
        "model": str(tiny.spoken()),
        "draft": "ngram",
        "depth": "2",
    }
    assert (settings.port, settings.max_queue) == (0, 3)


@pytest.mark.parametrize(
    "flags", [["--port", "99999"], ["--metrics-compat", "x"], ["--api-key", ""], ["--rule", "x"]]
)
def test_bad_flags_are_one_line(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import sys

    from forerun.cli import main as cli

    monkeypatch.setattr(sys, "argv", ["forerun", "serve", *flags])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and not out and len(err.splitlines()) == 1


def test_every_limit_is_in_the_table_of_limits() -> None:
    """A page that says it is complete has to be."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    table = page.split("## Limits")[1].split("## ")[0]
    limits = [
        f for f in fields(Settings) if f.name.startswith("max_") or f.name.endswith("timeout")
    ]
    assert len(limits) >= 10
    for limit in limits:
        row = next(
            (line for line in table.splitlines() if f"`--{limit.name.replace('_', '-')}`" in line),
            "",
        )
        value = limit.default
        written = {0: "the context", 8 << 20: "8 MiB", 64 << 20: "64 MiB"}.get(value, f"{value:g}")
        assert row and f"| {written}" in row, limit.name
