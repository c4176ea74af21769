"""Merge the Prometheus metrics of a proxy and the replicas behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merged_metrics(front: CollectorRegistry, texts: Mapping[int, str], num_open: Mapping[int, int]) -> bytes:
    """Return the metrics of the proxy and of its replicas, in Prometheus' text format.

    Samples of a replica get the label `replica`.

    Args:
        front: the metrics of the proxy itself.
        texts: the metrics of each ready replica, in Prometheus' text format, by number of the replica.
        num_open: the number of open requests of each replica, by number of the replica.
    """
    families: dict[str, Metric] = {}
    for number, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels={**sample.labels, "replica": str(number)}) for sample in family.samples
            ]
    is_up = GaugeMetricFamily("meshwright_front_replica_up", "Whether a replica accepts requests", labels=["replica"])
    open_requests = GaugeMetricFamily(
        "meshwright_front_replica_requests", "Open requests of a replica", labels=["replica"]
    )
    for number, count in num_open.items():
        is_up.add_metric([str(number)], float(number in texts))
        open_requests.add_metric([str(number)], count)

    class Merged(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from front.collect()
            yield from (is_up, open_requests, *families.values())

    registry = CollectorRegistry()
    registry.register(Merged())
    return generate_latest(registry)
