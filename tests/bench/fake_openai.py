"""A server with a minimal OpenAI API and configurable misbehaviour."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT = 30.0  # seconds until a test gives up waiting
Behaviour = Callable[["Handler", dict[str, Any]], None]


def chunk(text: str, **more: Any) -> dict[str, Any]:
    """Return one chunk of a completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": None} | more]}


END = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    """Return the final chunk with the usage."""
    return {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": tokens}} | more


@dataclass
class Fake:
    """The server's identity, behaviour and received requests; `released` wakes waiting handlers."""

    behaviour: Behaviour
    owner: str = "unknown"
    models: list[str] = field(default_factory=lambda: ["one"])
    pages: dict[str, tuple[int, str]] = field(default_factory=dict)  # path: (status, body)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    is_dead: bool = False
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    """The handler of one connection."""

    fake: Fake
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.fake.keys.append(self.headers.get("Authorization"))
        if self.fake.is_dead:
            self.close_connection = True
            return
        models = {"data": [{"id": name, "owned_by": self.fake.owner} for name in self.fake.models]}
        pages = {
            "/v1/models": (200, json.dumps(models)),
            "/server_info": (200, json.dumps({"drafts": ["off", "ngram", "suffix"]})),
        }
        missing = (404, '{"error": {"message": "no such page"}}')
        self.reply(*(pages | self.fake.pages).get(self.path, missing))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.bodies.append(body)
        self.fake.paths.append(self.path)
        if self.fake.is_dead:
            self.close_connection = True
            return
        self.fake.behaviour(self, body)

    def reply(self, status: int, text: str, kind: str = "application/json") -> None:
        """Send a complete response."""
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def begin(self) -> None:
        """Send the head of a stream, which ends with the connection."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

    def send(self, *events: Any) -> None:
        """Send events of a stream; strings are sent unchanged."""
        for event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def stream(self, *events: Any) -> None:
        """Send a complete stream."""
        self.begin()
        self.send(*events)

    def log_message(self, *args: Any) -> None:
        pass


def respond(handler: Handler, body: dict[str, Any]) -> None:
    """Stream two tokens per chunk except the first, like a speculating server."""
    tokens = body["max_tokens"]
    pieces = [chunk("a"), *(chunk("bb") for _ in range((tokens - 1) // 2)), END]
    handler.stream(*pieces, usage(1 + (tokens - 1) // 2 * 2), "[DONE]")


@contextmanager
def faking(behaviour: Behaviour = respond, **options: Any) -> Iterator[Fake]:
    """Run a fake server on a free port."""
    fake = Fake(behaviour, **options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": fake}))
    server.daemon_threads = True
    server.handle_error = lambda *args: None  # clients that go away are part of the tests
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        fake.released.set()
        server.shutdown()
        server.server_close()
        thread.join(TIMEOUT)
