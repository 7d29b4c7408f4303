"""Worker for a server with OpenAI's completions API: vLLM, SGLang, forerun itself.

Prompts are sent as token ids, all at once, and answers are streamed. If the server returns token
ids (`return_token_ids`), they are counted and compared; otherwise its total is divided among the
chunks. The server decides whether it speculates: `drafting-server` is this worker, measured as
speculative.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import worker

WAIT = 3600.0  # seconds without a byte; the bench itself gives up sooner


class Server:
    """A server at a URL. Raises ValueError if it has no OpenAI API."""

    depths, samples = False, True

    def __init__(self, options: dict[str, Any]) -> None:
        self.url = options["where"].rstrip("/").removesuffix("/v1")
        models = json.loads(self._open("/v1/models").read())["data"]
        self.model = models[0]["id"]
        self.version = self._version()
        self.plain = 0 if options["drafting"] else worker.MANY
        self.speculative = worker.MANY if options["drafting"] else 0

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=WAIT)
        except urllib.error.HTTPError as error:
            answer = error.read(300).decode(errors="replace")
            raise ValueError(f"{self.url}{path} answers {error.code}: {answer}") from None
        except urllib.error.URLError as error:
            raise ValueError(f"there is no server at {self.url}: {error.reason}") from None

    def _version(self) -> str:
        """Return what vLLM's /version says, or nothing."""
        try:
            return str(json.loads(self._open("/version").read())["version"])
        except (ValueError, KeyError, TypeError):
            return ""

    def run(
        self, depth: int, prompts: worker.Prompts, tokens: int, temperature: float
    ) -> dict[str, Any]:
        """As `worker.Engine.run`; the server chooses its depth."""
        watch = worker.Watch(len(prompts))
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(
                pool.map(lambda prompt: list(self._pieces(prompt, tokens, temperature)), prompts)
            )
        outputs = [[i for _, ids, _ in pieces for i in ids or []] for pieces in answers]
        known = all(ids is not None for pieces in answers for _, ids, _ in pieces)
        came = []
        for i, pieces in enumerate(answers):
            total = len(outputs[i]) if known else pieces[-1][2]
            if total != tokens:
                raise ValueError(f"{self.url} made {total} tokens where {tokens} were asked for")
            came += [
                (when, i, tokens / len(pieces) if ids is None else len(ids))
                for when, ids, _ in pieces
            ]
        for when, i, count in sorted(came):
            watch.step({i: count}, when)
        answer: dict[str, Any] = watch.answer(outputs if known else None, steps=False)
        return answer

    def _pieces(
        self, prompt: list[int], tokens: int, temperature: float
    ) -> Iterator[tuple[float, list[int] | None, int]]:
        """Yield (time, token ids or None, tokens of the answer so far) of each chunk."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "seed": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        pieces: list[tuple[float, list[int] | None]] = []
        total = 0
        with self._open("/v1/completions", body) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ValueError(f"{self.url}: {event['error']}")
                total = (event.get("usage") or {}).get("completion_tokens", total)
                for choice in event.get("choices", []):
                    if choice.get("token_ids") or choice.get("text"):
                        pieces.append((time.perf_counter(), choice.get("token_ids")))
        if not pieces:
            raise ValueError(f"{self.url} answered with no tokens")
        yield from ((when, ids, total) for when, ids in pieces)


if __name__ == "__main__":
    worker.work(Server)
