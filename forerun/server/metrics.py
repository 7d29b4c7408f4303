"""Prometheus metrics of one server: counters and histograms of our own, and on wish under vLLM's
names."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from forerun.server.service import Service, Watcher
from forerun.server.tickets import Ticket
from forerun.types import Event

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
)
TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)

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


class Metrics(Watcher):
    """Counts what tickets of a service do. Everything is in `registry`; nothing is global."""

    def __init__(self, service: Service, compat: str) -> None:
        self.registry, r = CollectorRegistry(), CollectorRegistry()
        self.requests = Counter("forerun_requests", "Requests that ended", ["reason"], registry=r)
        self.prompt = Counter("forerun_prompt_tokens", "Prompt tokens read", registry=r)
        self.cached = Counter(
            "forerun_cached_tokens", "Prompt tokens found in the cache", registry=r
        )
        self.completion = Counter("forerun_completion_tokens", "Tokens produced", registry=r)
        self.passes = Counter(
            "forerun_target_passes", "Target passes that produced tokens", registry=r
        )
        self.rounds = Counter(
            "forerun_draft_rounds", "Target passes that verified a draft", registry=r
        )
        self.drafted = Counter(
            "forerun_drafted_tokens", "Drafted tokens verified", ["drafter"], registry=r
        )
        self.accepted = Counter(
            "forerun_accepted_tokens", "Drafted tokens accepted", ["drafter"], registry=r
        )
        self.positions = Counter(
            "forerun_accepted_at", "Accepted tokens by depth", ["position"], registry=r
        )
        self.draft_seconds = Counter(
            "forerun_draft_seconds", "Seconds of drafting, as requests saw it", registry=r
        )
        self.verify_seconds = Counter(
            "forerun_verify_seconds", "Seconds of verifying, as requests saw it", registry=r
        )
        self.plain = Counter(
            "forerun_plain_passes", "Target passes without a draft", ["reason"], registry=r
        )
        self.first = Histogram(
            "forerun_time_to_first_token_seconds", "From arrival", buckets=SECONDS, registry=r
        )
        self.between = Histogram(
            "forerun_inter_token_seconds",
            "Between tokens, a step's time shared",
            buckets=SECONDS,
            registry=r,
        )
        self.length = Histogram(
            "forerun_accepted_length", "Tokens of a target pass", buckets=TOKENS, registry=r
        )
        self.total = Histogram(
            "forerun_request_seconds", "From arrival to end", buckets=SECONDS, registry=r
        )
        r.register(_Now(service))
        self.registry.register(r)
        if compat == "vllm":
            self.registry.register(_Vllm(r, service))

    def event(self, ticket: Ticket, event: Event, now: float) -> None:
        """Times between tokens and lengths of steps."""
        count = len(event.token_ids)
        if not count:
            return
        if not ticket.first:
            self.first.observe(now - ticket.arrived)
        else:
            for _ in range(count):
                self.between.observe((now - ticket.last) / count)
        self.length.observe(count)

    def end(self, ticket: Ticket, error: BaseException | None) -> None:
        """Everything a request's own statistics say."""
        request = ticket.request
        reason = (
            "failed"
            if error
            else "cancelled"
            if ticket.cancelled
            else (request and request.finish_reason) or "?"
        )
        self.requests.labels(reason).inc()
        self.total.observe(time.perf_counter() - ticket.arrived)
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
        rounds = [r for r in stats.rounds if r[0]]
        self.rounds.inc(len(rounds))
        for depth in range(1, max((accepted for _, accepted in rounds), default=0) + 1):
            self.positions.labels(str(depth)).inc(sum(accepted >= depth for _, accepted in rounds))
        self.plain.labels("off" if request.draft == "off" else "no draft paid or matched").inc(
            len(stats.rounds) - len(rounds)
        )


class _Now(Collector):
    """Gauges read when asked for."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        engine = self.service.llm.engine
        scheduler, pages = engine.scheduler, engine.target.cache.pages
        yield GaugeMetricFamily("forerun_running", "Requests in the engine", len(scheduler.running))
        yield GaugeMetricFamily(
            "forerun_waiting", "Requests that wait for a place", len(scheduler.waiting)
        )
        yield GaugeMetricFamily(
            "forerun_kv_used", "Share of the KV pages in use", pages.used / pages.count
        )
        yield CounterMetricFamily(
            "forerun_engine_failures", "Times the engine started over", self.service.failures
        )
        guard = engine.guard
        yield GaugeMetricFamily(
            "forerun_worth", "Speed where drafted lately, as a share of plain", guard.worth
        )
        yield CounterMetricFamily(
            "forerun_rests", "Times speculation was slower and was stopped", guard.rests
        )


class _Vllm(Collector):
    """The names vLLM has for the same things, so that dashboards and schedulers made for it
    work."""

    def __init__(self, registry: CollectorRegistry, service: Service) -> None:
        self.registry, self.service = registry, service

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self.registry.collect()}
        for theirs, (ours, labels) in VLLM_COUNTERS.items():
            family = CounterMetricFamily(theirs, f"As {ours}", labels=labels or None)
            totals: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
            for sample in families[ours].samples:
                if sample.name.endswith("_total"):
                    key = tuple(
                        str(int(sample.labels[name]) - 1) for name in labels
                    )  # vLLM counts positions from 0
                    totals[key] = totals.get(key, 0.0) + sample.value
            for key, value in totals.items():
                family.add_metric(list(key), value)
            yield family
        for theirs, ours in VLLM_GAUGES.items():
            yield GaugeMetricFamily(theirs, f"As {ours}", families[ours].samples[0].value)
        pages = (
            self.service.llm.engine.target.cache.pages
        )  # schedulers learn from it what a cache can hold
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache", labels=["block_size", "num_gpu_blocks"]
        )
        cache.add_metric([str(pages.size), str(pages.count)], 1)
        yield cache
        for theirs, ours in VLLM_HISTOGRAMS.items():
            renamed = Metric(theirs, families[ours].documentation, "histogram")
            for sample in families[ours].samples:
                renamed.add_sample(
                    sample.name.replace(ours, theirs, 1), sample.labels, sample.value
                )
            yield renamed
