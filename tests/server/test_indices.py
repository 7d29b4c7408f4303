"""Indices while the server runs: the operator's to load and drop, a client's for that client alone,
nothing outside."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forerun import LoadError
from forerun.draft.corpus import LIST, IndexedFile, adding
from forerun.llm import LLM
from forerun.server.app import make_app
from forerun.server.settings import Settings
from tests.server.serving import Serving, serving

SAID = {
    "prompt": "the name of the colour is",
    "max_tokens": 24,
    "temperature": 0,
    "speculative": {"depth": 4},
}


def write(llm: LLM, place: Path, *texts: str) -> None:
    assert llm.tokenizer is not None
    with adding(place, llm.tokenizer, llm.decoder.config.vocab) as writer:
        for text in texts:
            writer.add(IndexedFile(text, len(text), 0), [llm.tokenizer.encode(text)])


@pytest.fixture
def folder(spare: LLM, tmp_path: Path) -> Path:
    """Two indices of what the model says to one question: one for all, one below for a client."""
    (said,) = spare.generate(SAID["prompt"], spare_params())
    write(spare, tmp_path / "shared", "other words altogether, and nothing that is asked for")
    write(spare, tmp_path / "acme" / "answers", SAID["prompt"] + said.text)
    return tmp_path


def spare_params() -> Any:
    from forerun import SamplingParams

    return SamplingParams.pure(max_tokens=SAID["max_tokens"])


@pytest.fixture
def server(spare: LLM, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("acme key-of-acme\nother key-of-other\n")
    draft = spare.draft
    try:
        with serving(
            spare, api_keys=str(keys), api_key=("key-of-operator",), indices=str(folder)
        ) as running:
            yield running
    finally:
        spare.draft = draft
        for name in list(spare.engine.proposers["retrieval"].indices):  # type: ignore[attr-defined]
            spare.engine.proposers["retrieval"].remove(name)  # type: ignore[attr-defined]


def ask(
    server: Serving, who: str, method: str, path: str = "/v1/indices", **options: Any
) -> httpx2.Response:
    headers = {"Authorization": f"Bearer key-of-{who}"}
    return server.http.request(method, path, headers=headers, **options)


def retrieved(server: Serving, who: str, **options: Any) -> int:
    """Tokens of an answer that were drafted from an index, and accepted. The text never changes."""
    server.service.llm.forget()
    answer = ask(
        server, who, "POST", "/v1/completions", json=SAID | {"return_token_ids": True} | options
    ).json()
    stats = answer["metrics"]["forerun"]["by_source"]
    texts.add(answer["choices"][0]["text"])
    return int(stats.get("retrieval", {}).get("accepted", 0))


texts: set[str] = set()


def test_an_index_serves_its_client_from_load_to_drop(server: Serving) -> None:
    texts.clear()
    cards = ask(server, "operator", "GET").json()["data"]
    assert [(card["id"], card["in_use"]) for card in cards] == [
        ("acme/answers", False),
        ("shared", True),
    ]
    assert retrieved(server, "acme") == retrieved(server, "other") == 0
    loaded = ask(server, "operator", "POST", json={"name": "acme/answers", "client": "acme"}).json()
    assert loaded["in_use"] and loaded["files"] == 1 and loaded["client"] == "acme"
    assert retrieved(server, "acme") > 5 and retrieved(server, "acme", cache_salt="one of many") > 5
    assert retrieved(server, "other") == retrieved(server, "operator") == 0
    assert ask(server, "operator", "POST", json={"name": "acme/answers"}).json()["client"] == ""
    assert retrieved(server, "other") > 5
    assert ask(server, "operator", "DELETE", "/v1/indices/acme/answers").json()["deleted"]
    assert retrieved(server, "acme") == 0
    assert len(texts) == 1, "an index changes how fast an answer comes, and nothing else"


def test_what_was_added_is_read_with_the_next_load(server: Serving, folder: Path) -> None:
    llm, before = server.service.llm, ask(server, "operator", "GET").json()["data"][1]["tokens"]
    write(llm, folder / "shared", "a text more")
    assert ask(server, "operator", "POST", json={"name": "shared"}).json()["tokens"] > before


@pytest.mark.parametrize("who", ["acme", "other"])
def test_clients_neither_see_nor_change_indices(server: Serving, who: str) -> None:
    for method, path, body in (
        ("GET", "/v1/indices", None),
        ("POST", "/v1/indices", {"name": "shared"}),
        ("DELETE", "/v1/indices/shared", None),
    ):
        answer = ask(server, who, method, path, **({"json": body} if body else {}))
        assert answer.status_code == 403 and "operator" in answer.json()["error"]["message"]


OUTSIDE = [
    "../shared",
    "acme/../shared",
    "/etc",
    "shared/../..",
    "",
    ".",
    "acme",
    "nothing",
    "link",
    "a\0b",
    "x" * 300,
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_outside_the_folder_is_read(
    server: Serving, folder: Path, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "index"
    shutil.copytree(folder / "shared", outside)
    (folder / "link").symlink_to(outside)
    answer = ask(server, "operator", "POST", json={"name": name})
    assert answer.status_code in (400, 404) and str(folder) not in answer.text


def test_what_cannot_be_used_is_one_answer(server: Serving, folder: Path) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / LIST).write_text(json.dumps({"version": 1}))
    answer = ask(server, "operator", "POST", json={"name": "broken"})
    assert answer.status_code == 400 and "holds no index" in answer.json()["error"]["message"]
    assert (
        ask(server, "operator", "POST", json={"name": "shared", "client": "nobody"}).status_code
        == 400
    )
    assert ask(server, "operator", "DELETE", "/v1/indices/nothing").status_code == 404
    assert ask(server, "operator", "DELETE", "/v1/indices/acme/answers").status_code == 404
    assert ask(server, "operator", "POST", json={"name": 5}).status_code in (400, 422)


def test_indices_change_while_requests_run(server: Serving) -> None:
    texts.clear()
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            for method, path in (("POST", "/v1/indices"), ("DELETE", "/v1/indices/acme/answers")):
                options: dict[str, Any] = (
                    {"json": {"name": "acme/answers"}} if method == "POST" else {}
                )
                assert ask(server, "operator", method, path, **options).status_code == 200

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(12):
            retrieved(server, "acme")
    finally:
        ended.set()
        changing.join()
    assert len(texts) == 1 and not server.logged


def test_clients_without_indices_share_one_shelf(server: Serving) -> None:
    for i in range(20):
        retrieved(server, "other", cache_salt=f"{i}")
    assert len(server.service.llm.engine.proposers["retrieval"]._shelves) == 1  # type: ignore[attr-defined]


def test_a_folder_that_is_not_there_is_one_line(spare: LLM, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"there is no folder .* make it, and indices in it"):
        make_app(spare, Settings(indices=str(tmp_path / "none")))
