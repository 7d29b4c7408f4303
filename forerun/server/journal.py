"""What is written down of each request: a log line with its request id, and a span where
OpenTelemetry listens."""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from typing import Any

from forerun.server.service import Watcher
from forerun.server.tickets import Ticket

try:
    from opentelemetry import trace
except ImportError:  # it comes with newer FastAPI; without it there are no spans
    trace = None  # type: ignore[assignment]

log = logging.getLogger("forerun.server")
REQUEST_ID: ContextVar[str] = ContextVar("forerun_request_id", default="")


class Journal(Watcher):
    """Writes one entry a request, in the context of the HTTP request it came with."""

    def __init__(self, model: str) -> None:
        self.model = model

    def end(self, ticket: Ticket, error: BaseException | None) -> None:
        """The request has ended: write it down."""
        ticket.desk.context.run(self._write, ticket, error)

    def _write(self, ticket: Ticket, error: BaseException | None) -> None:
        request, now = ticket.request, time.perf_counter()
        facts: dict[str, Any] = {
            "request_id": REQUEST_ID.get(),
            "seconds": round(now - ticket.arrived, 4),
            "error": type(error).__name__ if error else None,
        }
        if request is not None:
            stats = request.stats
            facts |= {
                "finish_reason": request.finish_reason,
                "prompt_tokens": stats.prompt_tokens,
                "completion_tokens": stats.completion_tokens,
                "draft": request.draft,
                "accepted_length": round(stats.accepted_length, 3),
                "first_token_seconds": round(ticket.first - ticket.arrived, 4)
                if ticket.first
                else None,
                "draft_seconds": round(stats.draft_seconds, 4),
                "verify_seconds": round(stats.verify_seconds, 4),
            }
        log.info("request", extra={"facts": facts})
        if trace is not None:
            self._span(ticket, facts, now, error)

    def _span(
        self, ticket: Ticket, facts: dict[str, Any], now: float, error: BaseException | None
    ) -> None:
        """A span over its whole time, with the names of OpenTelemetry's conventions for generative
        models."""
        ended = time.time_ns()
        started = ended - int(1e9 * (now - ticket.arrived))
        span = trace.get_tracer("forerun").start_span("generate", start_time=started)
        span.set_attribute("gen_ai.request.model", self.model)
        names = {
            "prompt_tokens": "gen_ai.usage.input_tokens",
            "completion_tokens": "gen_ai.usage.output_tokens",
        }
        for name, value in facts.items():
            if value is not None:
                span.set_attribute(names.get(name, f"forerun.{name}"), value)
        if error is not None:
            span.record_exception(error)
        span.end(end_time=ended)
