"""Pages that are about all models: lists, and the counters of every replica on one page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from forerun.cluster.ledger import Ledger

CREATED = "_created"  # when a counter was made: of no use beside those of others


class _Page(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families


def merged(texts: Mapping[tuple[str, str], str], own: Iterable[Metric]) -> bytes:
    """One Prometheus page.

    Args:
        texts: the page of each replica, by (model, replica), which become labels of each of its
            samples.
        own: what the door counts itself.
    """
    families: dict[str, Metric] = {}
    for (model, replica), text in texts.items():
        for family in text_string_to_metric_families(text):
            if family.name.endswith(CREATED):
                continue
            mine = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = sample.labels | {"model": model, "replica": replica}
                mine.add_sample(sample.name, labels, sample.value)
    return generate_latest(_Page([*own, *families.values()]))


def counted(ledgers: Mapping[str, Ledger], retries: Mapping[str, int]) -> Iterator[Metric]:
    """What the door counts: where requests went and why, and which had to be sent again."""
    replicas = GaugeMetricFamily(
        "forerun_replicas", "Replicas that take requests", labels=["model"]
    )
    routed = CounterMetricFamily(
        "forerun_routed",
        "Requests that ended, by where they went and why",
        labels=["model", "replica", "reason"],
    )
    again = CounterMetricFamily(
        "forerun_sent_again", "Requests whose replica died before it answered", labels=["model"]
    )
    for model, ledger in ledgers.items():
        replicas.add_metric([model], len(ledger.live))
        again.add_metric([model], retries.get(model, 0))
        for (replica, reason), count in sorted(ledger.counts().items()):
            routed.add_metric([model, replica, reason], count)
    yield from (replicas, routed, again)
