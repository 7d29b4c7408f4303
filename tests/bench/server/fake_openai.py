"""A server that speaks just enough of OpenAI's API to be measured, and misbehaves as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE = 30.0  # seconds until what a test waits for is said never to come
Behaviour = Callable[["Handler", dict[str, Any]], None]


def chunk(text: str, **more: Any) -> dict[str, Any]:
    """One piece of a completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": None} | more]}


END = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    """The chunk behind the text."""
    return {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": tokens}} | more


@dataclass
class Fake:
    """What it says it is, how it answers, and what it was asked. `released` lets go whoever waits
    in a handler."""

    behaviour: Behaviour
    maker: str = "somebody"
    models: list[str] = field(default_factory=lambda: ["one"])
    pages: dict[str, tuple[int, str]] = field(
        default_factory=dict
    )  # path: status and body, instead of the usual
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    dead: bool = False
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    fake: Fake
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.fake.keys.append(self.headers.get("Authorization"))
        if self.fake.dead:
            self.close_connection = True
            return
        models = {"data": [{"id": name, "owned_by": self.fake.maker} for name in self.fake.models]}
        usual = {
            "/v1/models": (200, json.dumps(models)),
            "/server_info": (200, json.dumps({"drafts": ["off", "ngram", "suffix"]})),
        }
        self.reply(
            *(usual | self.fake.pages).get(
                self.path, (404, '{"error": {"message": "no such page"}}')
            )
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.asked.append(body)
        self.fake.paths.append(self.path)
        if self.fake.dead:
            self.close_connection = True
            return
        self.fake.behaviour(self, body)

    def reply(self, status: int, text: str, kind: str = "application/json") -> None:
        """A whole answer."""
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def begin(self) -> None:
        """The head of a stream, which ends with the connection."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

    def say(self, *events: Any) -> None:
        """Events of a stream; texts go out as they are."""
        for event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def stream(self, *events: Any) -> None:
        """A whole stream."""
        self.begin()
        self.say(*events)

    def log_message(self, *args: Any) -> None:
        pass


def good(handler: Handler, body: dict[str, Any]) -> None:
    """Two tokens in each chunk but the first, as one that speculates gives."""
    tokens = body["max_tokens"]
    pieces = [chunk("a"), *(chunk("bb") for _ in range((tokens - 1) // 2)), END]
    handler.stream(*pieces, usage(1 + (tokens - 1) // 2 * 2), "[DONE]")


@contextmanager
def faking(behaviour: Behaviour = good, **options: Any) -> Iterator[Fake]:
    """A running fake on a free port."""
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
        thread.join(PATIENCE)
