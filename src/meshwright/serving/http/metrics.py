"""The numbers of a server in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshwright.serving.decode_stats import StepMeans
from meshwright.serving.stats import Stats

FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
"""Upper ends of the histogram of times to first tokens."""

TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
"""Upper ends of the histogram of times from token to token."""

GAUGES = {
    "queued": "Requests that wait for the batch",
    "running": "Requests in the batch",
    "num_pages": "Pages of the KV cache",
    "used_pages": "Pages of the KV cache that requests or the prefix cache need",
}
COUNTERS = {
    "computed_tokens": "Tokens of prompts that were computed",
    "prefix_hit_tokens": "Tokens of prompts that were in the prefix cache",
    "generated_tokens": "Tokens made",
    "preemptions": "Times a request lost its pages to others",
    "num_steps": "Device steps",
}
MEANS = {
    "step_seconds": "Mean time of a step of decoding that nothing came between",
    "batch": "Mean texts of such a step",
    "cache_bytes": "Mean bytes of their pages, over all devices",
    "first_token_seconds": "Mean time from a request to its first token; the predicted one waits for nothing",
}
"""The fields of `StepMeans`: each a gauge of two samples, measured, and predicted for sequences of equal lengths."""


class Metrics:
    """What a server counts. The registry is its own: several servers of one process do not share numbers."""

    def __init__(
        self,
        stats: Callable[[], Stats] | None,
        means: Callable[[], tuple[StepMeans, StepMeans] | None] | None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "meshwright_http_requests", "Answers by endpoint and status", ("endpoint", "status"), registry=self.registry
        )
        self.disconnects = Counter(
            "meshwright_http_disconnects", "Requests whose client went away", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "meshwright_prompt_tokens", "Tokens of the prompts that were answered", registry=self.registry
        )
        self.text_tokens = Counter("meshwright_text_tokens", "Tokens of the texts answered", registry=self.registry)
        self._first = Histogram(
            "meshwright_first_token_seconds",
            "Time from a request to its first token",
            buckets=FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._token = Histogram(
            "meshwright_token_seconds",
            "Time from token to token, the mean of each text",
            buckets=TOKEN_SECONDS,
            registry=self.registry,
        )
        if stats is not None:
            self.registry.register(_OfEngine(stats))
        if means is not None:
            self.registry.register(_OfPlan(means))

    def observe_text(self, *, first_seconds: float | None, token_seconds: float | None) -> None:
        """Take the times of a text that has ended; None of one with no token, or with no second one."""
        if first_seconds is not None:
            self._first.observe(first_seconds)
        if token_seconds is not None:
            self._token.observe(token_seconds)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class _OfEngine(Collector):
    """The engine's own numbers, read when they are asked for."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()  # Else the registry would ask an engine that may not be there yet.

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, what in GAUGES.items():
            yield GaugeMetricFamily(f"meshwright_{name}", what, value=getattr(stats, name))
        for name, what in COUNTERS.items():
            yield CounterMetricFamily(f"meshwright_{name}", what, value=getattr(stats, name))


class _OfPlan(Collector):
    """What is measured of the engine's steps beside what is planned; nothing before there is anything to compare."""

    def __init__(self, means: Callable[[], tuple[StepMeans, StepMeans] | None]) -> None:
        self._means = means

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        if (both := self._means()) is None:
            return
        measured, planned = both
        for name, what in MEANS.items():
            gauge = GaugeMetricFamily(f"meshwright_mean_{name}", what, labels=["origin"])
            gauge.add_metric(["predicted"], getattr(planned, name))
            gauge.add_metric(["measured"], getattr(measured, name))
            yield gauge
