"""Predicted beside compiled: each quantity of a step from both, and a name for every difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.hlo import meant
from meshwright.record import PHASES, Collective, Record, merge
from meshwright.units import show_bytes, show_flops, show_percent, show_rate, show_seconds
from meshwright.verification.explain import TOGETHER, Key, explain, summed_together

Unit = Literal["flop", "B", "s", "tok/s", "share"]

NOT_PLANNED, MISSING, UNEXPLAINED = "not planned", "the compiled program has none", "otherwise than planned"
ANOTHER_PROGRAM = "another program than planned"
"""Reasons that name nothing."""

IN_BRANCHES = "counted in every tick, as its text has it: in a branch that few ticks take"

FOR_ANY_ROUTING = "with room for any routing, as experts without a capacity need; planned as in balance"

ONCE = "the last norm's gradient is summed once, not for each microbatch"

EACH_LAYER = "positions are gathered with the keys of each layer, not once for all layers of a stage"

IN_KERNELS = "attention is in kernels of which the program does not say the flops"

_LEAST_SHARE = 0.005
"""The part of a step's difference below which a term of it is not named."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a program's text says beyond its plan, and why: room that experts need, branches that few ticks take.

    As `cost.dropless_padding_flops` and `dropless_padding_collectives` have it, and `untaken_branch_flops` and `untaken_branch_collectives`. in_kernels:
    planned flops of which the text says nothing. collectives: with fewer bytes than none where the program has less;
    the note of each says why where `why` does not.
    """

    flops: float = 0.0
    in_kernels: float = 0.0
    collectives: tuple[Collective, ...] = ()
    why: str = FOR_ANY_ROUTING


NO_ROOM = Room()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity from a plan, a compiled program and a run; None where one of them has none.

    unit: `flop` and `B` are per device and step. reason: what names a difference, or how the compiler says the same.
    """

    quantity: str
    unit: Unit
    predicted: float | None
    compiled: float | None
    measured: float | None = None
    reason: str = ""

    @property
    def relative(self) -> float | None:
        """The compiled difference as a share of what was predicted; None where nothing was, or nothing was compiled."""
        return self._relative(self.compiled)

    @property
    def measured_relative(self) -> float | None:
        """The measured difference as a share of what was predicted; None where either is not known."""
        return self._relative(self.measured)

    @property
    def is_equal(self) -> bool:
        """Whether all that is known says the same; of collectives, where one has none, the other must have none."""
        return self.predicted == self.compiled and self.measured in (None, self.predicted)

    def exceeds(self, tolerance: float) -> bool:
        """Whether a difference is larger than a share of what was predicted; a collective that one lacks always is."""
        found = [share for share in (self.relative, self.measured_relative) if share is not None]
        lacking = self.unit == "B" and not self.is_equal and not (self.predicted and self.compiled)
        return lacking or any(abs(share) > tolerance for share in found)

    def cells(self, *, with_measured: bool) -> list[str]:
        """The row as people read it: quantity, predicted, compiled, difference, the two of a run, reason."""
        amounts = [_shown(self.predicted, self.unit), _shown(self.compiled, self.unit)]
        cells = [self.quantity, *amounts, self._difference(self.compiled, self.relative)]
        if with_measured:
            cells += [_shown(self.measured, self.unit), self._difference(self.measured, self.measured_relative)]
        return [*cells, self.reason]

    def to_json(self) -> dict[str, Any]:
        """This row as plain data."""
        return vars(self) | {"relative": self.relative, "measured_relative": self.measured_relative}

    def _relative(self, amount: float | None) -> float | None:
        """How far an amount is from what was predicted, as a share of that."""
        return (amount - self.predicted) / self.predicted if self.predicted and amount is not None else None

    def _difference(self, amount: float | None, relative: float | None) -> str:
        """How far an amount is from what was predicted, in words."""
        if self.predicted == amount:
            return "0"
        return "–" if relative is None else f"{relative:+.1%}"


def _shown(amount: float | None, unit: Unit) -> str:
    """An amount in its unit; a dash for none."""
    if amount is None:
        return "–"
    if unit == "tok/s":
        return show_rate(amount, unit)
    return {"B": show_bytes, "flop": show_flops, "s": show_seconds, "share": show_percent}[unit](amount)


def in_plans_terms(compiled: Record) -> Record:
    """The compiled record with each collective as a plan would call it, those alike added up.

    Where the compiler spells one as another (XLA:CPU makes no reduce-scatter: it all-reduces and slices), the note says
    so.
    """
    moves = (part for move in compiled.collectives for part in meant(move, compiled.mesh))
    return replace(compiled, collectives=merge(moves))


def compare(
    predicted: Record,
    compiled: Record,
    *,
    argument_bytes: int,
    measured: Record | None = None,
    room: Room = NO_ROOM,
) -> tuple[Row, ...]:
    """Every quantity of the records, `compiled` in the terms of a plan; `argument_bytes` as predicted.

    Times are compared where a simulation of the compiled program or a run gives any.
    """
    memory, ran = compiled.memory_bytes, measured.memory_bytes if measured else {}
    temporaries = predicted.memory_bytes["peak"] - argument_bytes
    rows = [
        Row(
            quantity="flops",
            unit="flop",
            predicted=predicted.flops,
            compiled=compiled.flops,
            reason=_flops_reason(predicted, compiled, room),
        ),
        _memory("arguments", argument_bytes, memory, ran, "small arrays are padded"),
        _memory("temporaries", temporaries, memory, ran, "an estimate"),
        _memory("peak", predicted.memory_bytes["peak"], memory, ran, "by its temporaries"),
        *_collectives(predicted.collectives, compiled.collectives, compiled.mesh, room),
        *_times(predicted, compiled, measured),
    ]
    return tuple(replace(row, reason="") if row.is_equal and row.unit == "flop" else row for row in rows)


def _memory(name: str, predicted: float, memory: Mapping[str, int], ran: Mapping[str, int], reason: str) -> Row:
    """A row of memory, its reason said where there is a difference."""
    row = Row(
        quantity=f"memory {name}",
        unit="B",
        predicted=predicted,
        compiled=memory.get(name),
        measured=ran.get(name),
        reason=reason,
    )
    return replace(row, reason="") if row.is_equal else row


def _times(predicted: Record, compiled: Record, measured: Record | None) -> Iterator[Row]:
    """A row for the step and for each of its rates that something beside the plan gives."""
    quantities: tuple[tuple[str, Unit, str], ...] = (
        ("step", "s", "step_seconds"),
        ("tokens a second", "tok/s", "tokens_per_second"),
        ("MFU", "share", "mfu"),
    )
    for quantity, unit, field in quantities:
        plan, program = getattr(predicted, field), getattr(compiled, field)
        run = getattr(measured, field) if measured else None
        if program is not None or run is not None:
            reason = _longer(predicted, compiled) if quantity == "step" else ""
            yield Row(quantity=quantity, unit=unit, predicted=plan, compiled=program, measured=run, reason=reason)


def _longer(predicted: Record, compiled: Record) -> str:
    """Which term of a step's time is most of the difference: `exposed communication +0.31 s`."""
    plan, program = predicted.breakdown_seconds, compiled.breakdown_seconds
    if not (plan and program):
        return ""
    differences = {name: program.get(name, 0.0) - plan.get(name, 0.0) for name in dict.fromkeys((*plan, *program))}
    name, most = max(differences.items(), key=lambda item: abs(item[1]))
    if abs(most) < _LEAST_SHARE * (predicted.step_seconds or 0.0):
        return ""
    return f"{name} {'+' if most > 0 else '-'}{show_seconds(abs(most))}"


def _flops_reason(predicted: Record, compiled: Record, room: Room) -> str:
    """What names a difference of flops: all that is beyond the plan or not in the text, to the flop."""
    if compiled.flops != (predicted.flops or 0.0) + room.flops - room.in_kernels:
        return ANOTHER_PROGRAM
    known = ((room.why, room.flops), (IN_KERNELS, room.in_kernels))
    return "; ".join(reason for reason, flops in known if flops)


def _collectives(
    predicted: tuple[Collective, ...],
    compiled: tuple[Collective, ...],
    mesh: Mapping[str, int],
    room: Room,
) -> Iterator[Row]:
    """A row for every kind, axes and phase of collective in either."""
    planned, found = ({(c.kind, c.axes, c.phase): c for c in moves} for moves in (predicted, compiled))
    amounts = _joined(planned, found)[0] | planned
    whole, sums = _sums(_with_room(planned, found, room), found)
    # Those done together have their name; without them other differences may add up.
    ours, theirs = ({k: v for k, v in moves.items() if sums.get(k) != TOGETHER} for moves in (whole, found))
    named = explain(ours, theirs, mesh)
    for key in dict.fromkeys((*whole, *found)):
        wanted = whole.get(key)
        is_named = key in named or sums.get(key) == TOGETHER or (wanted and wanted.bytes == _bytes(found, key))
        reasons = (sums.get(key), named.get(key), wanted.note if wanted else "") if is_named else ()
        yield _collective_row(key, amounts[key] if wanted else None, found.get(key), _said(*reasons))


def _with_room(planned: Mapping[Key, Collective], found: Mapping[Key, Collective], room: Room) -> dict[Key, Collective]:
    """What was planned with what the program says beyond it, noted; as it is where the program has just that."""
    whole = {key: replace(move, note="") for key, move in planned.items()}
    for move in merge(room.collectives):
        key = (move.kind, move.axes, move.phase)
        if key in planned and planned[key].bytes != _bytes(found, key):
            whole[key] = replace(planned[key], bytes=planned[key].bytes + move.bytes, note=move.note or room.why)
    return whole


def _sums(
    planned: Mapping[Key, Collective], found: Mapping[Key, Collective]
) -> tuple[dict[Key, Collective], dict[Key, str]]:
    """What was planned with all-reduces over the axes that the compiler does them over, and what is to be said of each.

    Sums of one array over each of its axes in turn are one; where that does not make a phase equal, all stay as planned
    if together they are what was planned over each axis.
    """
    joined, said = _joined(planned, found)
    unequal = {key[2] for key in dict.fromkeys((*joined, *found)) if _bytes(joined, key) != _bytes(found, key)}
    together = {key: TOGETHER for key in summed_together(planned, found) if key[2] in unequal}
    phases = {key[2] for key in together}
    others = {key: move for key, move in joined.items() if key[0] != "all-reduce" or key[2] not in phases}
    whole = {key: move for key, move in planned.items() if key[0] == "all-reduce" and key[2] in phases}
    return others | whole, {key: text for key, text in said.items() if key in others} | together


def _bytes(moves: Mapping[Key, Collective], key: Key) -> int:
    """The bytes of some key, 0 where there is no such collective."""
    return moves[key].bytes if key in moves else 0


def _collective_row(key: Key, planned: Collective | None, found: Collective | None, named: str) -> Row:
    """The row of one kind, axes and phase, with the name of its difference."""
    if not planned:
        unnamed = NOT_PLANNED
    elif not found:
        unnamed = MISSING
    else:
        unnamed = UNEXPLAINED if planned.bytes != found.bytes else ""
    kind, axes, phase = key
    return Row(
        quantity=quantity_of(kind, axes, phase),
        unit="B",
        predicted=planned.bytes if planned else None,
        compiled=found.bytes if found else None,
        reason=_said(named or unnamed, found.note if found else ""),
    )


def quantity_of(kind: str, axes: tuple[str, ...], phase: str) -> str:
    """What the row of a collective is called: `all-gather fsdp forward`."""
    return f"{kind} {'*'.join(axes)} {phase}"


def _said(*reasons: str | None) -> str:
    """All that there is to say, each once."""
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def _joined(
    planned: Mapping[Key, Collective], found: Mapping[Key, Collective]
) -> tuple[dict[Key, Collective], dict[Key, str]]:
    """What was planned, with all-reduces of one array over each of several axes in turn as one over all of them.

    Where the compiler makes one over all of them, in whatever phase; and what is to be said of each such one.
    """
    result, said = dict(planned), {}
    over_several = {axes for kind, axes, _ in found if kind == "all-reduce" and len(axes) > 1}
    for axes in over_several - {axes for kind, axes, _ in planned if kind == "all-reduce"}:
        for phase in PHASES:
            parts = [k for k in planned if (k[0], k[2]) == ("all-reduce", phase) and set(k[1]) < set(axes)]
            parts = [k for k in parts if k not in found]
            if sorted(axis for part in parts for axis in part[1]) == sorted(axes):
                key: Key = ("all-reduce", axes, phase)
                largest = max((result.pop(part) for part in parts), key=lambda move: move.bytes)
                result[key] = replace(largest, axes=axes)
                said[key] = f"planned over {' and '.join('*'.join(part[1]) for part in parts)} in turn"
    return result, said
