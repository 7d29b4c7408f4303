"""No response and no error names a directory of the server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun.config import Config
from forerun.llm import LLM
from forerun.server.app import served_name
from forerun.server.settings import Settings
from tests import tiny
from tests.server.serving import BODIES, Serving, serving

SCHEMA = {"$ref": "file:///etc/passwd"}
WRONG = (
    {"model": "/etc/passwd"},
    {"model": "../secret-place"},
    {"speculative": {"draft": "model:/nowhere"}},
    {"trace": True},
    {"chat_template_kwargs": {"x": "{{"}},
    {"response_format": {"type": "grammar"}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"nothing": 1},
    {"prompt": 5},
    {"messages": 5},
)
PAGES = ("/", "/docs", "/nowhere", "/playground/..%2fapp.py", "/playground/app.js", "/openapi.json")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a unique name that holds a model and a drafter."""
    root = tmp_path_factory.mktemp("secret-place")
    for name in ("served", "drafter"):
        shutil.copytree(tiny.repetitive(), root / name)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Serving]:
    llm = LLM(
        root / "served",
        draft=f"model:{root / 'drafter'}",
        context=256,
        kv_tokens=1024,
        max_rows=4,
    )
    with serving(llm) as running:
        yield running


def responses(s: Serving) -> Iterator[tuple[str, str]]:
    """Yield valid and invalid requests to every endpoint with the complete responses."""
    for path, operations in s.http.get("/openapi.json").json()["paths"].items():
        good = {"model": "served"} | BODIES.get(path, {})
        bodies = [{}, *(good | more for more in ({}, *WRONG))]
        for method in operations:
            for body in bodies if method == "post" else [None]:
                response = s.http.request(method, path, json=body)
                text = f"{response.status_code} {response.headers} {response.text}"
                yield f"{method} {path} {body}", text
    for path in PAGES:
        response = s.http.get(path)
        yield path, f"{response.headers} {response.text}"


def folders_in(root: Path, text: str) -> list[str]:
    """Return the directories above the model that a response names."""
    parents = [str(folder) for folder in root.parents if len(folder.parts) > 1]
    return [folder for folder in (root.name, *parents, str(Path.home())) if folder in text]


def test_no_response_names_a_directory(server: Serving, root: Path) -> None:
    found = list(responses(server))
    paths = {request.split()[1] for request, _ in found if request.startswith("post")}
    assert paths >= set(BODIES)
    assert sum(text.startswith("200") for _, text in found) >= len(BODIES) + 8
    assert [request for request, text in found if folders_in(root, text)] == []
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["root"]) == ("served", "served")


def test_no_directory_is_named_after_the_model_is_deleted(root: Path, tmp_path: Path) -> None:
    """Requests do not read the files of the model again."""
    shutil.copytree(root / "served", tmp_path / "served")
    with serving(LLM(tmp_path / "served", context=256, kv_tokens=1024, max_rows=4)) as s:
        shutil.rmtree(tmp_path / "served")
        assert [request for request, text in responses(s) if folders_in(tmp_path, text)] == []
        assert s.http.get("/v1/models").json()["data"][0]["root"] == "served"


def test_the_fingerprint_does_not_depend_on_the_directory(
    server: Serving, root: Path, tmp_path: Path
) -> None:
    """Otherwise clients could find names of directories by trial."""
    shutil.copytree(root / "served", tmp_path / "served")
    with serving(LLM(tmp_path / "served", context=256, kv_tokens=1024, max_rows=4)) as s:
        assert s.complete()["system_fingerprint"] == server.complete()["system_fingerprint"]


def test_the_name_of_a_model_in_the_working_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root / "served")
    for given in (".", "../served", "../served/", str(root / "served")):
        llm = SimpleNamespace(config=Config(model=given))
        assert served_name(llm, Settings()) == "served", given  # type: ignore[arg-type]
