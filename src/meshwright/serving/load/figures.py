"""Latency percentiles, throughput and goodput of a load: of many requests sent by `drive`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.serving.load.drive import Answer, Arrivals
from meshwright.units import parse_number

PERCENTILES = (50, 90, 99)

MEASURES = ("ttft", "tpot", "itl", "e2e")
"""Latencies in seconds: time to first token, mean time per output token, inter-token latency, end to end."""


@dataclass(frozen=True)
class LoadFigures:
    """Figures of one load.

    Args:
        load: when its requests were sent.
        num_requests: number of requests sent.
        num_answered: number of complete answers.
        errors: number of failures of each kind.
        reasons: the server's first error message for each kind of failure, if it had one.
        seconds: time from the first request to the end of the last answer.
        prompt_tokens: prompt tokens of the requests with complete answers.
        output_tokens: tokens of complete answers.
        latencies: {measure: {"mean": …, "p50": …, …}} in seconds, for each of `MEASURES` that has values.
        slo: latency limits, {measure: seconds}.
        goodput: complete answers per second of which every latency is within `slo`; None without limits.
        late_seconds: 99th percentile of how much later than scheduled requests were sent. If it is large, the client
            was the bottleneck, not the server.
    """

    load: Arrivals
    num_requests: int
    num_answered: int
    errors: dict[str, int]
    reasons: dict[str, str]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    latencies: dict[str, dict[str, float]]
    slo: dict[str, float]
    goodput: float | None
    late_seconds: float

    @property
    def requests_per_second(self) -> float:
        """Complete answers per second."""
        return self.num_answered / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens of complete answers per second."""
        return self.output_tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON data."""
        rates = {"requests": self.requests_per_second, "output_tokens": self.output_tokens_per_second}
        return asdict(self) | {f"{name}_per_second": rate for name, rate in rates.items()}


def load_figures(load: Arrivals, answers: Sequence[Answer], slo: Mapping[str, float]) -> LoadFigures:
    """Return the figures of a load.

    Args:
        load: when the requests were sent.
        answers: an answer for each request.
        slo: latency limits, {measure: seconds}.
    """
    complete = [answer for answer in answers if not answer.error]
    values = {measure: [value for answer in complete for value in _values(answer, measure)] for measure in MEASURES}
    seconds = max(answer.end for answer in answers) - min(answer.begin for answer in answers)
    in_time = sum(
        all(value <= limit for measure, limit in slo.items() for value in _values(answer, measure))
        for answer in complete
    )
    return LoadFigures(
        load=load,
        num_requests=len(answers),
        num_answered=len(complete),
        errors=dict(Counter(answer.error for answer in answers if answer.error).most_common()),
        reasons={answer.error: answer.reason for answer in reversed(answers) if answer.reason},
        seconds=seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in complete),
        output_tokens=sum(answer.output_tokens for answer in complete),
        latencies={measure: _summary(series) for measure, series in values.items() if series},
        slo=dict(slo),
        goodput=in_time / seconds if slo else None,
        late_seconds=float(np.percentile([answer.late_seconds for answer in answers], 99)),
    )


def read_slo(text: str) -> dict[str, float]:
    """Return {measure: limit in seconds} from a text such as `ttft=0.5,tpot=0.05`.

    Raises:
        MeshwrightError: a measure is unknown or given twice, or its limit is not above 0.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        limit = parse_number(value) if value else 0.0
        if name not in MEASURES or limit <= 0 or name in limits:
            raise MeshwrightError(
                f"--slo {text!r}: {part!r} is not a limit; give each of {', '.join(MEASURES)} at most once, in seconds,"
                " as ttft=0.5,tpot=0.05"
            )
        limits[name] = limit
    return limits


def _values(answer: Answer, measure: str) -> Iterable[float]:
    """Return the values of a latency measure in one answer, in seconds; none if the answer has too few tokens.

    `itl` has a value for each pair of consecutive parts, the other measures one value.
    """
    if measure == "e2e":
        return (answer.end - answer.begin,)
    if not answer.arrivals:
        return ()
    if measure == "ttft":
        return (answer.arrivals[0] - answer.begin,)
    if measure == "tpot":
        if min(len(answer.arrivals), answer.output_tokens) < 2:
            return ()
        return ((answer.arrivals[-1] - answer.arrivals[0]) / (answer.output_tokens - 1),)
    return np.diff(answer.arrivals).tolist()


def _summary(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and percentiles of values, as {"mean", "p50", "p90", "p99"}."""
    percentiles = np.percentile(values, PERCENTILES).tolist()
    return {"mean": float(np.mean(values))} | {f"p{n}": v for n, v in zip(PERCENTILES, percentiles, strict=True)}
