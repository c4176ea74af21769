"""What the answers of a load say of a server: latencies, throughput, and what was in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.serving.load.drive import Answer, Load
from meshwright.units import parse_number

PERCENTILES = (50, 90, 99)

MEASURES = ("ttft", "tpot", "itl", "e2e")
"""Seconds to the first token, from token to token on average over an answer, from part to part, and to the end."""


@dataclass(frozen=True)
class LoadFigures:
    """Figures of one load.

    Args:
        seconds: from the first request to the end of the last answer.
        errors: how often each kind of failure came. reasons: what the server said of the first of each kind, if it did.
        latencies: for each of `MEASURES` its mean and percentiles, as {"mean": …, "p50": …}; empty without answers.
        goodput: the answers a second within every limit of `slo`, seconds by measure; None without limits.
        late_seconds: the 99th percentile of how much later than their rate requests were sent: if it is much, the
            client and not the server is what was measured.
    """

    load: Load
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
        """Whole answers a second."""
        return self.num_answered / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens of whole answers a second."""
        return self.output_tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        rates = {"requests": self.requests_per_second, "output_tokens": self.output_tokens_per_second}
        return asdict(self) | {f"{name}_per_second": rate for name, rate in rates.items()}


def load_figures(load: Load, answers: Sequence[Answer], slo: Mapping[str, float]) -> LoadFigures:
    """The figures of a load's answers."""
    whole = [answer for answer in answers if not answer.error]
    values = {measure: [value for answer in whole for value in _values(answer, measure)] for measure in MEASURES}
    seconds = max(answer.end for answer in answers) - min(answer.begin for answer in answers)
    in_time = sum(
        all(value <= limit for measure, limit in slo.items() for value in _values(answer, measure)) for answer in whole
    )
    return LoadFigures(
        load=load,
        num_requests=len(answers),
        num_answered=len(whole),
        errors=dict(Counter(answer.error for answer in answers if answer.error).most_common()),
        reasons={answer.error: answer.reason for answer in reversed(answers) if answer.reason},
        seconds=seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in whole),
        output_tokens=sum(answer.output_tokens for answer in whole),
        latencies={measure: _spread(found) for measure, found in values.items() if found},
        slo=dict(slo),
        goodput=in_time / seconds if slo else None,
        late_seconds=float(np.percentile([answer.late_seconds for answer in answers], 99)),
    )


def read_slo(text: str) -> dict[str, float]:
    """Limits in seconds by measure, from `ttft=0.5,tpot=0.05`."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        limit = parse_number(value) if value else 0.0
        if name not in MEASURES or limit <= 0 or name in found:
            raise MeshwrightError(
                f"--slo {text!r}: {part!r} is no limit; write each of {', '.join(MEASURES)} once at most, in seconds,"
                " as ttft=0.5,tpot=0.05"
            )
        found[name] = limit
    return found


def _values(answer: Answer, measure: str) -> Iterable[float]:
    """An answer's values of a measure; none where it has too few tokens for one."""
    if measure == "e2e":
        return (answer.end - answer.begin,)
    if not answer.arrivals:
        return ()
    if measure == "ttft":
        return (answer.arrivals[0] - answer.begin,)
    if measure == "tpot":
        if len(answer.arrivals) < 2:
            return ()
        return ((answer.arrivals[-1] - answer.arrivals[0]) / (answer.output_tokens - 1),)
    return np.diff(answer.arrivals).tolist()


def _spread(values: Sequence[float]) -> dict[str, float]:
    """The mean and the percentiles of some values."""
    percentiles = np.percentile(values, PERCENTILES).tolist()
    return {"mean": float(np.mean(values))} | {f"p{n}": v for n, v in zip(PERCENTILES, percentiles, strict=True)}
