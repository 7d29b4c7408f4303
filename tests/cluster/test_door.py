"""The door asks what `forerun serve` asks, finds the model, and no accepted request is left without
an end."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.cluster.envelope import Trusted
from forerun.cluster.plan import make_plan, replica_settings
from forerun.llm import LLM
from forerun.server.app import make_app
from forerun.server.tenants import CALLER
from tests import tiny
from tests.cluster.paper_crew import ask, door_of

CHAT = {"messages": [{"role": "user", "content": "hello " * 60}]}


def replica(
    name: str, kind: str = "application/json", pieces: int = 1, hold: asyncio.Event | None = None
) -> ASGIApp:
    """An application that says who it is and what it was sent, in pieces; before the last it waits
    for `hold`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        said = {
            "replica": name,
            "path": scope["path"],
            "body": body.decode(),
            "caller": CALLER.get().tenant,
        }
        said["request_id"] = headers.get("x-request-id")
        start = [(b"content-type", kind.encode()), (b"access-control-allow-origin", b"*")]
        await send({"type": "http.response.start", "status": 200, "headers": start})
        for i in range(pieces):
            if hold is not None and i == pieces - 1:
                await hold.wait()
            text = json.dumps(said) if pieces == 1 else f"data: {i}\n\n"
            text = "forerun_running 0.0\n" if scope["path"] == "/metrics" else text
            await send(
                {"type": "http.response.body", "body": text.encode(), "more_body": i < pieces - 1}
            )

    return app


def two(**options: Any) -> dict[str, dict[str, ASGIApp]]:
    return {"small": {name: replica(name, **options) for name in ("x", "y")}}


def test_requests_go_to_the_model_that_they_name_and_else_to_the_first() -> None:
    async def run() -> None:
        door, _ = door_of({"small": {"x": replica("x")}, "large": {"z": replica("z")}})
        for body, name in (
            ({"model": "large"}, "z"),
            ({"model": "large:latest"}, "z"),
            ({"model": "small"}, "x"),
        ):
            assert (await ask(door, "/v1/completions", body)).json()["replica"] == name
        for body in (
            {},
            {"model": None},
            b"no JSON",
            b"[]",
        ):  # what is wrong with them, a replica says
            assert (await ask(door, "/v1/completions", body)).json()["replica"] == "x"
        assert (await ask(door, "/api/show", {"name": "large"})).json()["replica"] == "z"
        assert (await ask(door, "/api/pull", {"model": "huge"})).json()[
            "replica"
        ] == "x"  # which refuses it
        assert (await ask(door, "/playground/x.js")).json()["path"] == "/playground/x.js"
        unknown = await ask(door, "/v1/completions", {"model": "huge"})
        assert unknown.status == 404 and unknown.json()["error"]["code"] == "model_not_found"
        assert "'small', 'large'" in unknown.json()["error"]["message"]

    asyncio.run(run())


def test_keys_names_and_sizes_are_asked_for_at_the_door(tmp_path: Path) -> None:
    async def run() -> None:
        keys = tmp_path / "keys"
        keys.write_text("ann ann-key\n")
        door, crew = door_of(two(), api_key="operator", api_keys=str(keys), max_body=100)
        ann = {"authorization": "Bearer ann-key"}
        assert (await ask(door, "/v1/completions", {})).status == 401
        assert (await ask(door, "/health")).status == 200
        assert (
            await ask(door, "/v1/completions", {}, {"host": "rebound.example"} | ann)
        ).status == 421
        assert (
            await ask(door, "/v1/completions", {}, {"origin": "http://elsewhere"} | ann)
        ).status == 403
        assert (await ask(door, "/v1/completions", b"x" * 101, ann)).status == 413
        assert (await ask(door, "/metrics", None, ann)).status == 403
        assert not crew.asked  # none of that reached a replica
        said = (await ask(door, "/v1/completions", {}, ann | {"x-request-id": "r-7"})).json()
        assert said["caller"] == "ann" and said["request_id"] == "r-7"

    asyncio.run(run())


def test_only_the_door_says_which_pages_may_ask() -> None:
    async def run() -> None:
        page = {"origin": "http://page.example"}
        door, _ = door_of(two(), allowed_origins=["http://page.example"])
        answer = await ask(door, "/v1/completions", {}, page)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        door, _ = door_of(two())
        assert "access-control-allow-origin" not in (await ask(door, "/v1/completions", {})).headers

    asyncio.run(run())


def test_conversations_stay_with_their_replica() -> None:
    async def run() -> None:
        door, crew = door_of(two())
        for text in "abcdef" * 3:
            await ask(
                door,
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": text * 600}]},
            )
        where = [name for _, name in crew.asked]
        assert where == where[:6] * 3
        page = (await ask(door, "/metrics")).body.decode()
        assert (
            sum(float(line.split()[-1]) for line in page.splitlines() if 'reason="prefix"' in line)
            == 12
        )

    asyncio.run(run())


def test_whoever_has_the_end_of_an_answer_finds_its_replica_free() -> None:
    """Else the next turn of a short conversation would go to another one, which has less to do by
    one request."""

    async def run() -> None:
        door, crew = door_of(two(kind="text/event-stream", pieces=3))
        busy: list[int] = []
        await ask(
            door,
            "/v1/completions",
            {},
            got=lambda _: busy.append(sum(crew.ledgers["small"]._running.values())),
        )
        assert busy == [1, 1, 0]

    asyncio.run(run())


@pytest.mark.parametrize("messages", [0, 1], ids=["before its headers", "before its body"])
def test_a_request_whose_replica_dies_is_answered_by_another(messages: int) -> None:
    async def run() -> None:
        door, crew = door_of(two())
        crew.dies = {"x": messages}
        for _ in range(4):
            answer = await ask(door, "/v1/chat/completions", CHAT)
            assert answer.status == 200 and answer.json()["replica"] == "y" and answer.whole
        lost = [model for model, name in crew.asked if name == "x"]
        page = (await ask(door, "/metrics")).body.decode()
        assert lost and f'forerun_sent_again_total{{model="small"}} {len(lost)}.0' in page

    asyncio.run(run())


def test_where_all_replicas_die_the_client_is_told_and_the_retries_are_bounded() -> None:
    async def run() -> None:
        door, crew = door_of(two(), retries=3)
        crew.dies = {"x": 0, "y": 0}
        answer = await ask(door, "/v1/chat/completions", CHAT)
        assert answer.status == 503 and "has died" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "1" and len(crew.asked) == 4

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("text/event-stream; charset=utf-8", '"type": "server_error"'),
        (
            "application/x-ndjson",
            '{"error": "the replica that worked on this has died: try again in a moment"}\n',
        ),
    ],
)
def test_a_stream_whose_replica_dies_ends_with_one_error(kind: str, last: str) -> None:
    async def run() -> None:
        door, crew = door_of(two(kind=kind, pieces=5))
        crew.dies = {"x": 3, "y": 3}
        answer = await ask(door, "/v1/chat/completions", CHAT)
        assert answer.status == 200 and answer.whole and len(crew.asked) == 1
        text = answer.body.decode()
        assert (
            text.startswith("data: 0\n\ndata: 1\n\n")
            and text.count("has died") == 1
            and last in text
        )
        assert kind.startswith("application") or text.endswith("data: [DONE]\n\n")

    asyncio.run(run())


def test_an_answer_that_cannot_hold_an_error_is_cut_off() -> None:
    async def run() -> None:
        door, crew = door_of(two(kind="text/plain", pieces=5))
        crew.dies = {"x": 3, "y": 3}
        with pytest.raises(
            Exception, match="has died"
        ):  # the server closes the connection: the answer is not whole
            await ask(door, "/v1/chat/completions", CHAT)

    asyncio.run(run())


def test_a_replica_is_told_when_the_client_goes_away() -> None:
    async def run() -> None:
        leave, told = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            try:
                await asyncio.Event().wait()
            finally:
                told.set()

        door, crew = door_of({"small": {"x": app}})
        await ask(door, "/v1/completions", {}, got=lambda _: leave.set(), leave=leave)
        async with asyncio.timeout(5):
            await told.wait()
        assert not door.state.service.tickets and crew.ledgers["small"]._running == {"x": 0}

    asyncio.run(run())


def test_a_server_that_shuts_down_takes_nothing_more_and_ends_what_runs() -> None:
    async def run() -> None:
        hold = asyncio.Event()
        door, _ = door_of(two(kind="text/event-stream", pieces=3, hold=hold))
        service = door.state.service
        begun = asyncio.Event()
        running = asyncio.create_task(ask(door, "/v1/completions", {}, got=lambda _: begun.set()))
        await begun.wait()
        service.draining = True
        assert len(service.tickets) == 1
        for path, body in (("/health", None), ("/v1/completions", {}), ("/v1/models", None)):
            assert (await ask(door, path, body)).status == 503
        service.end_all()
        answer = await running
        assert answer.whole and answer.body.decode().count("shutting down") == 1
        assert not service.tickets

    asyncio.run(run())


def test_too_many_requests_are_told_to_come_back() -> None:
    async def run() -> None:
        door, crew = door_of(two())
        crew.full = True
        assert (await ask(door, "/v1/completions", {})).status == 429
        door.state.service._limit = 0
        assert (await ask(door, "/v1/completions", {})).status == 429
        assert (await ask(door, "/health")).status == 200  # which is never shut out

    asyncio.run(run())


def test_schedulers_find_vllms_names_on_the_page_of_all() -> None:
    async def run() -> None:
        plan = make_plan({"models": [{"name": "small"}], "metrics_compat": "vllm"})
        llm = LLM(tiny.spoken(), context=64, kv_tokens=128, max_rows=1)
        app = make_app(llm, replica_settings(plan, plan.models[0]), Trusted(False))
        door, _ = door_of({"small": {"x": app}})
        async with app.router.lifespan_context(app):
            page = (await ask(door, "/metrics")).body.decode()
        where = 'model="small",replica="x"'
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert f"vllm:{name}{{{where}}} 0.0" in page
        pages = llm.engine.target.cache.pages
        labels = (
            f'block_size="{pages.size}",model="small",num_gpu_blocks="{pages.count}",replica="x"'
        )
        assert f"vllm:cache_config_info{{{labels}}} 1.0" in page

    asyncio.run(run())


def test_health_says_which_model_has_no_replica() -> None:
    async def run() -> None:
        door, crew = door_of({"small": {"x": replica("x")}, "large": {"z": replica("z")}})
        crew.ledgers["large"].set_live([])
        answer = await ask(door, "/health")
        assert (
            answer.status == 503
            and "no replica of large is up" in answer.json()["error"]["message"]
        )

    asyncio.run(run())


def test_a_model_that_sleeps_is_no_fault_and_is_not_woken_for_lists() -> None:
    async def run() -> None:
        apps = {"small": {"x": listing("x")}, "large": {"z": listing("z")}}
        door, crew = door_of(
            apps, models=[{"name": "small"}, {"name": "large", "replicas": {"min": 0}}]
        )
        both = (await ask(door, "/v1/models")).json()
        assert [card["id"] for card in both["data"]] == ["x", "z"]
        crew.ledgers["large"].set_live([])
        for path in ("/health", "/ready"):
            assert (await ask(door, path)).status == 200
        asked = len(crew.asked)
        assert (await ask(door, "/v1/models")).json() == both
        assert crew.asked[asked:] == [("small", "x")]

    asyncio.run(run())


def listing(name: str) -> ASGIApp:
    """An application that has one model."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = json.dumps({"object": "list", "data": [{"id": name}]}).encode()
        await send({"type": "http.response.body", "body": body})

    return app


def test_a_failure_of_ours_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("of ours")

    async def run() -> None:
        door, _ = door_of({"small": {"x": app}})
        with caplog.at_level(logging.ERROR, "forerun.server"):
            assert (await ask(door, "/v1/completions", {})).status == 500
        assert any(record.exc_info for record in caplog.records)

    asyncio.run(run())


def test_replicas_of_a_real_model_answer_as_serve_does() -> None:
    """Two applications of `forerun serve` with a model of their own, behind a door with keys."""

    async def run() -> None:
        plan = make_plan({"models": [{"name": "small"}]})
        llms = {
            name: LLM(tiny.spoken(), context=512, kv_tokens=1024, max_rows=2) for name in ("x", "y")
        }
        apps = {
            name: make_app(llm, replica_settings(plan, plan.models[0]), Trusted(True))
            for name, llm in llms.items()
        }
        door, _ = door_of({"small": apps}, api_key="secret")
        key = {"authorization": "Bearer secret"}
        async with (
            apps["x"].router.lifespan_context(apps["x"]),
            apps["y"].router.lifespan_context(apps["y"]),
        ):
            body = {"model": "small", "prompt": "hello", "max_tokens": 4, "seed": 1}
            texts = {
                (await ask(door, "/v1/completions", body, key)).json()["choices"][0]["text"]
                for _ in range(4)
            }
            assert len(texts) == 1  # whichever replica it was
            stream = (
                await ask(door, "/v1/completions", body | {"stream": True}, key)
            ).body.decode()
            assert stream.endswith("data: [DONE]\n\n")
            assert [
                card["id"] for card in (await ask(door, "/v1/models", None, key)).json()["data"]
            ] == ["small"]
            assert (await ask(door, "/ready", None, key)).json() == {"status": "ready"}
            page = (await ask(door, "/metrics", None, key)).body.decode()
            for name in ("x", "y"):
                assert f'forerun_running{{model="small",replica="{name}"}} 0.0' in page
            assert page.count("# TYPE forerun_requests_total counter") == 1
            wrong = await ask(door, "/v1/completions", body | {"temperature": -1}, key)
            assert wrong.status == 400 and "temperature" in wrong.json()["error"]["message"]

    asyncio.run(run())
