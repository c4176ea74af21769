"""Compare the records of a plan, a compiled program and a run: a row for each quantity, with causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from meshwright.description.hlo.canonical import canonicalize_collective
from meshwright.mesh import MeshShape
from meshwright.proof.verification.differences import UNNAMED, Cause, Difference
from meshwright.proof.verification.explain import Key, combined_sums, explain
from meshwright.record import PHASES, Collective, Record, merge

Unit = Literal["flop", "B", "s", "tok/s", "share"]

_LEAST_SHARE = 0.005
"""The share of the step time below which no part of the step is named as the cause of a difference."""


@dataclass(frozen=True, kw_only=True)
class StaticOverhead:
    """Flops and collectives in a program's HLO text beyond its plan, by cause: dropless padding, untaken branches.

    Flops and bytes are per device and step, and negative where the program has less.
    """

    flops: Mapping[Difference, float] = field(default_factory=dict)
    collectives: tuple[tuple[Difference, Collective], ...] = ()


NO_OVERHEAD = StaticOverhead()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity, as predicted, compiled and measured; None where a figure is missing.

    unit: `flop` and `B` are per device and step. causes: why the figures differ. note: a remark on the compiled figure.
    """

    quantity: str
    unit: Unit
    predicted: float | None
    compiled: float | None
    measured: float | None = None
    causes: tuple[Cause, ...] = ()
    note: str = ""

    @property
    def relative(self) -> float | None:
        """(compiled - predicted) / predicted; None where either is missing or nothing was predicted."""
        return self._relative(self.compiled)

    @property
    def measured_relative(self) -> float | None:
        """(measured - predicted) / predicted; None where either is missing or nothing was predicted."""
        return self._relative(self.measured)

    @property
    def is_equal(self) -> bool:
        """Whether all known figures agree. A collective that only the plan or only the program has is a difference."""
        return self.predicted == self.compiled and self.measured in (None, self.predicted)

    @property
    def is_explained(self) -> bool:
        """Whether the figures agree or every cause of their difference is known."""
        return self.is_equal or not any(cause.difference in UNNAMED for cause in self.causes)

    def exceeds(self, tolerance: float) -> bool:
        """Whether a relative difference is larger than a tolerance; True if only one side has the collective."""
        found = [share for share in (self.relative, self.measured_relative) if share is not None]
        lacking = self.unit == "B" and not self.is_equal and not (self.predicted and self.compiled)
        return lacking or any(abs(share) > tolerance for share in found)

    def to_json(self) -> dict[str, Any]:
        """This row as plain data."""
        return vars(self) | {
            "causes": [cause.to_json() for cause in self.causes],
            "relative": self.relative,
            "measured_relative": self.measured_relative,
        }

    def _relative(self, amount: float | None) -> float | None:
        return (amount - self.predicted) / self.predicted if self.predicted and amount is not None else None


def in_plans_terms(compiled: Record) -> Record:
    """Return the compiled record with the collectives of the user's program, merged by kind, axes and phase.

    The compiler's lowerings are undone (`canonicalize_collective`) and kept in `Collective.lowerings`: for example,
    XLA:CPU lowers a reduce-scatter to an all-reduce and slices.
    """
    moves = (part for move in compiled.collectives for part in canonicalize_collective(move, compiled.mesh))
    return replace(compiled, collectives=merge(moves))


def compare(
    predicted: Record,
    compiled: Record,
    *,
    argument_bytes: int,
    measured: Record | None = None,
    overhead: StaticOverhead = NO_OVERHEAD,
    reference_mesh: MeshShape | None = None,
) -> tuple[Row, ...]:
    """Return a row for every quantity of the records.

    Times are compared where a simulation of the compiled program or a run gives any.

    Args:
      predicted: the plan's record.
      compiled: the program's record, from `in_plans_terms`.
      argument_bytes: the predicted bytes of the arguments.
      measured: the record of a run.
      overhead: known contents of the program's text beyond the plan.
      reference_mesh: mesh of the step's frozen reference model, over whose axes the reference's collectives run.
    """
    memory, ran = compiled.memory_bytes, measured.memory_bytes if measured else {}
    temporaries = predicted.memory_bytes["peak"] - argument_bytes
    flops = Row(quantity="flops", unit="flop", predicted=predicted.flops, compiled=compiled.flops)
    return (
        flops if flops.is_equal else replace(flops, causes=_flops_causes(predicted, compiled, overhead)),
        _memory("arguments", argument_bytes, memory, ran, Difference.PADDED_ARGUMENTS),
        _memory("temporaries", temporaries, memory, ran, Difference.ESTIMATED),
        _memory("peak", predicted.memory_bytes["peak"], memory, ran, Difference.DUE_TO_TEMPORARIES),
        *_with_measured(_pass_rows(predicted, compiled, compiled.mesh, overhead, is_reference=False), measured),
        *(
            _pass_rows(predicted, compiled, reference_mesh.layout, overhead, is_reference=True)
            if reference_mesh
            else ()
        ),
        *_times(predicted, compiled, measured),
    )


def _pass_rows(
    predicted: Record, compiled: Record, mesh: Mapping[str, int], overhead: StaticOverhead, *, is_reference: bool
) -> Iterator[Row]:
    """Yield a row for every collective of the frozen reference model (`is_reference`), or for every other collective.

    mesh: the degrees of the axes that these collectives run over.
    """
    planned, found = (
        tuple(move for move in record.collectives if (move.phase == "reference") is is_reference)
        for record in (predicted, compiled)
    )
    known = tuple(one for one in overhead.collectives if (one[1].phase == "reference") is is_reference)
    yield from _collectives(planned, found, mesh, replace(overhead, collectives=known))


def _memory(
    name: str, predicted: float, compiled: Mapping[str, int], measured: Mapping[str, int], difference: Difference
) -> Row:
    """Return the row of the memory term `name`; if the figures differ, `difference` is the cause.

    predicted: bytes per device. compiled, measured: bytes per device, by term.
    """
    row = Row(
        quantity=f"memory {name}",
        unit="B",
        predicted=predicted,
        compiled=compiled.get(name),
        measured=measured.get(name),
    )
    return row if row.is_equal else replace(row, causes=(Cause(difference=difference),))


def _times(predicted: Record, compiled: Record, measured: Record | None) -> Iterator[Row]:
    """Yield a row for each of step time, tokens a second and MFU that the program or the run has."""
    quantities: tuple[tuple[str, Unit, str], ...] = (
        ("step", "s", "step_seconds"),
        ("tokens a second", "tok/s", "tokens_per_second"),
        ("MFU", "share", "shown_mfu"),
    )
    for quantity, unit, name in quantities:
        plan, program = getattr(predicted, name), getattr(compiled, name)
        run = getattr(measured, name) if measured else None
        if program is not None or run is not None:
            causes = _largest_term(predicted, compiled) if quantity == "step" else ()
            yield Row(quantity=quantity, unit=unit, predicted=plan, compiled=program, measured=run, causes=causes)


def _largest_term(predicted: Record, compiled: Record) -> tuple[Cause, ...]:
    """Return, as the cause, the part of the step time with the largest difference.

    () if parts are unknown or the difference is below `_LEAST_SHARE` of the predicted step time.
    """
    plan, program = predicted.breakdown_seconds, compiled.breakdown_seconds
    if not (plan and program):
        return ()
    differences = {name: program.get(name, 0.0) - plan.get(name, 0.0) for name in dict.fromkeys((*plan, *program))}
    name, seconds = max(differences.items(), key=lambda item: abs(item[1]))
    if abs(seconds) < _LEAST_SHARE * (predicted.step_seconds or 0.0):
        return ()
    return (Cause(difference=Difference.STEP_TERM, term=name, seconds=seconds),)


def _flops_causes(predicted: Record, compiled: Record, overhead: StaticOverhead) -> tuple[Cause, ...]:
    """Return the causes of a difference of flops: known ones that account for it exactly, else `ANOTHER_PROGRAM`."""
    known = overhead.flops
    if compiled.flops != (predicted.flops or 0.0) + sum(known.values()):
        return (Cause(difference=Difference.ANOTHER_PROGRAM),)
    return tuple(Cause(difference=difference) for difference, flops in known.items() if flops)


class _Planned(NamedTuple):
    """Planned bytes per device and step of the collectives of one `Key`, and the known overheads that they include."""

    num_bytes: int
    overheads: tuple[Difference, ...] = ()


def _collectives(
    predicted: tuple[Collective, ...],
    compiled: tuple[Collective, ...],
    mesh: Mapping[str, int],
    overhead: StaticOverhead,
) -> Iterator[Row]:
    """Yield a row for each combination of kind, axes and phase of a collective in the plan or the program.

    overhead: known contents of the program's text beyond the plan.
    """
    planned = {_key(move): _Planned(move.bytes) for move in predicted}
    found = {_key(move): move for move in compiled}
    sizes = {key: move.bytes for key, move in found.items()}
    amounts = _join_axes(planned, sizes)[0] | planned
    # Known overheads are added where plan and program differ.
    result = dict(planned)
    for difference, move in overhead.collectives:
        key = _key(move)
        if key in planned and planned[key].num_bytes != sizes.get(key, 0):
            size, causes = result[key]
            result[key] = _Planned(size + move.bytes, tuple(dict.fromkeys((*causes, difference))))
    whole, sums = _join_sums(result, sizes)
    # Combined sums are left out of the other rules, which might find sums that agree by accident.
    combined = {key for key, cause in sums.items() if cause.difference == Difference.COMBINED_SUMS}
    explained = explain(
        {key: one.num_bytes for key, one in whole.items() if key not in combined},
        {key: size for key, size in sizes.items() if key not in combined},
        mesh,
    )
    for key in dict.fromkeys((*whole, *found)):
        wanted = whole.get(key)
        causes = [cause for cause in (sums.get(key), explained.get(key)) if cause]
        causes += [Cause(difference=one) for one in wanted.overheads] if wanted else []
        is_explained = key in explained or key in combined or (wanted and wanted.num_bytes == sizes.get(key, 0))
        amount = amounts[key].num_bytes if wanted else None
        yield _collective_row(key, amount, found.get(key), causes if is_explained else [])


def _with_measured(rows: Iterator[Row], measured: Record | None) -> Iterator[Row]:
    """Yield the rows with the bytes of collectives in a run's profile, then rows of collectives only in the profile.

    measured: the run's record; None or a record without collectives leaves the rows as they are.
    """
    if measured is None or not measured.collectives:
        yield from rows
        return
    found = {quantity_of(*_key(move)): move.bytes for move in in_plans_terms(measured).collectives}
    for row in rows:
        yield replace(row, measured=found.pop(row.quantity, 0))
    for quantity, size in found.items():
        causes = (Cause(difference=Difference.NOT_PREDICTED),)
        yield Row(quantity=quantity, unit="B", predicted=None, compiled=None, measured=size, causes=causes)


def _collective_row(key: Key, planned: int | None, found: Collective | None, causes: list[Cause]) -> Row:
    """Return the row of the collectives of one key; without `causes`, a difference gets one of `UNNAMED`.

    planned: bytes in the plan. found: the program's collective. Either is None if there is none.
    """
    if not causes and planned is None:
        causes = [Cause(difference=Difference.NOT_PREDICTED)]
    elif not causes and found is None:
        causes = [Cause(difference=Difference.MISSING)]
    elif not causes and found and planned != found.bytes:
        causes = [Cause(difference=Difference.UNEXPLAINED)]
    lowerings = found.lowerings if found else ()
    causes += [Cause(difference=Difference.LOWERED, lowering=lowering) for lowering in lowerings]
    return Row(
        quantity=quantity_of(*key),
        unit="B",
        predicted=planned,
        compiled=found.bytes if found else None,
        causes=tuple(dict.fromkeys(causes)),
        note=found.note if found else "",
    )


def quantity_of(kind: str, axes: tuple[str, ...], phase: str) -> str:
    """The name of a collective's row: `all-gather fsdp forward`."""
    return f"{kind} {'*'.join(axes)} {phase}"


def _key(move: Collective) -> Key:
    return move.kind, move.axes, move.phase


def _join_sums(
    planned: Mapping[Key, _Planned], found: Mapping[Key, int]
) -> tuple[dict[Key, _Planned], dict[Key, Cause]]:
    """Return ({key: planned bytes}, {key: cause of the change}), with planned all-reduces joined as in the program.

    Consecutive all-reduces of one array over several axes become one over all these axes (`_join_axes`). In a phase
    where plan and program then still differ, but all-reduce equal bytes over each axis (`combined_sums`), the planned
    all-reduces stay as they were, and each that differs has the cause `COMBINED_SUMS`.

    found: the program's bytes by key.
    """
    joined, causes = _join_axes(planned, found)
    keys = dict.fromkeys((*joined, *found))
    unequal = {key[2] for key in keys if (joined[key].num_bytes if key in joined else 0) != found.get(key, 0)}
    sizes = {key: one.num_bytes for key, one in planned.items()}
    combined = [key for key in combined_sums(sizes, found) if key[2] in unequal]
    phases = {key[2] for key in combined}
    others = {key: one for key, one in joined.items() if key[0] != "all-reduce" or key[2] not in phases}
    whole = {key: one for key, one in planned.items() if key[0] == "all-reduce" and key[2] in phases}
    kept = {key: cause for key, cause in causes.items() if key in others}
    return others | whole, kept | dict.fromkeys(combined, Cause(difference=Difference.COMBINED_SUMS))


def _join_axes(
    planned: Mapping[Key, _Planned], found: Mapping[Key, int]
) -> tuple[dict[Key, _Planned], dict[Key, Cause]]:
    """Return ({key: planned bytes}, {key: cause of the change}), with all-reduces of an array over several axes joined.

    All-reduces are joined only if the program has one over all of their axes, in any phase. found: the program's bytes
    by key.
    """
    result, causes = dict(planned), {}
    over_several = {axes for kind, axes, _ in found if kind == "all-reduce" and len(axes) > 1}
    for axes in over_several - {axes for kind, axes, _ in planned if kind == "all-reduce"}:
        for phase in PHASES:
            parts = [k for k in planned if (k[0], k[2]) == ("all-reduce", phase) and set(k[1]) < set(axes)]
            parts = [k for k in parts if k not in found]
            if sorted(axis for part in parts for axis in part[1]) == sorted(axes):
                key: Key = ("all-reduce", axes, phase)
                result[key] = max((result.pop(part) for part in parts), key=lambda one: one.num_bytes)
                causes[key] = Cause(difference=Difference.JOINED_AXES, axes=tuple(part[1] for part in parts))
    return result, causes
