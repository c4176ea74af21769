"""Prometheus metrics of a server: HTTP counters, latency histograms, and the engine's own counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshwright.serving.engine.decode_stats import StepMeans
from meshwright.serving.engine.stats import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format."""

FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
"""Bucket bounds of the time to first token, in seconds."""

TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
"""Bucket bounds of the time per output token, in seconds."""

GAUGES = {
    "queued": "Requests waiting in the queue",
    "running": "Requests in the batch",
    "num_pages": "Pages of the KV cache",
    "used_pages": "Pages of the KV cache used by requests or the prefix cache",
    "uncompiled_programs": "Programs that are still compiled while requests are answered",
}
COUNTERS = {
    "computed_tokens": "Prompt tokens that were computed",
    "prefix_hit_tokens": "Prompt tokens that were in the prefix cache",
    "generated_tokens": "Generated tokens",
    "preemptions": "Preemptions: times a request lost its pages to others",
    "num_steps": "Device steps",
}
MEAN_GAUGES = {
    "step_seconds": "Mean time of a decode step not interrupted by prefill",
    "batch": "Mean number of sequences in such a step",
    "cache_bytes": "Mean bytes of their KV cache pages, over all devices",
    "first_token_seconds": "Mean time to first token; the predicted one has no time in the queue",
}
"""The fields of `StepMeans`; each is a gauge with two samples, `origin="measured"` and `origin="predicted"`."""


class Metrics:
    """The metrics of one server, in its own registry, so that several servers in a process do not share counters.

    Args:
        stats: returns the engine's counters; None without an engine.
        means: returns measured and predicted means of the decode step, or None before there are any.
    """

    def __init__(
        self,
        stats: Callable[[], Stats] | None,
        means: Callable[[], tuple[StepMeans, StepMeans] | None] | None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "meshwright_http_requests",
            "Responses by endpoint and status",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.disconnects = Counter(
            "meshwright_http_disconnects", "Requests whose client disconnected", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "meshwright_prompt_tokens", "Prompt tokens of answered requests", registry=self.registry
        )
        self.completion_tokens = Counter(
            "meshwright_text_tokens", "Generated tokens of answered requests", registry=self.registry
        )
        self._time_to_first_token = Histogram(
            "meshwright_first_token_seconds",
            "Time to first token",
            buckets=FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._time_per_token = Histogram(
            "meshwright_token_seconds",
            "Time per output token after the first, a mean for each completion",
            buckets=TOKEN_SECONDS,
            registry=self.registry,
        )
        if stats is not None:
            self.registry.register(_EngineCollector(stats))
        if means is not None:
            self.registry.register(_MeansCollector(means))

    def observe_completion(self, *, first_token_seconds: float | None, token_seconds: float | None) -> None:
        """Record the latencies of a finished completion.

        Args:
            first_token_seconds: time to first token; None if the completion has no token.
            token_seconds: mean time per token after the first; None if it has fewer than two tokens.
        """
        if first_token_seconds is not None:
            self._time_to_first_token.observe(first_token_seconds)
        if token_seconds is not None:
            self._time_per_token.observe(token_seconds)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Collects the engine's counters at each scrape."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()  # Without this method the registry would call `collect` when this collector is registered.

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, description in GAUGES.items():
            yield GaugeMetricFamily(f"meshwright_{name}", description, value=getattr(stats, name))
        for name, description in COUNTERS.items():
            yield CounterMetricFamily(f"meshwright_{name}", description, value=getattr(stats, name))


class _MeansCollector(Collector):
    """Collects measured and predicted means at each scrape; nothing before the first decode step."""

    def __init__(self, means: Callable[[], tuple[StepMeans, StepMeans] | None]) -> None:
        self._means = means

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        if (both := self._means()) is None:
            return
        measured, predicted = both
        for name, description in MEAN_GAUGES.items():
            gauge = GaugeMetricFamily(f"meshwright_mean_{name}", description, labels=["origin"])
            gauge.add_metric(["predicted"], getattr(predicted, name))
            gauge.add_metric(["measured"], getattr(measured, name))
            yield gauge
