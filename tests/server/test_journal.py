"""What is written down of a request: a log line with its id, and a span below the HTTP request's
own."""

import asyncio
import logging

import httpx2
import pytest

from forerun import LLM
from forerun.server.app import make_app
from forerun.server.settings import Settings
from tests import tiny

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="spans need the OpenTelemetry SDK")
export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


def test_a_request_is_one_line_and_one_span(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry import trace

    exporter, provider = export.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(sdk.export.SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    app = make_app(LLM(tiny.spoken(), kv_tokens=2048), Settings())

    async def ask() -> None:
        async with app.router.lifespan_context(app):
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                body = {"prompt": "def f(", "max_tokens": 5, "temperature": 0}
                answer = await client.post(
                    "/v1/completions", json=body, headers={"X-Request-Id": "mine-1"}
                )
                assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine-1"

    with caplog.at_level(logging.INFO, logger="forerun.server"):
        asyncio.run(ask())
    (line,) = [r for r in caplog.records if r.message == "request"]
    assert line.facts["request_id"] == "mine-1" and line.facts["completion_tokens"] == 5
    spans = {span.name: span for span in exporter.get_finished_spans()}
    mine = spans["generate"].attributes
    assert mine["gen_ai.usage.input_tokens"] == 6 and mine["gen_ai.usage.output_tokens"] == 5
    assert spans["generate"].parent is not None
    assert spans["generate"].context.trace_id == spans["POST /v1/completions"].context.trace_id
