"""Logs of the server on stderr, JSON or plain lines that are limited in number and length, metrics
for Prometheus, and a log line and an OpenTelemetry span for each job."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from forerun.server.auth import REQUEST_ID
from forerun.server.jobs import EngineService, Job, JobObserver
from forerun.types import Event
from forerun.utils import json_line

MAX_LINES = 10  # warnings and errors of one kind in a window; the rest is counted
WINDOW = 10.0  # seconds
MAX_KINDS = 256
MAX_LENGTH = 16 << 10  # characters of a message or a traceback
OTHER_KINDS = ("", 0, "")  # the kind of all records beyond MAX_KINDS

Kind = tuple[str, int, str]


@dataclass(slots=True)
class _Window:
    start: float
    num_lines: int = 0
    num_omitted: int = 0


class LimitedHandler(logging.StreamHandler[IO[str]]):
    """A handler that writes at most `MAX_LINES` warnings or errors of one kind in a window.

    A kind is a logger, a level and a message before its arguments are put in. At the end of the
    window, one line tells how many were omitted. Lines below a warning are not limited: they are
    written only with --verbose.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._windows: dict[Kind, _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it as omitted."""
        if record.levelno < logging.WARNING:
            super().emit(record)
            return
        self.report_omitted()
        kind = (record.name, record.levelno, str(record.msg))
        if kind not in self._windows and len(self._windows) >= MAX_KINDS:
            kind = OTHER_KINDS
        window = self._windows.setdefault(kind, _Window(time.monotonic()))
        window.num_lines += 1
        if window.num_lines > MAX_LINES:
            window.num_omitted += 1
        else:
            super().emit(record)

    def report_omitted(self) -> None:
        """Close the windows that are over, and write how many lines were omitted in each."""
        now = time.monotonic()
        self.acquire()  # a reentrant lock, which `emit` holds already
        try:
            over = [kind for kind, window in self._windows.items() if now - window.start >= WINDOW]
            for name, level, message in over:
                omitted = self._windows.pop((name, level, message)).num_omitted
                if omitted:
                    text = f"{omitted} more lines like this one were left out: {message[:200]}"
                    super().emit(logging.LogRecord(name, level, "", 0, text, (), None))
        finally:
            self.release()


class JsonLines(logging.Formatter):
    """Formats one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        entry |= {"message": shorten_middle(record.getMessage())} | getattr(record, "facts", {})
        if record.exc_info:
            entry["error"] = shorten_middle(self.formatException(record.exc_info))
        return json_line(entry, ascii_only=True)


class PlainLines(logging.Formatter):
    """Formats a line for a terminal, with the facts of a request behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return shorten_middle(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = getattr(record, "facts", {})
        parts = [f"{name}={value}" for name, value in facts.items() if value is not None]
        return " ".join([super().formatMessage(record), *parts])


def start_logging(verbose: bool, terminal: bool) -> None:
    """Log to stderr: plain lines on a terminal, JSON otherwise; requests only if `verbose`."""
    handler = LimitedHandler()
    handler.setFormatter(PlainLines() if terminal else JsonLines())
    handler.addFilter(_is_not_cancellation)
    levels = {
        "forerun": logging.INFO if verbose else logging.WARNING,
        "uvicorn.error": logging.WARNING,
        "asyncio": logging.ERROR,  # its warnings are about clients that have gone
    }
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)


def report_omitted() -> None:
    """Let forerun's handlers report how many lines they omitted, where a window is over."""
    for handler in logging.getLogger("forerun").handlers:
        if isinstance(handler, LimitedHandler):
            handler.report_omitted()


def shorten_middle(text: str) -> str:
    """Replace the middle of a text over `MAX_LENGTH` characters."""
    if len(text) <= MAX_LENGTH:
        return text
    half = MAX_LENGTH // 2
    return f"{text[:half]} ... {len(text) - MAX_LENGTH} characters ... {text[-half:]}"


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """Drop uvicorn's records of requests that were cancelled by the end of the server."""
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False
    return "CancelledError" not in record.getMessage()


try:
    from opentelemetry import trace
except ImportError:  # optional: without it there are no spans
    trace = None  # type: ignore[assignment]

log = logging.getLogger("forerun.server")
MILLISECOND_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
SECONDS = (*MILLISECOND_BUCKETS, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)

# vLLM's name: (name here, labels)
VLLM_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm:spec_decode_num_drafts": ("forerun_draft_rounds", ()),
    "vllm:spec_decode_num_draft_tokens": ("forerun_drafted_tokens", ()),
    "vllm:spec_decode_num_accepted_tokens": ("forerun_accepted_tokens", ()),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("forerun_accepted_at", ("position",)),
    "vllm:prompt_tokens": ("forerun_prompt_tokens", ()),
    "vllm:generation_tokens": ("forerun_completion_tokens", ()),
}
VLLM_GAUGES = {
    "vllm:num_requests_running": "forerun_running",
    "vllm:num_requests_waiting": "forerun_waiting",
    "vllm:kv_cache_usage_perc": "forerun_kv_used",
}
VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "forerun_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "forerun_inter_token_seconds",
    "vllm:e2e_request_latency_seconds": "forerun_request_seconds",
}


class Metrics(JobObserver):
    """Metrics of one service, collected in `registry` rather than in the global one."""

    def __init__(self, service: EngineService, compat: str) -> None:
        """Register the metrics; `compat` is "vllm" to add vLLM's names."""
        registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"forerun_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"forerun_{name}", text, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests that ended", "reason")
        self.prompt = counter("prompt_tokens", "Prompt tokens read")
        self.cached = counter("cached_tokens", "Prompt tokens found in the cache")
        self.completion = counter("completion_tokens", "Tokens produced")
        self.passes = counter("target_passes", "Target passes that produced tokens")
        self.rounds = counter("draft_rounds", "Target passes that verified a draft")
        self.drafted = counter("drafted_tokens", "Drafted tokens verified", "drafter")
        self.accepted = counter("accepted_tokens", "Drafted tokens accepted", "drafter")
        self.positions = counter("accepted_at", "Accepted tokens by depth", "position")
        self.draft_seconds = counter("draft_seconds", "Seconds of drafting, as requests saw it")
        self.verify_seconds = counter("verify_seconds", "Seconds of verifying, as requests saw it")
        self.plain = counter("plain_passes", "Target passes without a draft", "reason")
        self.first = histogram("time_to_first_token_seconds", "From arrival")
        self.between = histogram("inter_token_seconds", "Between tokens, a step's time shared")
        self.length = histogram("accepted_length", "Tokens of a target pass", TOKENS)
        self.total = histogram("request_seconds", "From arrival to end")
        registry.register(_Gauges(service))
        self.registry = CollectorRegistry()
        self.registry.register(registry)
        if compat == "vllm":
            self.registry.register(_VllmNames(registry, service))

    def on_event(self, job: Job, event: Event, now: float) -> None:
        """Record the time between tokens and the length of a step."""
        count = len(event.token_ids)
        if not count:
            return
        if job.first:
            for _ in range(count):
                self.between.observe((now - job.last) / count)
        else:
            self.first.observe(now - job.arrived)
        self.length.observe(count)

    def on_end(self, job: Job, error: BaseException | None) -> None:
        request = job.request
        reason = (request and request.finish_reason) or "?"
        if error:
            reason = "failed"
        elif job.cancelled:
            reason = "cancelled"
        self.requests.labels(reason).inc()
        self.total.observe(time.perf_counter() - job.arrived)
        if request is None:
            return
        stats = request.stats
        self.prompt.inc(stats.prompt_tokens)
        self.cached.inc(stats.cached_tokens)
        self.completion.inc(stats.completion_tokens)
        self.passes.inc(stats.steps)
        self.draft_seconds.inc(stats.draft_seconds)
        self.verify_seconds.inc(stats.verify_seconds)
        for name, source in stats.by_source.items():
            self.drafted.labels(name).inc(source.drafted)
            self.accepted.labels(name).inc(source.accepted)
        accepted_counts = [accepted for drafted, accepted in stats.rounds if drafted]
        self.rounds.inc(len(accepted_counts))
        for depth in range(1, max(accepted_counts, default=0) + 1):
            reached = sum(accepted >= depth for accepted in accepted_counts)
            self.positions.labels(str(depth)).inc(reached)
        plain_reason = "off" if request.draft == "off" else "no draft paid or matched"
        self.plain.labels(plain_reason).inc(len(stats.rounds) - len(accepted_counts))


class RequestLog(JobObserver):
    """Writes one log line and one span for each job, in the context of its HTTP request."""

    def __init__(self, model: str) -> None:
        self.model = model

    def on_end(self, job: Job, error: BaseException | None) -> None:
        job.context.run(self._write, job, error)

    def _write(self, job: Job, error: BaseException | None) -> None:
        now = time.perf_counter()
        facts: dict[str, Any] = {
            "request_id": REQUEST_ID.get(),
            "seconds": round(now - job.arrived, 4),
            "error": type(error).__name__ if error else None,
        }
        if job.request is not None:
            stats = job.request.stats
            facts |= {
                "finish_reason": job.request.finish_reason,
                "prompt_tokens": stats.prompt_tokens,
                "completion_tokens": stats.completion_tokens,
                "draft": job.request.draft,
                "accepted_length": round(stats.accepted_length, 3),
                "first_token_seconds": round(job.first - job.arrived, 4) if job.first else None,
                "draft_seconds": round(stats.draft_seconds, 4),
                "verify_seconds": round(stats.verify_seconds, 4),
            }
        log.info("request", extra={"facts": facts})
        if trace is not None:
            self._trace(job, facts, now, error)

    def _trace(
        self, job: Job, facts: dict[str, Any], now: float, error: BaseException | None
    ) -> None:
        """Record a span, with the names of OpenTelemetry's conventions for generative models."""
        end = time.time_ns()
        start = end - int(1e9 * (now - job.arrived))
        span = trace.get_tracer("forerun").start_span("generate", start_time=start)
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
        span.end(end_time=end)


class _Gauges(Collector):
    """Values that are read from the engine when a client asks for the metrics."""

    def __init__(self, service: EngineService) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        engine = self.service.llm.engine
        scheduler, guard, pages = engine.scheduler, engine.guard, engine.target.cache.pages
        gauges = {
            "running": ("Requests in the engine", len(scheduler.running)),
            "waiting": ("Requests that wait for a place", len(scheduler.waiting)),
            "kv_used": ("Share of the KV pages in use", pages.used / pages.count),
            "worth": ("Recent speed with drafts, relative to plain decoding", guard.speedup),
        }
        counters = {
            "engine_failures": ("Times the engine started over", self.service.failures),
            "rests": ("Times speculation was slower and was stopped", guard.pauses),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"forerun_{name}", text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"forerun_{name}", text, value)


class _VllmNames(Collector):
    """vLLM's names for the same metrics, for dashboards and schedulers made for vLLM."""

    def __init__(self, registry: CollectorRegistry, service: EngineService) -> None:
        self.registry = registry
        self.service = service

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self.registry.collect()}
        for vllm_name, (own_name, labels) in VLLM_COUNTERS.items():
            family = CounterMetricFamily(vllm_name, f"As {own_name}", labels=labels or None)
            totals: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
            for sample in families[own_name].samples:
                if sample.name.endswith("_total"):
                    # vLLM counts positions from 0
                    key = tuple(str(int(sample.labels[name]) - 1) for name in labels)
                    totals[key] = totals.get(key, 0.0) + sample.value
            for key, value in totals.items():
                family.add_metric(list(key), value)
            yield family
        for vllm_name, own_name in VLLM_GAUGES.items():
            value = families[own_name].samples[0].value
            yield GaugeMetricFamily(vllm_name, f"As {own_name}", value)
        pages = self.service.llm.engine.target.cache.pages
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache", labels=["block_size", "num_gpu_blocks"]
        )
        cache.add_metric([str(pages.size), str(pages.count)], 1)
        yield cache
        for vllm_name, own_name in VLLM_HISTOGRAMS.items():
            renamed = Metric(vllm_name, families[own_name].documentation, "histogram")
            for sample in families[own_name].samples:
                name = sample.name.replace(own_name, vllm_name, 1)
                renamed.add_sample(name, sample.labels, sample.value)
            yield renamed
