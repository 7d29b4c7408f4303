"""Routes of the application: indices that the operator loads and unloads, and the page /docs."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forerun import LoadError, SamplingParams
from forerun.draft.corpus import LIST, IndexedFile, adding
from forerun.llm import LLM
from forerun.server.app import make_app
from forerun.server.settings import Settings
from tests.server.serving import Serving, serving

# Indices for all clients or for one client, which are loaded and unloaded while the server runs


BODY = {"prompt": "the name of the colour is", "max_tokens": 24, "temperature": 0}
BODY |= {"speculative": {"depth": 4}}


def write(llm: LLM, path: Path, *texts: str) -> None:
    assert llm.tokenizer is not None
    with adding(path, llm.tokenizer, llm.decoder.config.vocab) as writer:
        for text in texts:
            writer.add(IndexedFile(text, len(text), 0), [llm.tokenizer.encode(text)])


@pytest.fixture
def folder(spare: LLM, tmp_path: Path) -> Path:
    """Two indices: one for all clients, and one with the model's answer to BODY."""
    (output,) = spare.generate(BODY["prompt"], SamplingParams.pure(max_tokens=BODY["max_tokens"]))
    write(spare, tmp_path / "shared", "unrelated words that the prompt does not ask for")
    write(spare, tmp_path / "acme" / "answers", BODY["prompt"] + output.text)
    return tmp_path


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
    server: Serving, client: str, method: str, path: str = "/v1/indices", **options: Any
) -> httpx2.Response:
    headers = {"Authorization": f"Bearer key-of-{client}"}
    return server.http.request(method, path, headers=headers, **options)


def load(server: Serving, **index: Any) -> httpx2.Response:
    return ask(server, "operator", "POST", json=index)


def unload(server: Serving, name: str) -> httpx2.Response:
    return ask(server, "operator", "DELETE", f"/v1/indices/{name}")


def answer(server: Serving, client: str, **options: Any) -> tuple[str, int]:
    """Return a text, and the number of its tokens that were drafted from an index."""
    server.service.llm.forget()
    response = ask(server, client, "POST", "/v1/completions", json=BODY | options).json()
    counts = response["metrics"]["forerun"]["by_source"].get("retrieval", {})
    return response["choices"][0]["text"], int(counts.get("accepted", 0))


def test_an_index_serves_its_client_until_it_is_unloaded(server: Serving) -> None:
    texts = set()

    def retrieved(client: str, **options: Any) -> int:
        text, count = answer(server, client, **options)
        texts.add(text)
        return count

    cards = ask(server, "operator", "GET").json()["data"]
    expected = [("acme/answers", False), ("shared", True)]
    assert [(card["id"], card["in_use"]) for card in cards] == expected
    assert retrieved("acme") == retrieved("other") == 0
    card = load(server, name="acme/answers", client="acme").json()
    assert card["in_use"] and card["files"] == 1 and card["client"] == "acme"
    assert retrieved("acme") > 5 and retrieved("acme", cache_salt="one of many") > 5
    assert retrieved("other") == retrieved("operator") == 0
    assert load(server, name="acme/answers").json()["client"] == ""
    assert retrieved("other") > 5
    assert unload(server, "acme/answers").json()["deleted"]
    assert retrieved("acme") == 0
    assert len(texts) == 1, "an index changes only the speed of an answer"


def test_loading_an_index_in_use_reads_it_again(server: Serving, folder: Path) -> None:
    before = ask(server, "operator", "GET").json()["data"][1]["tokens"]
    write(server.service.llm, folder / "shared", "a text more")
    assert load(server, name="shared").json()["tokens"] > before


def test_only_the_operator_lists_and_changes_indices(server: Serving) -> None:
    operations = [
        ("GET", "/v1/indices", {}),
        ("POST", "/v1/indices", {"json": {"name": "shared"}}),
        ("DELETE", "/v1/indices/shared", {}),
    ]
    for client, (method, path, options) in itertools.product(("acme", "other"), operations):
        response = ask(server, client, method, path, **options)
        assert response.status_code == 403 and "operator" in response.json()["error"]["message"]


OUTSIDE = ["../shared", "acme/../shared", "/etc", "shared/../..", "", ".", "acme", "nothing"]


def test_nothing_outside_the_folder_is_read(
    server: Serving, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "index"
    shutil.copytree(folder / "shared", outside)
    (folder / "link").symlink_to(outside)
    for name in [*OUTSIDE, "link", "a\0b", "x" * 300]:
        response = load(server, name=name)
        assert response.status_code in (400, 404) and str(folder) not in response.text, name


def test_unusable_indices_are_refused(server: Serving, folder: Path) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / LIST).write_text(json.dumps({"version": 1}))
    response = load(server, name="broken")
    assert response.status_code == 400 and "holds no index" in response.json()["error"]["message"]
    assert load(server, name="shared", client="unknown").status_code == 400
    assert load(server, name=5).status_code == 400
    for name in ("nothing", "acme/answers"):
        assert unload(server, name).status_code == 404


def test_indices_change_while_requests_run(server: Serving) -> None:
    ended = threading.Event()
    statuses: set[int] = set()

    def change() -> None:
        while not ended.is_set():
            statuses.add(load(server, name="acme/answers").status_code)
            statuses.add(unload(server, "acme/answers").status_code)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        texts = {answer(server, "acme")[0] for _ in range(12)}
    finally:
        ended.set()
        thread.join()
    assert len(texts) == 1 and statuses == {200} and not server.logged


def test_clients_without_indices_share_one_search(server: Serving) -> None:
    for i in range(20):
        answer(server, "other", cache_salt=f"{i}")
    assert len(server.service.llm.engine.proposers["retrieval"]._searches) == 1  # type: ignore[attr-defined]


def test_a_missing_index_folder_is_a_load_error(spare: LLM, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"there is no folder .* make it, and indices in it"):
        make_app(spare, Settings(indices=str(tmp_path / "none")))


# The page /docs


COMMAND = re.compile("<pre>(.*?)</pre>", flags=re.S)


def test_docs_page_loads_no_scripts_or_external_resources(serve: Serving) -> None:
    response = serve.http.get("/docs")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "<script" not in response.text
    assert not re.search(r'(src|href)="(?!#|/|data:)', response.text)


def test_docs_page_has_every_endpoint_and_field_of_the_openapi_document(serve: Serving) -> None:
    page, document = serve.http.get("/docs").text, serve.http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            section = f'<section id="{method.upper()}{path}">'
            assert section in page and operation["description"], path
    schemas = document["components"]["schemas"]
    for schema in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "OllamaChat"):
        for name in schemas[schema]["properties"]:
            assert f"<code>{name}</code>" in page, name


def test_commands_of_the_docs_page_work(serve: Serving) -> None:
    """Each command is sent as curl would send it."""
    found = [shlex.split(unescape(text)) for text in COMMAND.findall(serve.http.get("/docs").text)]
    assert len(found) > 15
    for words in found:
        url = next(word for word in words if word.startswith("http"))
        assert url.startswith(serve.url)
        if "-d" not in words:
            response = serve.http.get(url)
        else:
            body = json.loads(words[words.index("-d") + 1])
            limit = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
            body |= {limit[path]: 4 for path in limit if url.endswith(path)}
            if url.endswith(("/api/chat", "/api/generate")):
                body["options"] = {"num_predict": 4}
            response = serve.http.post(url, json=body)
        assert response.status_code == 200, (words, response.text)


@pytest.mark.parametrize("keys", [(), ("secret",)], ids=["open", "with a key"])
def test_docs_page_needs_no_key_and_shows_whether_requests_need_one(
    spare: LLM, keys: tuple[str, ...]
) -> None:
    with serving(spare, api_key=keys, served_name="<b>&") as s:
        page = s.http.get("/docs").text
        assert ("Bearer KEY" in page) == bool(keys) and "secret" not in page
        assert "<b>" not in page and "&lt;b&gt;&amp;" in page
