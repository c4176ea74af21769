"""Sweeps: plan the best mesh for each of several numbers of chips, batches or sequence lengths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.description.hardware.system import System
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.planning.plan import Plan
from meshwright.record import Record
from meshwright.units import parse_count

KEYS = ("chips", "batch", "seq_len")
"""The quantities that a sweep can change; without a torus, `chips` counts devices."""


@dataclass(frozen=True)
class Sweep:
    """The quantity that a sweep changes, and its values."""

    key: str
    values: tuple[int, ...]

    @property
    def replaced(self) -> tuple[str, ...]:
        """The workload options that the sweep's values replace."""
        return () if self.key == "chips" else (self.key, "batch_tokens")


@dataclass(frozen=True)
class Point:
    """One value of a sweep, the system as text, and the best plan or the reason why there is none."""

    value: int
    system: str
    plan: Plan | None
    reason: str = ""

    @property
    def record(self) -> Record | None:
        """The plan's predicted record; None if there is no plan."""
        return self.plan.predicted if self.plan else None


def read_sweep(text: str) -> Sweep:
    """Return the sweep that a text describes.

    `batch=96,192,256` lists the values; `chips=64..1024` doubles from 64 up to 1024. Without a name, values are chips.

    Raises:
        MeshwrightError: the quantity is unknown, or values are missing, below 1 or not distinct.

    >>> read_sweep("chips=64..256").values
    (64, 128, 256)
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MeshwrightError(f"sweep is {text!r}; it is text, as 'chips=64..1024' or 'batch=96,192'")
    key, _, said = (f"chips={text}" if text[:1].isdecimal() else text).partition("=")
    key = key.strip().replace("-", "_")
    if key not in KEYS or not said:
        raise MeshwrightError(f"sweep {text!r} is not {', '.join(KEYS)} and values, as chips=64..1024 or batch=96,192")
    bounds = re.fullmatch(r"(.+?)\.\.(.+)", said)
    values = _doubled(*map(parse_count, bounds.groups())) if bounds else tuple(map(parse_count, said.split(",")))
    if not values or min(values) < 1:
        raise MeshwrightError(f"sweep {text!r} has no values; they are whole numbers from 1, ascending in a range")
    if twice := [value for value in values if values.count(value) > 1]:
        raise MeshwrightError(f"sweep {text!r} has {twice[0]} twice; leave one out")
    return Sweep(key, values)


def swept_options(sweep: Sweep, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a workload, with the sweep's first value for the option that the sweep changes.

    Raises:
        MeshwrightError: the sweep is over sequence lengths and the options have no `batch`.
    """
    if sweep.key == "chips":
        return dict(options)
    if sweep.key == "seq_len" and options.get("batch") is None:
        raise MeshwrightError(
            "--sweep seq-len needs --batch (batch=…): so many tokens are another batch at each length"
        )
    return {**options, sweep.key: sweep.values[0]}


def run_sweep(
    sweep: Sweep, workload: Workload, system: System, best: Callable[[Workload, System], Plan]
) -> tuple[Point, ...]:
    """Return a point for each value of a sweep; best: plans a workload on a system."""
    return tuple(_point(sweep.key, value, workload, system, best) for value in sweep.values)


def check_planned(sweep: Sweep, points: Sequence[Point]) -> None:
    """Raise if no point of a sweep has a plan, with the reason of the first point."""
    if not any(point.plan for point in points):
        raise MeshwrightError(f"no value of --sweep can be planned; {sweep.key}={points[0].value}: {points[0].reason}")


def _point(key: str, value: int, workload: Workload, system: System, best: Callable[[Workload, System], Plan]) -> Point:
    """Return the point of one value of the quantity `key`. best: as in `run_sweep`."""
    try:
        if key == "chips":
            system = system.resized(value)
        else:
            workload = replace(workload, **{key: value})
        return Point(value, str(system), best(workload, system))
    except MeshwrightError as error:
        return Point(value, str(system) if key != "chips" else f"{system.chip.name}:{value}", None, str(error))


def _doubled(first: int, last: int) -> tuple[int, ...]:
    """Return the numbers from `first` up to `last`, each twice the one before."""
    values: list[int] = []
    while first and first <= last:
        values.append(first)
        first *= 2
    return tuple(values)
