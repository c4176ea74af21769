"""Bad steps, which end the run or are skipped: loss or gradients not finite, or a gradient norm far above earlier ones.

The compiled step receives a limit of its gradient norm, and leaves parameters and moments unchanged if it is bad. The
limit is computed from the norms of earlier steps in `metrics.jsonl`, so a resumed run skips the same steps.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.execution.training.run_directory.run import Row, read_json_lines
from meshwright.execution.training.stepping import BatchSource
from meshwright.execution.training.update.skipping import NORM_LIMIT
from meshwright.support.files import append_line, write_file

WINDOW = 64
"""Number of earlier steps over whose gradient norms the median is taken."""

FEWEST = 16
"""Minimum number of norms for a median; with fewer, a step has no limit."""

DELAY = 3
"""A step's median has the norms of steps up to `DELAY` before it: later ones are read after its batch was sent."""

FILE = "bad_steps.jsonl"


class NormLimits:
    """Limits of the gradient norm of each step, from the norms of earlier steps.

    Args:
        factor: the limit, as a multiple of the median of earlier norms; None for no limit.
        rows: metrics of the steps already taken.
    """

    def __init__(self, factor: float | None, rows: Iterable[Row]) -> None:
        self._factor = factor
        self._norms: deque[tuple[int, float]] = deque(maxlen=WINDOW + DELAY)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add the metrics of a step; a skipped step does not count."""
        norm = row.get("grad_norm")
        if norm is not None and math.isfinite(norm) and not row.get("skipped"):
            self._norms.append((row["step"], norm))

    def limit(self, step: int) -> float:
        """Return the maximum gradient norm of a step; infinity for no limit."""
        norms = [norm for at, norm in self._norms if at <= step - DELAY][-WINDOW:]
        if self._factor is None or len(norms) < FEWEST:
            return math.inf
        return self._factor * statistics.median(norms)


class LimitedBatches:
    """The batches of a run, each with the gradient norm above which its step is bad (`NORM_LIMIT`)."""

    def __init__(self, batches: BatchSource, limits: NormLimits, mesh: Mesh) -> None:
        self._batches, self._limits = batches, limits
        self._whole = NamedSharding(mesh, PartitionSpec())

    def __getitem__(self, step: int) -> dict[str, Array]:
        limit = np.float32(self._limits.limit(step))
        array = jax.make_array_from_callback((), self._whole, lambda _: np.asarray(limit))
        return {**self._batches[step], NORM_LIMIT: array}


class BadSteps:
    """Recognises bad steps of a run by `loss` and `grad_norm`, and counts how many were skipped in a row.

    Args:
        factor: a step is bad if its norm exceeds this multiple of the median of earlier norms; None for no limit.
        rows: metrics of the steps already taken.
    """

    def __init__(self, factor: float | None, rows: Sequence[Row]) -> None:
        self.limits = NormLimits(factor, rows)
        self.in_a_row = 0
        for row in rows:
            self._count(row)

    def reason(self, row: Row) -> str:
        """Return the reason why a step is bad, from its metrics; empty for a good step. Call for each step in order."""
        self._count(row)
        limit = self.limits.limit(row["step"])
        self.limits.add(row)
        for name, key in (("the loss", "loss"), ("the norm of the gradients", "grad_norm")):
            if not math.isfinite(row.get(key, 0.0)):
                return f"{name} is {row[key]}"
        if np.float32(row.get("grad_norm", 0.0)) > np.float32(limit):
            return f"the norm of the gradients is {row['grad_norm']:.3g}, and the most it may be is {limit:.3g}"
        return ""

    def _count(self, row: Row) -> None:
        self.in_a_row = self.in_a_row + 1 if row.get("skipped") else 0


def log_bad_step(directory: Path, row: Row, reason: str, batch: Mapping[str, Any]) -> None:
    """Add a line to `bad_steps.jsonl`.

    Args:
        reason: why the step is bad.
        batch: what identifies the batch: `seed`, and `items`, {source: the numbers of its rows}.
    """
    finite = {name: row[name] for name in ("loss", "grad_norm") if math.isfinite(row.get(name, math.nan))}
    append_line(directory / FILE, json.dumps({"step": row["step"], "why": reason, **finite, **batch}))


def keep_bad_steps(directory: Path, start: int) -> None:
    """Remove the lines of `bad_steps.jsonl` of steps from `start` on, which are repeated."""
    path = directory / FILE
    if path.is_file():
        rows = [row for _, row in read_json_lines(path, {"step"}) if row["step"] < start]
        write_file(path, "".join(json.dumps(row) + "\n" for row in rows))
