"""The numbers of a front and its replicas, in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merged_metrics(front: CollectorRegistry, texts: Mapping[int, str], opened: Mapping[int, int]) -> bytes:
    """What the front counts, and what each replica does, its samples labelled with its number.

    Args:
        texts: of the replicas that answer, by their numbers. opened: the requests that each replica has.
    """
    families: dict[str, Metric] = {}
    for number, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels={**sample.labels, "replica": str(number)}) for sample in family.samples
            ]
    is_up = GaugeMetricFamily("meshwright_front_replica_up", "Whether a replica takes requests", labels=["replica"])
    has = GaugeMetricFamily("meshwright_front_replica_requests", "Open requests of a replica", labels=["replica"])
    for number, count in opened.items():
        is_up.add_metric([str(number)], float(number in texts))
        has.add_metric([str(number)], count)

    class All(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from front.collect()
            yield from (is_up, has, *families.values())

    registry = CollectorRegistry()
    registry.register(All())
    return generate_latest(registry)
