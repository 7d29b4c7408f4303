"""Endless grammars and templates: a server refuses them in time and serves other requests."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forerun.errors import BusyError
from forerun.llm import LLM
from forerun.models import chat_template
from forerun.sampling import compiler
from forerun.worker_process import WORKERS
from tests import tiny
from tests.server import test_lifecycle as processes
from tests.server.serving import TIMEOUT, Serving, serving, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MANY = "range(99999)"
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}"
    f"{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% endfor %}}{{% endfor %}}"
    "{% elif messages[0].content == 'grow' %}{{ 'x' * 10 ** 10 }}"
    "{% elif messages[0].content == 'flood' %}{{ 'x' * 10 ** 7 }}"
    "{% elif messages[0].content == 'refuse' %}{{ raise_exception('I will not') }}"
    f"{{% elif times %}}{{% for a in {MANY} %}}{{% for b in range(times) %}}{{% endfor %}}{{% endfor %}}"
    "{% endif %}{{ messages[-1].content }}"
)
ENDLESS_GRAMMAR = 'start: %json {"type": "integer", "multiple\\u004ff": 100000007}'
EXPLODING = r"(.|\n)*[aeiou](.|\n){30}x"  # the number of lexer states doubles with each character


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("endless") / "tiny"
    shutil.copytree(tiny.repetitive(), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module", autouse=True)
def short_template_timeout() -> Iterator[None]:
    """Stop templates sooner than usual; workers that run already keep their limit."""
    usual, chat_template.SANDBOX.seconds = chat_template.SANDBOX.seconds, 0.5
    yield
    chat_template.SANDBOX.seconds = usual


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Serving]:
    with serving(LLM(model, context=2048, kv_tokens=4096, max_rows=4), max_queue=64) as running:
        yield running


def chat(text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 2, "chat_template_kwargs": options}


def constrained(grammar: str) -> dict[str, Any]:
    form = {"type": "grammar", "grammar": grammar}
    return {"prompt": "x", "max_tokens": 2, "response_format": form}


@pytest.mark.parametrize(
    "body, message",
    [
        (chat("loop"), "takes over 0.5 seconds"),
        pytest.param(chat("hi", times=99999), "takes over 0.5 seconds", marks=pytest.mark.full),
        (chat("grow"), "256 MiB"),
        (chat("flood"), "too long"),
        (chat("refuse"), "I will not"),
    ],
    ids=["loop of the template", "loop of an option", "memory", "long text", "an exception"],
)
def test_endless_templates_are_refused(body: dict[str, Any], message: str, server: Serving) -> None:
    start = time.monotonic()
    answer = server.http.post(CHAT, json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    assert time.monotonic() - start < 15
    assert server.http.post(CHAT, json=chat("hi")).status_code == 200


def test_other_requests_are_served_while_grammars_are_compiled(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more grammars than the server has threads for blocking calls."""

    class Full:
        def call(self, *_: object) -> None:
            raise BusyError("no worker is free")

    workers = compiler.SANDBOX
    bodies = [constrained(ENDLESS_GRAMMAR + " " * i) for i in range(50)]
    with ThreadPoolExecutor(len(bodies)) as clients:
        post = partial(httpx2.post, server.url + COMPLETIONS, timeout=TIMEOUT)
        refused = [clients.submit(post, json=body) for body in bodies]
        until(lambda: len(workers._busy) == WORKERS, "grammars are compiled")
        for path, body in ((COMPLETIONS, {"prompt": "x", "max_tokens": 2}), (CHAT, chat("hi"))):
            assert server.http.post(path, json=body).status_code == 200
        assert not all(future.done() for future in refused)
        monkeypatch.setattr(compiler, "SANDBOX", Full())  # refuse the others at once
        assert {future.result().status_code for future in refused} == {400, 429}


def test_requests_with_the_same_grammar_do_not_affect_each_other(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request once filled the lexer that all of them shared, which ended their answers."""
    monkeypatch.setattr(compiler, "STATES", 3000)
    body = {"prompt": "x", "max_tokens": 20, "seed": 5, "temperature": 100}
    body |= {"top_k": 0, "top_p": 1, "min_p": 0}
    body |= {"response_format": {"type": "regex", "regex": EXPLODING}}
    before = server.answer(COMPLETIONS, body)["choices"][0]
    for seed in range(3):
        server.answer(COMPLETIONS, body | {"max_tokens": 100, "seed": seed})
    assert server.answer(COMPLETIONS, body)["choices"][0] == before
    assert before["finish_reason"] == "length"


def children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def cpu_time(pid: int) -> float:
    """Return the seconds of processor time of a process; 0 if it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_leaves_no_workers(sig: signal.Signals, model: Path) -> None:
    flags = ("--port", "0", "--shutdown-timeout", "0.2")

    def ask(server: processes.Server, body: dict[str, Any], path: str) -> None:
        with suppress(httpx2.HTTPError, ValueError):  # the server ends
            server.post(body, path)

    with processes.start("serve", str(model), *flags) as process:
        server = processes.Server(process)
        try:
            server.wait_until_up()
            for request in ((chat("loop"), CHAT), (constrained(ENDLESS_GRAMMAR), COMPLETIONS)) * 4:
                threading.Thread(target=ask, args=(server, *request), daemon=True).start()
            busy = lambda: any(cpu_time(pid) > 0.5 for pid in children(process.pid))  # noqa: E731
            until(busy, "workers compute")
            workers = children(process.pid)
            process.send_signal(sig)
            assert process.wait(6) == (0 if sig == signal.SIGTERM else -sig)
        finally:
            process.kill()
    ended = lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in workers)  # noqa: E731
    until(ended, "its workers have ended", 5)


def test_the_command_line_refuses_an_endless_template(model: Path) -> None:
    code, errors = processes.run("generate", "--model", str(model), "--max-tokens", "2", "loop")
    assert code == 2 and "takes over 2 seconds" in errors, errors


def test_workers_need_little_memory(server: Serving) -> None:
    for path, body in ((CHAT, chat("hi")), (COMPLETIONS, constrained("start: /[a-z]+/"))):
        assert server.http.post(path, json=body).status_code == 200
    for workers in (chat_template.SANDBOX, compiler.SANDBOX):
        for pid in workers.processes:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            (resident,) = (int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
            assert resident < 80 << 10
