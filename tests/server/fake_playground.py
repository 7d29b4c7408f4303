"""A server that speaks the playground's part of the protocol with invented tokens.

    python -m tests.server.fake_playground 8123

The first line of the prompt (in a chat: of the last message) chooses the scenario:
`#fake: slow | differ | html | lean | narrow | refuse | full | busy | stopping | break | cut`.
Tokens follow from the prompt and the seed alone, as under the rule `match`; drafts are right four
times out of five.
"""

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
NO_ROOM = "max_tokens must be at most 2048: the context is <no longer> than that"
TOO_LONG = "the prompt has 2100 tokens, the context only 2048: shorten the prompt"
REFUSALS = {  # scenario: (status, message, parameter, code)
    "refuse": (400, NO_ROOM, "max_tokens", None),
    "full": (400, TOO_LONG, None, "context_length_exceeded"),
    "busy": (429, "256 requests wait already: try again in a moment", None, None),
    "stopping": (503, "the server is shutting down: try again in a moment", None, None),
}
LINE = " parser.add_argument('--{}', type={}, default={}, help='{}')\n   "
OPTIONS = [("steps", "int", "100", "how long"), ("rate", "float", "0.1", "how fast")]
TEXT = " default='run', help='what to call it')\n   "
TEXT += "".join(LINE.format(*option) for option in OPTIONS * 4)
TEXT += " args = parser.parse_args()\n\n    for step in range(args.steps):\n        print(step)\n"
HTML = "<script>window.pwned = 1</script> <img src=x onerror='window.pwned = 2'> <b>bold</b> &amp; done"


def pieces(text: str) -> list[str]:
    """Split a text into something like tokens."""
    return re.findall(r"\n *| ?\w+|[^\w\s]|\s", text)


def prompt_of(body: dict[str, Any]) -> str:
    """Return the prompt, or the last message."""
    return body["prompt"] if "prompt" in body else body["messages"][-1]["content"]


def scenario_of(body: dict[str, Any]) -> str:
    """Return the scenario that the first line of the prompt chooses, or ""."""
    return (re.match(r"#fake: (\w+)", prompt_of(body)) or [None, ""])[1]


class Generation:
    """The invented tokens and drafts of one request."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.scenario = scenario_of(body)
        self.speculative = body.get("speculative") or {}
        self.rng = random.Random(f"{prompt_of(body)} {body['seed']} {self.speculative}")
        self.tokens = pieces(HTML)
        if self.scenario != "html":
            shuffled = random.Random(f"{prompt_of(body)} {body['seed']}")
            tokens = pieces(TEXT * (1 + body["max_tokens"] // 100))
            words = sorted(set(tokens))
            self.tokens = [
                shuffled.choice(words) if shuffled.random() < 0.05 else token for token in tokens
            ]
        self.words = sorted(set(self.tokens))
        self.tokens = self.tokens[: 5 if self.scenario == "narrow" else body["max_tokens"]]
        if self.scenario == "differ" and not self.speculative:
            self.tokens[5] = " else"
        self.rate = 0.6

    def rounds(self) -> Iterator[dict[str, Any]]:
        """Yield the content of `x_spec` step by step."""
        at = 0
        step = 0
        while at < len(self.tokens):
            depth = self.depth(step)
            draft, kept = self.draft(at, depth)
            emitted = self.tokens[at : at + kept + 1]
            own = self.tokens[at + kept] if at + kept < len(self.tokens) else "\n"
            path = [node["source"] for node in draft if node["accepted"]]
            sources = [*path, ""]
            verify_ms = (0.52 + 0.035 * len(draft)) * self.rng.uniform(0.95, 1.1)
            yield {
                "step": step,
                "depth": depth,
                "rate": round(self.rate, 4),
                "tokens": [self.token(t, s) for t, s in zip(emitted, sources, strict=False)],
                "draft": draft,
                "bonus": self.token(own) | self.scores(),
                "t_draft_ms": round(0.008 + 0.006 * len(draft), 4) if draft else 0.0,
                "t_verify_ms": round(verify_ms, 4) + (0 if step else 4),
            }
            self.rate += 0.1 * ((kept / depth if depth else self.rate) - self.rate)
            at += len(emitted)
            step += 1

    def depth(self, step: int) -> int:
        if not self.speculative or step == 0:  # the first pass reads the prompt
            return 0
        depth = self.speculative["depth"]
        return self.rng.choice([0, 3, 4, 5, 6]) if depth == "auto" else depth

    def draft(self, at: int, depth: int) -> tuple[list[dict[str, Any]], int]:
        """Draft a chain, or two nodes a level for a draft model; return it and the accepted depth."""
        name = self.speculative.get("draft", "").split(":")[0]
        nodes: list[dict[str, Any]] = []
        parent = 0
        kept = 0
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
                verdict = {"parent": parent, "accepted": accepted and text == right}
                nodes.append(self.token(text, source) | self.scores() | {"q": self.q()} | verdict)
            parent = first + (siblings.index(right) if accepted else 0)
            kept += accepted
        return nodes, kept

    def token(self, text: str, source: str = "") -> dict[str, Any]:
        words = sorted({*self.words, "\n", " else"})
        index = words.index(text) if text in words else len(words)
        return {"id": index, "text": text, "source": source}

    def scores(self) -> dict[str, float]:
        noise = round(self.rng.gauss(0.6, 1.2), 4)
        return {"p": round(self.rng.betavariate(2, 1), 4), "noise": noise}

    def q(self) -> float | None:
        by_ratio = self.speculative["rule"] in ("token", "block", "tree")
        has_q = by_ratio and self.speculative["draft"].startswith("model")
        return round(self.rng.random(), 4) if has_q else None


def chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of one completion or chat."""
    generation, chat = Generation(body), "messages" in body
    if chat:
        yield chunk([choice("", chat=True)])
    accepted: list[int] = []
    drafted = 0
    count = 0
    for trace in generation.rounds():
        count += len(trace["tokens"])
        drafted += len(trace["draft"])
        accepted.append(sum(node["accepted"] for node in trace["draft"]))
        if generation.scenario == "slow":
            time.sleep(0.03)
        if generation.scenario == "break" and len(accepted) == 5:
            yield error("the model ran out of <memory>")
            return
        if generation.scenario == "cut" and len(accepted) == 5:
            return
        text = "".join(token["text"] for token in trace["tokens"])
        more = {} if generation.scenario == "lean" else {"x_spec": trace}
        yield chunk([choice(text, chat=chat)]) | more
    yield chunk([choice("", "length", chat)])
    metrics = {
        "mean_acceptance_length": count / len(accepted),
        "num_spec_steps": len(accepted),
        "num_draft_tokens": drafted,
        "acceptance_histogram": [accepted.count(i) for i in range(max(accepted) + 1)],
        "num_accepted_draft_tokens": sum(accepted),
    }
    usage = {"prompt_tokens": 9, "completion_tokens": count, "total_tokens": count + 9}
    yield chunk([]) | {"usage": usage, "metrics": {"speculative_decoding": metrics}}


def choice(text: str, finish_reason: str | None = None, chat: bool = False) -> dict[str, Any]:
    content = {"delta": {"content": text}} if chat else {"text": text}
    return {"index": 0, **content, "finish_reason": finish_reason, "logprobs": None}


def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
    kind = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "tiny"}
    return kind | {"choices": choices}


def error(message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    fields = {"type": "invalid_request_error", "param": param, "code": code}
    return {"error": {"message": message} | fields}


class Handler(BaseHTTPRequestHandler):
    """Answers one request a connection; a body ends when the connection closes."""

    server: FakeServer

    def do_GET(self) -> None:
        name = {"/": "index.html"}.get(self.path, self.path.removeprefix("/playground/"))
        if self.path == "/server_info":
            if self.is_authorized():
                self.answer(200, "application/json", json.dumps(self.server.info).encode())
        elif (PAGE / name).is_file() and "/" not in name:
            self.answer(200, TYPES[Path(name).suffix], (PAGE / name).read_bytes())
        else:
            self.answer(404, "application/json", json.dumps(error("no such page")).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_authorized():
            return
        self.server.bodies.append(body)
        self.server.paths.append(self.path)
        if scenario_of(body) in REFUSALS:
            status, *refusal = REFUSALS[scenario_of(body)]
            self.answer(status, "application/json", json.dumps(error(*refusal)).encode())
            return
        self.send_head(200, "text/event-stream")
        try:
            for event in chunks(body):
                self.wfile.write(
                    b": a comment\r\n"
                    + f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode()
                )
            if scenario_of(body) not in ("break", "cut"):
                self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            self.server.aborted += 1

    def is_authorized(self) -> bool:
        if not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return True
        self.answer(401, "application/json", json.dumps(error("an API key is needed")).encode())
        return False

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_head(status, kind)
        self.wfile.write(body)

    def send_head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", CSP)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Log nothing."""


class FakeServer(ThreadingHTTPServer):
    """The server, which runs until `close`.

    Attributes:
        bodies: bodies of the requests it got, and `paths` their paths.
        aborted: number of streams that the client closed before their end.
    """

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
