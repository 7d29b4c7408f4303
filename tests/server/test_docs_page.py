"""/docs: it needs no network and no scripts, and has every endpoint of the document."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape

import pytest

from forerun.llm import LLM
from tests.server.serving import Serving, serving

COMMAND = re.compile("<pre>(.*?)</pre>", flags=re.S)


def test_the_page_asks_for_nothing_else(server: Serving) -> None:
    response = server.http.get("/docs")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "<script" not in response.text
    assert not re.search(r'(src|href)="(?!#|/|data:)', response.text)


def test_it_has_every_endpoint_and_field_of_the_document(server: Serving) -> None:
    page, document = server.http.get("/docs").text, server.http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            section = f'<section id="{method.upper()}{path}">'
            assert section in page and operation["description"], path
    schemas = document["components"]["schemas"]
    for schema in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "OllamaChat"):
        for name in schemas[schema]["properties"]:
            assert f"<code>{name}</code>" in page, name


def test_its_commands_work(server: Serving) -> None:
    """Each is sent as curl would send it."""
    found = [shlex.split(unescape(text)) for text in COMMAND.findall(server.http.get("/docs").text)]
    assert len(found) > 15
    for words in found:
        url = next(word for word in words if word.startswith("http"))
        assert url.startswith(server.url)
        if "-d" not in words:
            response = server.http.get(url)
        else:
            body = json.loads(words[words.index("-d") + 1])
            limit = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
            body |= {limit[path]: 4 for path in limit if url.endswith(path)}
            if url.endswith(("/api/chat", "/api/generate")):
                body["options"] = {"num_predict": 4}
            response = server.http.post(url, json=body)
        assert response.status_code == 200, (words, response.text)


@pytest.mark.parametrize("keys", [(), ("secret",)], ids=["open", "with a key"])
def test_it_opens_without_the_key_and_says_where_one_is_needed(
    spare: LLM, keys: tuple[str, ...]
) -> None:
    with serving(spare, api_key=keys, served_name="<b>&") as s:
        page = s.http.get("/docs").text
        assert ("Bearer KEY" in page) == bool(keys) and "secret" not in page
        assert "<b>" not in page and "&lt;b&gt;&amp;" in page
