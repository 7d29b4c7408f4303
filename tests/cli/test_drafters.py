"""`forerun drafters`: output, exit codes, errors of one line, and no import of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.catalog import search
from forerun.catalog.measurements import Measurement, record
from tests.catalog.conftest import home, hub  # noqa: F401
from tests.catalog.hub import (
    FakeHub,
    directory,
    eagle_config,
    eagle_shapes,
    serving,
    target_config,
)
from tests.cli.test_main import run

TARGET, HEAD = "org/Big-8B", "them/Big-8B-eagle3"


@pytest.fixture
def forerun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *args: run(monkeypatch, capsys, "drafters", *args)


@pytest.fixture
def stocked(hub: FakeHub) -> FakeHub:
    hub.add(TARGET, target_config())
    hub.add(HEAD, eagle_config(), eagle_shapes(), card={"base_model": TARGET}, tags=["eagle3"])
    hub.add("them/Big-8B-eagle3-wide", eagle_config(target_hidden_size=32), eagle_shapes())
    return hub


def test_list(home: Path, forerun) -> None:
    own = directory(home / "work/mine", eagle_config(TARGET))
    record(Measurement(TARGET, str(own), "eagle3", "code", 2.5, 1.4))
    code, out, err = forerun("list", "--in", str(home / "work"))
    assert (code, err) == (0, "")
    assert "code: 2.50 tokens/pass, 1.40x plain" in out
    assert f"eagle3:{own}" in out
    assert "SmolLM2-135M-Instruct" in out and "held-out: 2.05 tokens/pass" in out
    code, out, _ = forerun("list", "--in", str(home / "work"), "--domain", "code", "--json")
    (one,) = json.loads(out)["drafters"]
    assert (one["name"], one["draft"]) == (str(own), f"eagle3:{own}")
    assert (one["family"], one["target"]) == ("eagle3", TARGET)
    assert one["measured"][0]["accepted_length"] == 2.5
    assert json.loads(forerun("list", "--json")[1])["drafters"][0]["name"].startswith("work"), (
        "the current directory"
    )


def test_an_empty_list_suggests_the_next_step(home: Path, forerun) -> None:
    code, out, err = forerun("list", "--domain", "poems")
    assert (code, out) == (0, "") and "drafters search MODEL asks the Hub" in err
    for words, text in (
        (["org/Gone"], "org/Gone is not here"),
        (["--in", "nowhere"], "there is no directory nowhere"),
    ):
        code, out, err = forerun("list", *words)
        assert (code, out) == (2, "") and text in err and len(err.splitlines()) == 1


def test_a_table_on_a_terminal(home: Path, forerun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are never truncated, since users copy them."""
    own = directory(home / "a-name-that-is-rather-long", eagle_config(TARGET))
    directory(home / "other", eagle_config(TARGET, speculators_model_type="xpress"))
    monkeypatch.setattr(search, "BUNDLED", home / "none")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    out = forerun("list")[1]
    assert (
        f"eagle3:{own.name}" in out and "the first column is for --draft" in out and "other" in out
    )


def test_search(stocked: FakeHub, forerun) -> None:
    code, out, err = forerun("search", TARGET)
    assert (code, err) == (0, "") and out.splitlines()[1].startswith(f"eagle3:{HEAD} ")
    assert "its configuration names the target as its verifier" in out and f"eagle3:{HEAD}" in out
    found = json.loads(forerun("search", TARGET, "--json")[1])["found"]
    assert found[0]["name"] == HEAD and found[0]["score"] == 200 and found[0]["family"] == "eagle3"
    code, out, err = forerun("search", "org/Unheard-Of")
    assert (code, out) == (0, "") and "forerun train makes one" in err
    stocked.status = 503
    code, out, err = forerun("search", TARGET)
    assert (
        (code, out) == (2, "") and "search needs the network" in err and len(err.splitlines()) == 1
    )


def test_info(stocked: FakeHub, forerun) -> None:
    code, out, err = forerun("info", HEAD)
    assert (code, err) == (0, "") and "EAGLE-3 head, speculators layout" in out
    assert "layers       ok  it reads the hidden states [2, 4, 5]" in out
    assert f"--draft eagle3:{HEAD}" in out
    wide = "them/Big-8B-eagle3-wide"
    code, out, err = forerun("info", wide, "--for", TARGET)
    assert code == 1 and "hidden size  NO  it reads states of 32" in out
    assert "forerun drafts with it" not in out
    assert err == f"forerun: {wide} does not fit {TARGET}: hidden size\n"
    code, out, _ = forerun("info", wide, "--json")
    answer = json.loads(out)
    assert code == 1 and answer["fits"] is False and answer["target"] == TARGET
    check = answer["checks"][4]
    assert check == {"name": "fusion", "ok": True, "text": check["text"]}
    code, out, err = forerun("info", "org/none")
    assert (code, out) == (2, "") and "no such repository" in err and len(err.splitlines()) == 1


def test_pull(stocked: FakeHub, forerun, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    code, out, err = forerun("pull", HEAD)
    assert code == 0 and f"next: forerun generate ... --model {TARGET} --draft eagle3:{HEAD}" in out
    assert err.startswith(f"forerun: downloading {HEAD}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = forerun("pull", HEAD)
    assert code == 0
    assert f"--draft eagle3:{HEAD}" in out
    assert "it is not checked against org/Big-8B" in err
    answer = json.loads(forerun("pull", HEAD, "--json")[1])
    assert answer["path"] and answer["draft"] == f"eagle3:{HEAD}" and answer["fits"]
    assert json.loads(forerun("list", "--json")[1])["drafters"][0]["name"] == HEAD


def test_pull_downloads_nothing_that_does_not_fit(stocked: FakeHub, forerun) -> None:
    code, out, err = forerun("pull", "them/Big-8B-eagle3-wide")
    assert (code, out) == (2, "")
    assert "does not fit, hidden size" in err
    assert "nothing was downloaded" in err
    stocked.add("them/x-hydra", {"hydra_num_heads": 4}, {"a": (9999, 999)})
    code, _, err = forerun("pull", "them/x-hydra")
    assert code == 2 and "forerun does not read this kind" in err
    assert not any("tree" in path for path in stocked.requested)
    assert stocked.sent["model.safetensors"] < 300_000


def test_push(stocked: FakeHub, home: Path, forerun) -> None:
    own = directory(home / "mine", eagle_config(TARGET))
    words = ["push", str(own), "me/Big-8B-eagle3", "--license", "mit"]
    words += ["--domain", "code", "--domain", "law"]
    code, out, err = forerun(*words)
    assert (code, out) == (2, "") and "give --yes" in err and not stocked.created
    code, out, err = forerun(*words, "--yes")
    assert code == 0 and out.strip().endswith("me/Big-8B-eagle3") and stocked.is_private()
    code, out, err = forerun(*words, "--yes", "--public", "--json")
    assert json.loads(out)["metadata"]["domains"] == ["code", "law"] and not stocked.is_private()
    assert forerun("push", str(own), "me/x", "--yes")[0] == 2


def test_push_asks_for_confirmation(
    stocked: FakeHub, home: Path, forerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = directory(home / "mine", eagle_config(TARGET))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for answer, done in (("n", 0), ("y", 1)):
        monkeypatch.setattr("typer.confirm", lambda *_, answer=answer, **__: answer == "y" or _no())
        code, _, _ = forerun("push", str(own), "me/x", "--license", "mit")
        assert len(stocked.created) == done and code == (0 if done else 130)


def _no() -> bool:
    import typer

    raise typer.Abort


def test_help_has_examples(forerun) -> None:
    for verb in ("list", "search", "info", "pull", "push"):
        code, out, _ = forerun(verb, "--help")
        assert code == 0 and f"forerun drafters {verb} " in out and "--json" in out
    assert "search" in forerun()[1]


def test_commands_use_hf_endpoint_and_do_not_import_torch(tmp_path: Path) -> None:
    """Only HF_ENDPOINT is set. The commands must be quick, so they do not import torch."""
    with serving() as (fake, url):
        fake.add(TARGET, target_config())
        fake.add(HEAD, eagle_config(), eagle_shapes())
        code = (
            "import sys; from forerun.cli import main as cli\n"
            f"for words in (['list'], ['search', {TARGET!r}], ['info', {HEAD!r}], ['pull', {HEAD!r}]):\n"
            "    sys.argv = ['forerun', 'drafters', *words, '--json']\n"
            "    try: cli.main()\n    except SystemExit as e: assert not e.code\n"
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        )
        here = {
            "HOME": str(tmp_path),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "HF_ENDPOINT": url,
        }
        here |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "XDG_"))
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=kept | here,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    listed, found, described, pulled = map(json.loads, done.stdout.splitlines())
    assert listed["drafters"]
    assert found["found"][0]["name"] == described["name"] == pulled["name"] == HEAD
