"""Predicted beside compiled: each quantity of a step from both, and a name for every difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.compiled.respelled import meant
from meshwright.record import Collective, Record, merge

Key = tuple[str, tuple[str, ...], str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity from a plan and from a compiled program; None where one of them has none.

    unit: `flop` or `B`, per device and step. reason: what names a difference, or how the compiler says the same.
    """

    quantity: str
    unit: str
    predicted: float | None
    compiled: float | None
    reason: str = ""

    @property
    def relative(self) -> float | None:
        """The difference as a share of what was predicted; None where nothing was."""
        if self.predicted is None or self.compiled is None:
            return None
        return (self.compiled - self.predicted) / self.predicted if self.predicted else 0.0

    @property
    def is_equal(self) -> bool:
        """Whether both say the same."""
        return self.predicted == self.compiled

    def exceeds(self, tolerance: float) -> bool:
        """Whether the difference is larger than a share of what was predicted; what one of them lacks always is."""
        return not self.is_equal and (self.relative is None or abs(self.relative) > tolerance)

    def to_json(self) -> dict[str, Any]:
        """This row as plain data."""
        return vars(self) | {"relative": self.relative}


def in_plans_terms(compiled: Record) -> Record:
    """The compiled record with each collective as a plan would call it, those alike added up.

    Where the compiler spells one as another (XLA:CPU makes no reduce-scatter: it all-reduces and slices), the note says
    so.
    """
    moves = (part for move in compiled.collectives for part in meant(move, compiled.mesh))
    return replace(compiled, collectives=merge(moves))


def compare(predicted: Record, compiled: Record, *, argument_bytes: int) -> tuple[Row, ...]:
    """Every quantity of both records, `compiled` in the terms of a plan; `argument_bytes` as predicted."""
    memory = compiled.memory_bytes
    temporaries = predicted.memory_bytes["peak"] - argument_bytes
    rows = [
        Row(
            quantity="flops",
            unit="flop",
            predicted=predicted.flops,
            compiled=compiled.flops,
            reason="another program than planned",
        ),
        _memory("arguments", argument_bytes, memory, "small arrays are padded"),
        _memory("temporaries", temporaries, memory, "an estimate"),
        _memory("peak", predicted.memory_bytes["peak"], memory, "by its temporaries"),
        *_collectives(predicted.collectives, compiled.collectives),
    ]
    return tuple(replace(row, reason="") if row.is_equal and row.unit == "flop" else row for row in rows)


def _memory(name: str, predicted: float, memory: Mapping[str, int], reason: str) -> Row:
    """A row of memory, its reason said where there is a difference."""
    row = Row(quantity=f"memory {name}", unit="B", predicted=predicted, compiled=memory.get(name), reason=reason)
    return replace(row, reason="") if row.is_equal else row


def _collectives(predicted: tuple[Collective, ...], compiled: tuple[Collective, ...]) -> Iterator[Row]:
    """A row for every kind, axes and phase of collective in either."""
    planned, found = ({(c.kind, c.axes, c.phase): c for c in moves} for moves in (predicted, compiled))
    joined = _joined(planned, found)
    parts = {key for keys in joined.values() for key in keys}
    for key in dict.fromkeys((*planned, *found)):
        if key in joined:
            yield _joined_row(key, joined[key], planned, found)
        elif key not in parts:
            yield _collective_row(key, planned.get(key), found.get(key))


def _collective_row(key: Key, planned: Collective | None, found: Collective | None) -> Row:
    """The row of one kind, axes and phase."""
    reason = found.note if found else "the compiled program has none"
    if not planned:
        reason = "; ".join(filter(None, ("not planned", reason)))
    return _row(key, planned.bytes if planned else None, found.bytes if found else None, reason)


def _joined(planned: Mapping[Key, Collective], found: Mapping[Key, Collective]) -> dict[Key, list[Key]]:
    """All-reduces over several axes at once that stand for planned ones over each, one after the other."""
    pairs = {}
    for kind, axes, phase in found:
        key = (kind, axes, phase)
        parts = [k for k in planned if (k[0], k[2]) == (kind, phase) and set(k[1]) < set(axes) and k not in found]
        if kind == "all-reduce" and key not in planned and sorted(a for k in parts for a in k[1]) == sorted(axes):
            pairs[key] = parts
    return pairs


def _joined_row(key: Key, parts: list[Key], planned: Mapping[Key, Collective], found: Mapping[Key, Collective]) -> Row:
    """The row of an all-reduce over several axes at once: the same array that was planned to be summed over each."""
    over = " and ".join("*".join(part[1]) for part in parts)
    return _row(key, max(planned[part].bytes for part in parts), found[key].bytes, f"planned over {over} in turn")


def _row(key: Key, predicted: float | None, compiled: float | None, reason: str) -> Row:
    """The row of a collective."""
    kind, axes, phase = key
    return Row(
        quantity=f"{kind} {'*'.join(axes)} {phase}", unit="B", predicted=predicted, compiled=compiled, reason=reason
    )
