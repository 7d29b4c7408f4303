"""A fake Hub on 127.0.0.1 for huggingface_hub that counts what it sends, and configurations of
drafters."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Shapes = Mapping[str, Sequence[int]]


def safetensors(shapes: Shapes, dtype: str = "F16") -> bytes:
    """Return a safetensors file whose tensors are all zero."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = (2 if "F16" in dtype else 4) * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(at)


class FakeHub:
    """The repositories of a fake Hub and their files; `listings` replace what the API returns for
    a repository."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.tags: dict[str, list[str]] = {}
        self.cards: dict[str, Any] = {}
        self.listings: dict[str, Any] = {}
        self.requested: list[str] = []
        self.sent: dict[str, int] = {}  # bytes of each file
        self.created: list[dict[str, Any]] = []
        self.uploaded: dict[str, dict[str, bytes]] = {}
        self.honours_ranges = True
        self.status: int | None = None

    def add(
        self, name: str, config: Any, shapes: Shapes | None = None, card: Any = None, tags: Sequence[str] = (),
        **files: bytes,
    ) -> None:  # fmt: skip
        """Add a repository with a configuration and, optionally, tensors."""
        contents = {
            "config.json": json.dumps(config).encode(),
            **{k.replace("__", "."): v for k, v in files.items()},
        }
        if shapes is not None:
            contents["model.safetensors"] = safetensors(shapes)
        self.files[name] = contents
        self.tags[name] = list(tags)
        self.cards[name] = card or {}

    def is_private(self) -> bool:
        """Return True if the last created repository is private; the field that says so depends on
        the version of huggingface_hub."""
        return self.created[-1].get("private", self.created[-1].get("visibility") == "private")

    def describe(self, name: str) -> Any:
        """Return what the API returns for a repository."""
        if name in self.listings:
            return self.listings[name]
        siblings = [
            {"rfilename": file, "size": len(content), "blobId": digest_of(content)}
            for file, content in self.files[name].items()
        ]
        tags = [
            *self.tags[name],
            *(f"base_model:{base}" for base in [self.cards[name].get("base_model")] if base),
        ]
        return {
            "_id": name, "id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": tags, "downloads": 7,
            "siblings": siblings, "cardData": self.cards[name],
        }  # fmt: skip

    def search(self, query: Mapping[str, list[str]]) -> list[Any]:
        """Find repositories as the Hub does: every word in the name, every filter among the
        tags."""
        words = [word for text in query.get("search", []) for word in text.lower().split()]
        found = []
        for name in self.files:
            described = self.describe(name)
            tags = described.get("tags") if isinstance(described, dict) else None
            tagged = set(query.get("filter", [])) <= set(tags if isinstance(tags, list) else [])
            if tagged and all(word in name.lower() for word in words):
                found.append(described)
        return found


def digest_of(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def reply(self, content: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                try:
                    self.wfile.write(content)
                except OSError:  # the client has read enough
                    self.close_connection = True

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            hub.requested.append(unquote(url.path))
            parts = unquote(url.path).strip("/").split("/")
            if hub.status:
                self.reply(b"{}", hub.status)
            elif parts == ["api", "models"]:
                self.reply(json.dumps(hub.search(parse_qs(url.query))).encode())
            elif parts[:2] == ["api", "models"]:
                self.api("/".join(parts[2:4]), parts[4:])
            elif len(parts) > 4 and parts[2] == "resolve":
                self.file("/".join(parts[:2]), "/".join(parts[4:]))
            else:
                self.missing("Entry")

        def api(self, name: str, rest: Sequence[str]) -> None:
            if name not in hub.files and name not in hub.listings:
                self.missing("Repo")
            elif rest[:1] == ["tree"]:
                entries = [
                    {"type": "file", "path": file, "size": len(content), "oid": digest_of(content)}
                    for file, content in hub.files[name].items()
                ]
                self.reply(json.dumps(entries).encode())
            else:
                self.reply(json.dumps(hub.describe(name)).encode())

        def missing(self, what: str) -> None:
            self.reply(b'{"error": "not found"}', 404, X_Error_Code=f"{what}NotFound")

        def file(self, name: str, file: str) -> None:
            content = hub.files.get(name, {}).get(file)
            if content is None:
                self.missing("Entry" if name in hub.files else "Repo")
                return
            whole, status, headers = len(content), 200, {}
            byte_range = self.headers.get("Range")
            if byte_range and hub.honours_ranges:
                begin, _, end = byte_range.removeprefix("bytes=").partition("-")
                content, status = content[int(begin) : int(end) + 1], 206
                headers["Content_Range"] = f"bytes {begin}-{int(begin) + len(content) - 1}/{whole}"
            if self.command != "HEAD":
                hub.sent[file] = hub.sent.get(file, 0) + len(content)
            tag = f'"{digest_of(hub.files[name][file])}"'
            self.reply(content, status, X_Repo_Commit=COMMIT, ETag=tag, **headers)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlsplit(self.path).path)
            hub.requested.append(path)
            if hub.status:
                self.reply(b"{}", hub.status)
            elif path == "/api/repos/create":
                created = json.loads(body)
                hub.created.append(created)
                url = f"{address(self)}/{created['organization']}/{created['name']}"
                self.reply(json.dumps({"url": url}).encode())
            elif path == "/api/validate-yaml":
                self.reply(b'{"errors": [], "warnings": []}')
            elif "/preupload/" in path:
                files = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
                self.reply(json.dumps({"files": files}).encode())
            elif "/commit/" in path:
                name = "/".join(path.split("/")[3:5])
                lines = [json.loads(line) for line in body.splitlines()]
                hub.uploaded[name] = {
                    line["value"]["path"]: base64.b64decode(line["value"]["content"])
                    for line in lines
                    if line["key"] == "file"
                }
                url = f"{address(self)}/{name}/commit/{COMMIT}"
                result = {"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None}
                self.reply(json.dumps(result).encode())
            else:
                self.missing("Entry")

    return Handler


def address(handler: BaseHTTPRequestHandler) -> str:
    host, port = handler.server.server_address[:2]
    return f"http://{host}:{port}"


@contextmanager
def serving() -> Iterator[tuple[FakeHub, str]]:
    """Run a fake Hub; yield it and its address."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def directory(
    path: Path, config: dict[str, Any], shapes: Shapes | None = None, card: str = "", **files: str
) -> Path:
    """Write a model or drafter; `files` are further texts, with "__" for "." in their names."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(safetensors(shapes or eagle_shapes()))
    (path / "README.md").write_text(card)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def target_config(**changed: Any) -> dict[str, Any]:
    """Return the configuration of a target with 8 layers, hidden size 16 and 64 tokens."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32, "vocab_size": 64,
        "max_position_embeddings": 128,
    } | changed  # fmt: skip


def eagle_config(verifier: str | None = "org/Big-8B", **changed: Any) -> dict[str, Any]:
    """Return the configuration of an EAGLE-3 head for that target, in the speculators format."""
    layer = target_config(num_hidden_layers=1)
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": verifier, "architectures": []}},
        "draft_vocab_size": 32, "target_hidden_size": 16, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    } | changed  # fmt: skip


def eagle_shapes(**changed: Sequence[int] | None) -> dict[str, Sequence[int]]:
    """Return the shapes of the tensors of that head that are checked; None removes one."""
    shapes: dict[str, Sequence[int] | None] = {
        "fc.weight": (16, 48), "lm_head.weight": (32, 16), "d2t": (32,), "layers.0.self_attn.q_proj.weight": (16, 32),
        "norm.weight": (16,),
    } | {name.replace("__", "."): shape for name, shape in changed.items()}  # fmt: skip
    return {name: shape for name, shape in shapes.items() if shape is not None}
