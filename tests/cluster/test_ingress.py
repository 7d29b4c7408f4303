"""The ingress, tested with replicas that are functions in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx2
import pytest

pytest.importorskip("ray")

from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from forerun.cluster import serving
from forerun.cluster.plan import make_plan
from forerun.cluster.serving import HEALTH, RETRIES, Ingress, Replica, merge_metrics
from forerun.server.auth import ApiKeys

TWO = {"models": [{"name": "small"}, {"name": "large:latest", "replicas": {"min": 0}}]}
START = {"type": "http.response.start", "status": 200, "headers": []}
SSE = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
NDJSON = {**START, "headers": [(b"content-type", b"application/x-ndjson")]}
Answer = Callable[[Mapping[str, Any], bytes], AsyncIterator[list[Any]]]


class FakeHandle:
    """A `DeploymentHandle` whose replicas answer with these functions, one for each attempt."""

    def __init__(self, *answers: Answer, pages: Any = ()) -> None:
        self.answers = list(answers)
        self.pages = pages
        self.requests: list[tuple[Mapping[str, Any], bytes, str]] = []
        self.cancelled = 0
        self.answer = self.page = self

    def options(self, stream: bool) -> FakeHandle:
        assert stream
        return self

    def remote(self, scope: Mapping[str, Any], body: Any, key: str = "") -> Any:
        if body == "":
            return self.first_page()
        self.requests.append((scope, body, key))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return FakeStream(self, answer(scope, body))

    async def first_page(self) -> tuple[str, str]:
        return self.pages[0]

    def broadcast(self, method: str, scope: Mapping[str, Any]) -> FakeHandle:
        assert method == "page"
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> Any:
        if self.pages is None:
            raise RuntimeError("Ray is gone")
        if not self.pages:
            raise DeploymentUnavailableError("model")
        return self.pages


class FakeStream:
    """A stream of answers that can be cancelled."""

    def __init__(self, handle: FakeHandle, messages: AsyncIterator[list[Any]]) -> None:
        self.handle = handle
        self.messages = messages

    def __aiter__(self) -> AsyncIterator[list[Any]]:
        return self.messages

    def cancel(self) -> None:
        self.handle.cancelled += 1


def answering(*parts: str, start: Mapping[str, Any] = START, dies: bool = False) -> Answer:
    """Return a replica that sends these parts of a body, and then ends the answer or dies."""

    async def answer(scope: Mapping[str, Any], body: bytes) -> AsyncIterator[list[Any]]:
        for i, part in enumerate(parts):
            message = {"type": "http.response.body", "body": part.encode(), "more_body": True}
            yield [message] if i else [start, message]
        if dies:
            raise RayActorError
        yield [{"type": "http.response.body", "body": b""}]

    return answer


def ingress_of(handles: Mapping[str, Any], plan: Mapping[str, Any] = TWO) -> Ingress:
    made = make_plan(plan)
    return Ingress(made, handles, ApiKeys(made.settings))


async def request(
    ingress: Ingress, path: str, method: str = "GET", **options: Any
) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=ingress.gate)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.request(method, path, **options)


def ask(
    handles: Mapping[str, FakeHandle],
    path: str = "/v1/completions",
    *,
    plan: Mapping[str, Any] = TWO,
    headers: Mapping[str, str] | None = None,
    content: bytes | None = None,
    draining: bool = False,
    **body: Any,
) -> httpx2.Response:
    """Return the answer of an ingress with these handles to a POST, or to a GET without a body."""
    ingress = ingress_of(handles, plan)
    ingress.draining = draining
    content = json.dumps(body).encode() if body else content
    method = "POST" if content else "GET"

    async def send() -> httpx2.Response:
        if path == "/health":
            await ingress.check_replicas()
        return await request(ingress, path, method, content=content, headers=headers)

    return asyncio.run(send())


def handles(*answers: Answer) -> dict[str, FakeHandle]:
    return {"small": FakeHandle(*answers), "large:latest": FakeHandle(answering("large"))}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "x"}, "small"),
        ("/v1/completions", {"model": "small:latest"}, "small"),
        ("/v1/completions", {"model": "large"}, "large"),
        ("/api/show", {"name": "large:latest"}, "large"),
        ("/v1/completions", {"name": "large"}, "small"),
        ("/api/pull", {"model": "anything"}, "small"),
        ("/v1/completions", {"model": 5}, "small"),  # a replica reports the error
        ("/v1/models/large", {}, "large"),
    ],
)
def test_the_model_of_a_request_is_found(path: str, body: dict[str, Any], expected: str) -> None:
    assert ask(handles(answering("small")), path, **body).text == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_unknown_model_is_an_error_that_names_the_known_ones(path: str) -> None:
    response = ask(handles(answering("small")), path, model="medium")
    assert response.status_code == 404
    assert "no model 'medium' here, only 'small', 'large:latest'" in response.text


def test_invalid_json_is_sent_to_a_replica() -> None:
    found = handles(answering("invalid"))
    assert ask(found, content=b'{"model": ').text == "invalid"
    assert found["small"].requests[0][1] == b'{"model": '


def test_keys_and_sizes_are_checked_before_a_body_is_read() -> None:
    plan = TWO | {"api_key": "secret", "max_body": 100}
    found = handles(answering("small"))
    key = {"authorization": "Bearer secret"}
    assert ask(found, plan=plan, prompt="x").status_code == 401
    assert ask(found, plan=plan, headers=key, prompt="x" * 200).status_code == 413
    host = key | {"host": "evil.example"}
    assert ask(found, plan=plan, headers=host, prompt="x").status_code == 421
    assert not found["small"].requests
    assert ask(found, plan=plan, headers=key, prompt="x").text == "small"


def test_requests_of_a_conversation_have_the_same_routing_key() -> None:
    found = handles(answering("small"))
    first = [{"role": "user", "content": "hello"}]
    ask(found, messages=first)
    ask(found, messages=[*first, {"role": "assistant", "content": "hi"}])
    ask(found, messages=first, cache_salt="other tenant")
    one, same, other = (key for _, _, key in found["small"].requests)
    assert one == same != other


def test_a_request_is_retried_if_its_replica_dies_before_it_answers() -> None:
    found = handles(answering(dies=True), answering("second"))
    response = ask(found, prompt="x")
    assert (response.status_code, response.text) == (200, "second")
    assert found["small"].cancelled == 2


def test_a_client_that_leaves_before_the_answer_ends_its_request() -> None:
    """Replicas once continued without a client if the answer was not streamed."""
    ended = []

    async def never(scope: Any, body: bytes) -> AsyncIterator[list[Any]]:
        try:
            await asyncio.sleep(60)
            yield []
        finally:
            ended.append(1)

    found = handles(never)
    received: Any = [{"type": "http.request", "body": b'{"prompt": "x"}'}]

    async def receive() -> Any:
        return received.pop() if received else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def leave() -> None:
        ingress = ingress_of(found)
        scope = HEALTH | {"method": "POST", "path": "/v1/completions", "root_path": ""}
        async with asyncio.timeout(10):
            await ingress.gate(scope, receive, send)
        await asyncio.sleep(0)  # the generator is closed
        assert not ingress.jobs

    asyncio.run(leave())
    assert ended and found["small"].cancelled == 1


def test_a_request_fails_after_several_dead_replicas() -> None:
    found = handles(answering(dies=True))
    response = ask(found, prompt="x")
    assert response.status_code == 503
    assert response.json()["error"]["message"].startswith("the replica of small that worked on")
    assert len(found["small"].requests) == RETRIES + 1


@pytest.mark.parametrize(
    ("start", "last"),
    [
        (SSE, 'data: {"error": {"message": "the replica of small'),
        (NDJSON, '{"error": "the replica of small'),
    ],
)
def test_a_stream_whose_replica_dies_ends_with_one_error(start: Any, last: str) -> None:
    found = handles(answering("data: 1\n\n", start=start, dies=True), answering("never"))
    text = ask(found, prompt="x").text
    assert text.startswith("data: 1\n\n" + last)
    assert text.count('"error":') == 1
    assert text.endswith("data: [DONE]\n\n") == (start is SSE)
    assert len(found["small"].requests) == 1


def test_an_unstreamed_answer_whose_replica_dies_is_aborted() -> None:
    """An answer that is not a stream has no place for an error: its connection must end."""
    with pytest.raises(Exception, match="response already started"):
        ask(handles(answering("half", dies=True)), prompt="x")


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_needs_a_replica_of_every_model_that_must_have_one(path: str) -> None:
    found = {"small": FakeHandle(pages=[("a", "ok")]), "large:latest": FakeHandle()}
    assert ask(found, path).status_code == 200
    for pages in ([], [("a", "")], [RayActorError()]):
        found["small"].pages = pages
        response = ask(found, path)
        assert response.status_code == 503
        assert "no replica of small is up" in response.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/completions"])
def test_requests_are_refused_during_shutdown(path: str) -> None:
    found = {name: FakeHandle(answering("x"), pages=[("a", "ok")]) for name in handles()}
    response = ask(found, path, draining=True)
    assert (response.status_code, "shutting down" in response.text) == (503, True)


def test_health_reports_the_last_check_without_asking_replicas() -> None:
    """A replica that is busy or hangs would answer late."""
    found = {name: FakeHandle(pages=[("a", "ok")]) for name in handles()}
    ingress = ingress_of(found)

    async def both() -> list[int]:
        first = await request(ingress, "/health")
        await ingress.check_replicas()
        del found["small"].pages
        return [first.status_code, (await request(ingress, "/health")).status_code]

    assert asyncio.run(both()) == [503, 200]


def test_health_fails_when_replicas_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an error of Ray in a check would keep the last answer forever."""
    monkeypatch.setattr(serving, "CHECK_SECONDS", 0.0)
    found: dict[str, Any] = {name: FakeHandle(pages=[("a", "ok")]) for name in handles()}
    ingress = ingress_of(found)

    async def ask_after(pages: Any) -> int:
        found["small"].pages = pages
        for _ in range(3):
            await asyncio.sleep(0)
        return (await request(ingress, "/health")).status_code

    async def live() -> list[int]:
        async with ingress.gate.router.lifespan_context(ingress.gate):
            return [await ask_after(pages) for pages in ([("a", "ok")], None, [("a", "ok")])]

    assert asyncio.run(live()) == [200, 503, 200]


def test_a_replica_receives_client_address_and_request_id() -> None:
    found = handles(answering("small"))
    response = ask(found, prompt="x", headers={"x-request-id": "a b"})
    ((scope, _, _),) = found["small"].requests
    assert scope["client"]
    assert [value for name, value in scope["headers"] if name == b"x-request-id"] == [b"ab"]
    assert response.headers["x-request-id"] == "ab"


def test_model_lists_have_the_entries_of_all_models() -> None:
    found = {
        name: FakeHandle(pages=[("a", json.dumps({"object": "list", "data": [{"id": name}]}))])
        for name in ("small", "large:latest")
    }
    listed = ask(found, "/v1/models").json()
    assert listed == {"object": "list", "data": [{"id": "small"}, {"id": "large:latest"}]}


def test_metrics_of_all_replicas_are_one_page() -> None:
    text = '# HELP n_total Number\n# TYPE n_total counter\nn_total{why="x"} 2.0\n'
    found = {
        "small": FakeHandle(pages=[("a", text), ("b", text.replace("2.0", "3.0"))]),
        "large:latest": FakeHandle(),
    }
    (family,) = text_string_to_metric_families(ask(found, "/metrics").text)
    values = {sample.labels["replica"]: sample.value for sample in family.samples}
    assert values == {"a": 2.0, "b": 3.0}
    assert all(s.labels["model"] == "small" and s.labels["why"] == "x" for s in family.samples)
    assert merge_metrics({}) == b""


def test_metrics_need_the_operator_key(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("alice key-of-alice\n")
    plan = TWO | {"api_keys": str(tmp_path / "keys")}
    headers = {"authorization": "Bearer key-of-alice"}
    found = handles(answering("small"))
    assert ask(found, "/metrics", plan=plan, headers=headers).status_code == 403


def replica_of(app: Any) -> Replica:
    replica: Replica = object.__new__(Replica)
    replica.app = app
    return replica


def test_a_replica_sends_the_start_with_the_first_part() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send(dict(START))
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async def collect() -> list[list[Any]]:
        answer = replica_of(app).answer({"type": "http"}, b"hello", "")
        return [batch async for batch in answer if batch]

    first, *rest = asyncio.run(collect())
    assert [message.get("body") for message in first] == [None, b"hello"]
    assert [message["body"] for batch in rest for message in batch] == [b""]


def test_an_application_is_notified_of_a_disconnect() -> None:
    received = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(dict(START))
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        try:
            received.append((await receive())["type"])
        except asyncio.CancelledError:
            received.append("cancelled")

    async def leave() -> None:
        answer: Any = replica_of(app).answer({"type": "http"}, b"", "")
        await anext(answer)
        await answer.aclose()
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert received in (["http.disconnect"], ["cancelled"])


def test_errors_of_the_application_are_raised() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    async def collect() -> None:
        async for _ in replica_of(app).answer({"type": "http"}, b"", ""):
            pass

    with pytest.raises(ZeroDivisionError):
        asyncio.run(collect())
