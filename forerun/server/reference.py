"""/docs: a page with every endpoint, its fields and a command to try it, and /openapi.json.

The page is made from the OpenAPI document. It has no scripts and loads nothing from elsewhere, so
it works without a network. Both are made once, in a worker thread.
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

Json = dict[str, Any]
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; "
    "base-uri 'none'"
)
FOREIGN = ("Becomes ", "Ignored: ", "Other values are refused: ")  # from `fields.describe`
CHAT: Json = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
EXAMPLES: dict[str, Json] = {
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
CACHED_PAGES = 8  # one for each address under which the server is reached
TEMPLATE = Path(__file__).with_name("docs.html")


def add_page(app: FastAPI, model: str, keyed: bool) -> None:
    """Add both routes; `keyed` says whether requests need a key."""
    limiter = CapacityLimiter(1)

    @lru_cache(1)
    def document() -> bytes:
        return json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    @lru_cache(CACHED_PAGES)
    def page(base: str) -> str:
        return _Page(app.openapi(), model, base, keyed).render()

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        content = await to_thread.run_sync(document, limiter=limiter)
        return Response(content, media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        base = str(request.base_url).rstrip("/")
        text = await to_thread.run_sync(page, base, limiter=limiter)
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(text, headers=headers)


class _Page:
    """The page of one server under the address `base`."""

    def __init__(self, document: Json, model: str, base: str, keyed: bool) -> None:
        self.document = document
        self.model = model
        self.base = base
        self.keyed = keyed

    def render(self) -> str:
        """Return the page as HTML."""
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        endpoints = [
            self._endpoint(method.upper(), path, operation)
            for path, operations in self.document["paths"].items()
            for method, operation in operations.items()
        ]
        return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
            endpoints=endpoints,
            model=self.model,
            base=self.base,
            version=self.document["info"]["version"],
            keyed=self.keyed,
        )

    def _endpoint(self, method: str, path: str, operation: Json) -> Json:
        """Return one operation for the template; `others` are the fields of other servers."""
        rows: list[Json] = []
        if body := operation.get("requestBody"):
            schema = self._resolve(body["content"]["application/json"]["schema"])
            required = schema.get("required", ())
            for name, field in schema["properties"].items():
                description = field.get("description", "")
                row = {"name": name, "kind": self._kind(field), "says": description}
                rows.append(row | {"needed": name in required})
        rows.sort(key=lambda row: not row["needed"])
        return {
            "method": method,
            "path": path,
            "says": operation.get("description", ""),
            "fields": [row for row in rows if not row["says"].startswith(FOREIGN)],
            "others": [row for row in rows if row["says"].startswith(FOREIGN)],
            "command": self._command(method, path),
        }

    def _resolve(self, schema: Json) -> Json:
        name = schema.get("$ref", "").rpartition("/")[2]
        return self.document["components"]["schemas"][name] if name else schema

    def _kind(self, schema: Json) -> str:
        """Describe the type of a field in a few words."""
        if "$ref" in schema:
            properties = self._resolve(schema).get("properties", {})
            names = [
                name
                for name, field in properties.items()
                if not field.get("description", "").startswith(FOREIGN)
            ]
            return f"object of {', '.join(names)}"
        if alternatives := schema.get("anyOf") or schema.get("oneOf"):
            kinds = [self._kind(part) for part in alternatives if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return " or ".join(json.dumps(value) for value in values if value is not None)
        if schema.get("type") == "array":
            return f"list of {self._kind(schema.get('items', {})) or 'anything'}"
        return str(schema.get("type", ""))

    def _command(self, method: str, path: str) -> str:
        """Return a curl command for an operation."""
        words = ["curl"]
        if method not in ("GET", "POST"):
            words += ["-X", method]
        words.append(self.base + path.replace("/v1/models/{name}", f"/v1/models/{self.model}"))
        if self.keyed and path != "/health":
            words += ["-H", "Authorization: Bearer KEY"]
        if path in EXAMPLES:
            model = {} if path in ("/tokenize", "/detokenize") else {"model": self.model}
            body = json.dumps(model | EXAMPLES[path])
            words += ["-H", "Content-Type: application/json", "-d", body]
        return shlex.join(words)
