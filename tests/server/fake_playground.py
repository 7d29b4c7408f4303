"""A server that speaks the playground's part of the protocol and makes up what it says.

    python -m tests.server.fake_playground 8123

The first line of the prompt (in a chat: of the last message) says what goes on:
`#fake: slow | differ | html | lean | narrow | refuse | full | busy | stopping | break | cut`.
Tokens follow from the prompt and the seed alone, as under `match`; drafts are right four times out
of five."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "forerun" / "server" / "playground"
CSP = "default-src 'self'; img-src 'self' data:"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
COSTS = {
    "pass_ms": {"1": 0.52, "2": 0.55, "5": 0.7, "9": 0.84},
    "draft_ms": {"suffix": {"1": 0.01, "4": 0.02}, "model": {"1": 0.12, "4": 0.46}},
}
INFO = {
    "version": "0.1.0", "model": "tiny", "context": 2048, "drafts": ["off", "ngram", "suffix", "model:tiny"],
    "draft": "suffix", "rules": ["match", "token", "block", "tree", "typical"], "rule": "match",
    "kernels": "int8, native avx512", "threads": 2, "costs": COSTS, "chat": False, "sampling": {"top_p": 0.9},
    "default_sampling": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0},
}  # fmt: skip
CHAT = INFO | {"chat": True}
REFUSALS = {  # kind: (status, message, parameter, code)
    "refuse": (
        400,
        "max_tokens must be at most 2048: the context is <no longer> than that",
        "max_tokens",
        None,
    ),
    "full": (
        400,
        "the prompt has 2100 tokens, the context only 2048: shorten the prompt",
        None,
        "context_length_exceeded",
    ),
    "busy": (429, "256 requests wait already: try again in a moment", None, None),
    "stopping": (503, "the server is shutting down: try again in a moment", None, None),
}
LINE = " parser.add_argument('--{}', type={}, default={}, help='{}')\n   "
OPTIONS = [
    ("steps", "int", "100", "how long"),
    ("rate", "float", "0.1", "how fast"),
    ("seed", "int", "0", "a number"),
]
TEXT = " default='run', help='what to call it')\n   " + "".join(
    LINE.format(*option) for option in OPTIONS * 3
)
TEXT += " args = parser.parse_args()\n\n    for step in range(args.steps):\n        print(step)\n"
HTML = "<script>window.pwned = 1</script> <img src=x onerror='window.pwned = 2'> <b>bold</b> &amp; done"


def pieces(text: str) -> list[str]:
    """Something like tokens."""
    return re.findall(r"\n *| ?\w+|[^\w\s]|\s", text)


def asked(body: dict[str, Any]) -> str:
    """The prompt, or the last message."""
    return body["prompt"] if "prompt" in body else body["messages"][-1]["content"]


def kind(body: dict[str, Any]) -> str:
    """What is to go on."""
    return (re.match(r"#fake: (\w+)", asked(body)) or [None, ""])[1]


class Story:
    """One request's made-up generation."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.kind = kind(body)
        self.speculative = body.get("speculative") or {}
        self.rng = random.Random(f"{asked(body)} {body['seed']} {self.speculative}")
        shuffled = random.Random(f"{asked(body)} {body['seed']}")
        text = HTML if self.kind == "html" else TEXT
        tokens = (
            pieces(text) if self.kind == "html" else pieces(text * (1 + body["max_tokens"] // 100))
        )
        self.words = sorted(set(tokens))
        self.tokens = [
            shuffled.choice(self.words) if shuffled.random() < 0.05 else token for token in tokens
        ]
        if self.kind == "html":
            self.tokens = tokens
        self.tokens = self.tokens[: 5 if self.kind == "narrow" else body["max_tokens"]]
        if self.kind == "differ" and not self.speculative:
            self.tokens[5] = " else"
        self.rate = 0.6

    def rounds(self) -> Iterator[dict[str, Any]]:
        """What `x_spec` holds, step by step."""
        at, step = 0, 0
        while at < len(self.tokens):
            depth = self.depth(step)
            draft, kept = self.draft(at, depth)
            said = self.tokens[at : at + kept + 1]
            own = self.tokens[at + kept] if at + kept < len(self.tokens) else "\n"
            path = [node["source"] for node in draft if node["accepted"]]
            yield {
                "step": step, "depth": depth, "rate": round(self.rate, 4),
                "tokens": [self.token(t, s) for t, s in zip(said, [*path, ""], strict=False)],
                "draft": draft, "bonus": {**self.token(own), **self.chances()},
                "t_draft_ms": round(0.008 + 0.006 * len(draft), 4) if draft else 0.0,
                "t_verify_ms": round((0.52 + 0.035 * len(draft)) * self.rng.uniform(0.95, 1.1), 4) + 4 * (step == 0),
            }  # fmt: skip
            self.rate += 0.1 * ((kept / depth if depth else self.rate) - self.rate)
            at, step = at + len(said), step + 1

    def depth(self, step: int) -> int:
        if not self.speculative or step == 0:  # the first pass reads the prompt
            return 0
        asked = self.speculative["depth"]
        return self.rng.choice([0, 3, 4, 5, 6]) if asked == "auto" else asked

    def draft(self, at: int, depth: int) -> tuple[list[dict[str, Any]], int]:
        """A chain, or two nodes a level for a draft model; how many of its levels are accepted."""
        name = self.speculative.get("draft", "").split(":")[0]
        nodes: list[dict[str, Any]] = []
        parent, kept = 0, 0
        for level in range(depth):
            source = "prediction" if name == "suffix" and at % 7 == 3 else name
            right = self.tokens[at + level] if at + level < len(self.tokens) else "\n"
            wrong = self.rng.choice([word for word in self.words if word != right])
            accepted = kept == level and self.rng.random() < 0.8
            siblings = [right if accepted else wrong]
            if name == "model":
                other = self.rng.choice([word for word in self.words if word not in (right, wrong)])
                siblings.insert(self.rng.randrange(2), other)
            first = len(nodes) + 1
            for text in siblings:
                fate = {"parent": parent, "accepted": accepted and text == right}
                nodes.append(self.token(text, source) | self.chances() | {"q": self.q()} | fate)
            parent = first + (siblings.index(right) if accepted else 0)
            kept += accepted
        return nodes, kept

    def token(self, text: str, source: str = "") -> dict[str, Any]:
        words = sorted({*self.words, "\n", " else"})
        return {
            "id": words.index(text) if text in words else len(words),
            "text": text,
            "source": source,
        }

    def chances(self) -> dict[str, float]:
        return {
            "p": round(self.rng.betavariate(2, 1), 4),
            "noise": round(self.rng.gauss(0.6, 1.2), 4),
        }

    def q(self) -> float | None:
        by_ratio = self.speculative["rule"] in ("token", "block", "tree")
        return (
            round(self.rng.random(), 4)
            if by_ratio and self.speculative["draft"].startswith("model")
            else None
        )


def chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one completion or chat."""
    story, chat = Story(body), "messages" in body
    if chat:
        yield chunk([choice("", chat=True)])
    histogram: dict[int, int] = {}
    rounds, drafted, count = 0, 0, 0
    for trace in story.rounds():
        rounds, count, drafted = (
            rounds + 1,
            count + len(trace["tokens"]),
            drafted + len(trace["draft"]),
        )
        kept = sum(node["accepted"] for node in trace["draft"])
        histogram[kept] = histogram.get(kept, 0) + 1
        if story.kind == "slow":
            time.sleep(0.03)
        if story.kind == "break" and rounds == 5:
            yield error("the model ran out of <memory>")
            return
        if story.kind == "cut" and rounds == 5:
            return
        text = "".join(token["text"] for token in trace["tokens"])
        yield chunk([choice(text, chat=chat)]) | ({} if story.kind == "lean" else {"x_spec": trace})
    yield chunk([choice("", "length", chat)])
    metrics = {
        "mean_acceptance_length": count / rounds, "num_spec_steps": rounds, "num_draft_tokens": drafted,
        "acceptance_histogram": [histogram.get(i, 0) for i in range(max(histogram) + 1)],
        "num_accepted_draft_tokens": sum(k * v for k, v in histogram.items()),
    }  # fmt: skip
    usage = {"prompt_tokens": 9, "completion_tokens": count, "total_tokens": count + 9}
    yield chunk([]) | {"usage": usage, "metrics": {"speculative_decoding": metrics}}


def choice(text: str, finish_reason: str | None = None, chat: bool = False) -> dict[str, Any]:
    said = {"delta": {"content": text}} if chat else {"text": text}
    return {"index": 0, **said, "finish_reason": finish_reason, "logprobs": None}


def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 0,
        "model": "tiny",
        "choices": choices,
    }


def error(message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {
        "error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    }


class Handler(BaseHTTPRequestHandler):
    """One connection a request, its body ends when it closes."""

    server: FakeServer

    def do_GET(self) -> None:
        name = {"/": "index.html"}.get(self.path, self.path.removeprefix("/playground/"))
        if self.path == "/server_info":
            self.guarded() and self.answer(
                200, "application/json", json.dumps(self.server.info).encode()
            )
        elif (PAGE / name).is_file() and "/" not in name:
            self.answer(200, TYPES[Path(name).suffix], (PAGE / name).read_bytes())
        else:
            self.answer(404, "application/json", json.dumps(error("no such page")).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.guarded():
            return
        self.server.bodies.append(body)
        self.server.paths.append(self.path)
        if kind(body) in REFUSALS:
            status, *refusal = REFUSALS[kind(body)]
            self.answer(status, "application/json", json.dumps(error(*refusal)).encode())
            return
        self.head(200, "text/event-stream")
        try:
            for event in chunks(body):
                self.wfile.write(
                    b": a comment\r\n"
                    + f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode()
                )
            if kind(body) not in ("break", "cut"):
                self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            self.server.aborted += 1

    def guarded(self) -> bool:
        if not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return True
        self.answer(401, "application/json", json.dumps(error("an API key is needed")).encode())
        return False

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.head(status, kind)
        self.wfile.write(body)

    def head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", CSP)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Silence."""


class FakeServer(ThreadingHTTPServer):
    """Serves until `close`. `bodies` are the requests it got and `paths` where, `aborted` counts
    those given up on."""

    daemon_threads = True

    def __init__(self, port: int = 0, key: str = "", info: dict[str, Any] = INFO) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.key, self.info = key, info
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.aborted = 0
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


if __name__ == "__main__":
    server = FakeServer(int(sys.argv[1]))
    print(server.url, flush=True)
    server.thread.join()
