"""Where files lie on the machine is nobody's business: no answer, and no error, names a directory
of the server."""

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
from tests.server.serving import Serving, serving

CHAT = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4, "trace": True},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/api/chat": {"messages": CHAT, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 4}},
    "/api/embed": {"input": "x"},
    "/api/embeddings": {"prompt": "x"},
    "/api/show": {},
}
WRONG = (
    {"model": "/etc/passwd"}, {"model": "../secret-place"}, {"speculative": {"draft": "model:/nowhere"}},
    {"speculative": {"draft": "no such"}}, {"chat_template_kwargs": {"x": "{{"}},
    {"response_format": {"type": "grammar"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "file:///etc/passwd"}}}},
    {"nothing": 1}, {"prompt": 5}, {"messages": 5},
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a drafter in a directory whose name is found nowhere else."""
    place = tmp_path_factory.mktemp("secret-place")
    for name in ("served", "drafter"):
        shutil.copytree(tiny.spoken(), place / name)
    return place


@pytest.fixture(scope="module")
def placed(place: Path) -> Iterator[Serving]:
    llm = LLM(
        place / "served",
        draft=f"model:{place / 'drafter'}",
        context=256,
        kv_tokens=1024,
        max_rows=4,
    )
    with serving(llm) as running:
        yield running


def answers(s: Serving) -> Iterator[tuple[str, str]]:
    """What every endpoint says, to what it takes and to mistakes: (what was asked, all of the
    answer)."""
    for path, operations in s.http.get("/openapi.json").json()["paths"].items():
        for method in operations:
            asked = [
                {},
                *({"model": "served"} | BODIES.get(path, {}) | more for more in ({}, *WRONG)),
            ]
            for body in asked if method == "post" else [None]:
                answer = s.http.request(method, path, json=body)
                yield (
                    f"{method} {path} {body}",
                    f"{answer.status_code} {answer.headers} {answer.text}",
                )
    for path in (
        "/",
        "/docs",
        "/nowhere",
        "/playground/..%2fapp.py",
        "/playground/app.js",
        "/openapi.json",
    ):
        answer = s.http.get(path)
        yield path, f"{answer.headers} {answer.text}"


def betrayed(place: Path, said: str) -> list[str]:
    """Which of the directories above the model an answer names."""
    folders = [
        place.name,
        *(str(folder) for folder in place.parents if len(folder.parts) > 1),
        str(Path.home()),
    ]
    return [folder for folder in folders if folder in said]


def test_no_answer_names_a_directory(placed: Serving, place: Path) -> None:
    said = list(answers(placed))
    asked = {what.split()[1] for what, _ in said if what.startswith("post")}
    assert asked >= set(BODIES), "an endpoint was not asked"
    assert sum(text.startswith("200") for _, text in said) >= len(BODIES) + 8
    assert [(what, found) for what, text in said if (found := betrayed(place, text))] == []
    (model,) = placed.http.get("/v1/models").json()["data"]
    assert (model["id"], model["root"]) == ("served", "served")


def test_nor_when_its_files_have_gone(place: Path, tmp_path: Path) -> None:
    """What is said of the model at a request may not come from looking for it again."""
    shutil.copytree(place / "served", tmp_path / "served")
    with serving(LLM(tmp_path / "served", context=256, kv_tokens=1024, max_rows=4)) as s:
        shutil.rmtree(tmp_path / "served")
        told = [(what, found) for what, text in answers(s) if (found := betrayed(tmp_path, text))]
        assert told == [] and s.http.get("/v1/models").json()["data"][0]["root"] == "served"


def test_a_fingerprint_says_nothing_of_the_place(
    placed: Serving, place: Path, tmp_path: Path
) -> None:
    """Else who knows the rest can find out names of directories by trying them."""
    shutil.copytree(place / "served", tmp_path / "served")
    with serving(LLM(tmp_path / "served", context=256, kv_tokens=1024, max_rows=4)) as s:
        assert s.complete()["system_fingerprint"] == placed.complete()["system_fingerprint"]


def test_a_model_that_is_where_one_stands_has_a_name(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place / "served")
    for given in (".", "../served", "../served/", str(place / "served")):
        llm = SimpleNamespace(config=Config(model=given))
        assert served_name(llm, Settings()) == "served", given  # type: ignore[arg-type]
