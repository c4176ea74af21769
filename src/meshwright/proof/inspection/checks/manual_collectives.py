"""Hand-written collectives that hang, use a device's own values twice, or send values that the receiver has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.proof.inspection.checks.missing_sums import MissingSum
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.record import Kind
from meshwright.units import show_bytes

_KINDS: dict[str, Kind] = {
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
}


@dataclass(frozen=True, kw_only=True)
class BranchedCollective(Finding):
    """A collective in a branch or iteration that only some of its devices reach: it hangs.

    axes: the axes of the collective. taken: the mesh axes along which devices take different branches or iterations.
    """

    kind = FindingKind.BRANCHED_COLLECTIVE
    merged_by = ("axes",)

    op: str
    array: str
    axes: tuple[str, ...]
    taken: tuple[str, ...]

    def explains(self, other: Finding) -> bool:
        """Whether `other` is a `MissingSum` on the same line: its result differs because devices branch differently."""
        return isinstance(other, MissingSum) and other.line == self.line

    @property
    def is_wrong(self) -> bool:
        """Always True: devices that reach the collective wait forever for those that do not."""
        return True

    def _sentences(self) -> tuple[str, str]:
        return (
            f"{self.op} of {self.array} over {joined(self.axes)} is inside of a cond, switch or while whose predicate"
            f" differs along {joined(self.taken)}: devices that do not take this branch never come, and the others wait"
            " for them for ever",
            f"take the {self.op} out of the branch and choose between values (jnp.where), or make the predicate the"
            f" same along {joined(self.taken)}: jax.lax.pmax(predicate, …)",
        )


@dataclass(frozen=True, kw_only=True)
class RingTooLong(Finding):
    """A ring with one send more than there are other devices: a device's own part returns to it.

    sends: the number of sends. is_wrong_sum: whether the part that returns is used a second time.
    """

    kind = FindingKind.RING_TOO_LONG
    merged_by = ("axes", "is_wrong_sum")

    array: str
    axes: tuple[str, ...]
    degree: int
    sends: int
    is_wrong_sum: bool

    @property
    def is_wrong(self) -> bool:
        """Whether the result is wrong: `is_wrong_sum`."""
        return self.is_wrong_sum

    def _sentences(self) -> tuple[str, str]:
        what = (
            "brings each device its own part again, which it has used already"
            if self.is_wrong_sum
            else "sends what nothing uses"
        )
        return (
            f"a ring over {joined(self.axes)}={self.degree} sends {self.array} {self.sends} times; the last of them"
            f" {what}: {self.degree - 1} sends reach every device",
            f"send {self.degree - 1} times: use the device's own part before the loop, and run jax.lax.fori_loop(0,"
            f" {self.degree - 1}, …)",
        )


@dataclass(frozen=True, kw_only=True)
class SentCopies(Finding):
    """A gather, all-to-all or permute between devices that hold the same value.

    equal_axes: the axes along which all `degree` devices hold the same value.
    """

    kind = FindingKind.SENT_COPIES
    merged_by = ("equal_axes",)

    collective: Kind
    array: str
    axes: tuple[str, ...]
    equal_axes: tuple[str, ...]
    degree: int

    @property
    def is_wrong(self) -> bool:
        """Whether the result is wrong: True except for a gather, which only makes copies."""
        return self.collective != "all-gather"

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.equal_axes)
        return (
            f"{self.collective} of {self.array} over {joined(self.axes)}, but all {self.degree} devices along {over}"
            f" hold the same: {show_bytes(self.bytes)} a device and step bring what is there already, {self.degree}"
            " times",
            f"split the value over {over} first (in_specs of shard_map), or run this over an axis that splits it",
        )


def manual_collectives(context: ProgramContext) -> Iterator[Finding]:
    """Yield the mistakes in collectives found in the jaxpr."""
    for one in context.traced(BranchedCollective.id):
        shape = Shape(one.dtype, one.dims)
        yield BranchedCollective(
            op=one.figures["op"],
            array=str(shape),
            axes=one.axes,
            taken=tuple(one.figures["taken"]),
            bytes=shape.bytes,
            cost_seconds=context.no_seconds,
            source=one.source,
        )
    for one in context.traced(RingTooLong.id):
        shape, is_wrong = Shape(one.dtype, one.dims), one.figures["is_wrong"]
        yield RingTooLong(
            array=str(shape),
            axes=one.axes,
            degree=one.figures["degree"],
            sends=one.figures["sends"],
            is_wrong_sum=is_wrong,
            bytes=shape.bytes,
            cost_seconds=context.collective_seconds("collective-permute", shape.bytes, one.axes),
            source=one.source,
        )
    for one in context.traced(SentCopies.id):
        shape, kind = Shape(one.dtype, one.dims), _KINDS[one.figures["op"]]
        whole = shape.bytes * (context.degree(one.axes) if kind == "all-gather" else 1)
        if shape.bytes >= LEAST_BYTES:
            yield SentCopies(
                collective=kind,
                array=str(shape),
                axes=one.axes,
                equal_axes=tuple(one.figures["equal_axes"]),
                degree=one.figures["degree"],
                bytes=one.count * whole,
                cost_seconds=context.collective_seconds(kind, whole, one.axes, count=one.count),
                source=one.source,
            )
