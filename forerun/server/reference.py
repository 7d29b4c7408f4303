"""/openapi.json, and /docs: every endpoint with its fields and a command to try it, from that
document.

One page without scripts and without anything from elsewhere: it works where there is no network.
Both are made beside the event loop, and once.
"""

from __future__ import annotations

import json
import shlex
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
MOVED = ("Becomes ", "Ignored: ", "Other values are refused: ")  # how `fields.describe` begins
CHAT = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def fib(n):", "max_tokens": 64, "seed": 1},
    "/v1/chat/completions": CHAT | {"stream": True},
    "/v1/responses": {"input": "Why is the sky blue?"},
    "/v1/embeddings": {"input": ["a cat", "a dog"]},
    "/tokenize": {"prompt": "def fib(n):"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "Why is the sky blue?"},
    "/api/embed": {"input": ["a cat", "a dog"]},
    "/api/embeddings": {"prompt": "a cat"},
    "/api/show": {},
}
BASES = 8  # addresses of the server for which the page is kept
TEMPLATE = Path(__file__).with_name("docs.html")


def add_page(app: FastAPI, model: str, keyed: bool) -> None:
    """Add both. `model` is what is served, `keyed` whether requests need a key."""
    one = CapacityLimiter(1)

    @lru_cache(1)
    def document() -> bytes:
        return json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    @lru_cache(BASES)
    def html(base: str) -> str:
        return page(app.openapi(), model, base, keyed)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(
            await to_thread.run_sync(document, limiter=one), media_type="application/json"
        )

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        text = await to_thread.run_sync(html, str(request.base_url).rstrip("/"), limiter=one)
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(text, headers=headers)


def page(document: dict[str, Any], model: str, base: str, keyed: bool) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found = [
        _endpoint(document, method, path, operation, model, base, keyed)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        endpoints=found, model=model, base=base, version=document["info"]["version"], keyed=keyed
    )


def _endpoint(
    document: dict[str, Any],
    method: str,
    path: str,
    operation: dict[str, Any],
    model: str,
    base: str,
    keyed: bool,
) -> dict[str, Any]:
    """What the template says of one operation; `others` are the fields that other servers have."""
    rows: list[dict[str, Any]] = []
    body = operation.get("requestBody")
    if body is not None:
        schema = _resolved(document, body["content"]["application/json"]["schema"])
        needed = schema.get("required", ())
        rows = [
            {
                "name": name,
                "kind": _kind(document, f),
                "needed": name in needed,
                "says": f.get("description", ""),
            }
            for name, f in schema["properties"].items()
        ]
    rows.sort(key=lambda row: not row["needed"])
    others = [row for row in rows if row["says"].startswith(MOVED)]
    return {
        "method": method.upper(),
        "path": path,
        "says": operation.get("description", ""),
        "fields": [row for row in rows if row not in others],
        "others": others,
        "command": _command(method.upper(), path, model, base, keyed),
    }


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"][name] if name else schema


def _kind(document: dict[str, Any], schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        properties = _resolved(document, schema).get("properties", {})
        own = [
            name
            for name, field in properties.items()
            if not field.get("description", "").startswith(MOVED)
        ]
        return f"object of {', '.join(own)}"
    if either := schema.get("anyOf") or schema.get("oneOf"):
        kinds = [_kind(document, part) for part in either if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(json.dumps(value) for value in values if value is not None)
    if schema.get("type") == "array":
        return f"list of {_kind(document, schema.get('items', {})) or 'anything'}"
    return str(schema.get("type", ""))


def _command(method: str, path: str, model: str, base: str, keyed: bool) -> str:
    where = base + path.replace("/v1/models/{name}", f"/v1/models/{model}")
    words = ["curl", *(["-X", method] if method not in ("GET", "POST") else []), where]
    if keyed and path != "/health":
        words += ["-H", "Authorization: Bearer KEY"]
    if path in EXAMPLES:
        named = {} if path in ("/tokenize", "/detokenize") else {"model": model}
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(named | EXAMPLES[path])]
    return shlex.join(words)
