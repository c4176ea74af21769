"""How one record differs from another: integers exactly, other numbers to a relative 1e-3."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

RELATIVE = 1e-3


class Difference(NamedTuple):
    """One quantity of a case that is otherwise than recorded."""

    case: str
    quantity: str
    was: Any
    now: Any

    def __str__(self) -> str:
        share = ""
        if _is_number(self.was) and _is_number(self.now) and self.was:
            share = f"  ({self.now / self.was - 1:+.3%})"
        return f"{self.case}: {self.quantity}: was {self.was}, is {self.now}{share}"


def differences(case: str, was: Any, now: Any, quantity: str = "") -> Iterator[Difference]:
    """Every number, word and collective that differs; quantities are named by their path, as `memory/peak`."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted(was | now):
            yield from differences(case, was.get(name), now.get(name), f"{quantity}/{name}".lstrip("/"))
    elif quantity == "predicted collectives":
        yield from differences(case, _by_kind(was), _by_kind(now), quantity)
    elif "collectives" in quantity and isinstance(was or now, list):
        yield from _other_collectives(case, was or [], now or [], quantity)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (old, new) in enumerate(zip(was, now, strict=True)):
            yield from differences(case, old, new, f"{quantity}/{index}")
    elif not _is_equal(was, now):
        yield Difference(case, quantity, was, now)


def _by_kind(moves: list[list[Any]] | None) -> dict[str, dict[str, Any]]:
    """Merged collectives by kind, axes and phase."""
    return {
        f"{kind} {axes} {phase}": {"bytes": size, "count": count, "seconds": seconds, "exposed seconds": exposed}
        for kind, axes, phase, size, count, _, seconds, exposed in moves or []
    }


def _other_collectives(case: str, was: list[Any], now: list[Any], quantity: str) -> Iterator[Difference]:
    """Collectives that only one of two lists has; what arrays are called does not matter.

    Those of one kind, axes and phase that move arrays of one name are one, whichever uses of it they are for.
    """
    was, now = _added_up(was), _added_up(now)
    ours, theirs = (Counter(tuple(move[:5]) for move in moves) for moves in (was, now))
    arrays = {tuple(move[:5]): move[5] for move in (*was, *now)}
    for move in sorted((ours - theirs) + (theirs - ours)):
        kind, axes, phase, size, count = move
        name = f"{quantity}/{kind} {axes} {phase} {arrays[move]} {size} B x{count}"
        yield Difference(case, name, ours[move], theirs[move])


def _added_up(moves: list[list[Any]]) -> list[list[Any]]:
    """Collectives with those of one kind, axes, phase and array added up."""
    sums: dict[tuple[Any, ...], list[Any]] = {}
    for kind, axes, phase, size, count, array in moves:
        found = sums.setdefault((kind, axes, phase, array), [kind, axes, phase, 0, 0, array])
        found[3] += size
        found[4] += count
    return list(sums.values())


def _is_equal(was: Any, now: Any) -> bool:
    """Whether two values are the same."""
    if _is_number(was) and _is_number(now) and not (isinstance(was, int) and isinstance(now, int)):
        return math.isclose(was, now, rel_tol=RELATIVE, abs_tol=0.0)
    return was == now


def _is_number(value: Any) -> bool:
    """Whether a value is a number; truth values are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
