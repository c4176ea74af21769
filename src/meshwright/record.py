"""`Record`: one schema for what a plan predicts, a compiled program contains and a run measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from meshwright.support.field_types import from_data
from meshwright.support.notebook import Table, card
from meshwright.units import show_bytes, show_degrees, show_percent, show_seconds

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
Phase = Literal["reference", "forward", "backward", "recompute", "update"]
Bound = Literal["compute", "memory", "communication", "latency"]

KINDS: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
PHASES: tuple[Phase, ...] = ("reference", "forward", "recompute", "backward", "update")
"""All phases, in the order of a step.

`reference`: the forward pass of a frozen reference model, whose collectives are over the axes of that model's own mesh.
"""


class LoweredAs(StrEnum):
    """The form in which a compiler lowered a collective."""

    SLICED_ALL_REDUCE = "sliced all-reduce"
    """A reduce-scatter, compiled as an all-reduce whose result every device slices to its own shard."""
    PARTLY_SLICED_ALL_REDUCE = "partly sliced all-reduce"
    """A reduce-scatter over some axes and an all-reduce over others, compiled as one all-reduce whose result is sliced.
    """
    PADDED_ALL_REDUCE = "padded all-reduce"
    """An all-gather, compiled as an all-reduce: every device contributes its shard in an array of zeros."""
    UNREADABLE_SLICE = "all-reduce with an unreadable slice"
    """An all-reduce whose result is sliced at offsets from a table that the HLO text elides."""


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """How the compiled form of a collective differs from the program's (see `description.hlo.canonical`)."""

    form: LoweredAs | None = None  # None if only the dtype changed.
    scatter_axes: tuple[str, ...] = ()  # In a partly sliced all-reduce: the axes of its reduce-scatter.
    reduce_axes: tuple[str, ...] = ()  # In a partly sliced all-reduce: the axes of its all-reduce.
    promoted_from: str = ""  # 16-bit dtype of data that XLA:CPU sends as float32, or ''.

    def __str__(self) -> str:
        """Return a phrase such as `all-reduce + slice; promoted from bf16 by the CPU compiler`."""
        scattered, reduced = " x ".join(self.scatter_axes), " x ".join(self.reduce_axes)
        form = {
            None: "",
            LoweredAs.SLICED_ALL_REDUCE: "all-reduce + slice",
            LoweredAs.PARTLY_SLICED_ALL_REDUCE: (
                f"reduce-scatter over {scattered} and all-reduce over {reduced}, done as one and sliced"
            ),
            LoweredAs.PADDED_ALL_REDUCE: "as all-reduce of shards in zeros",
            LoweredAs.UNREADABLE_SLICE: "sliced afterwards by offsets that the text leaves out",
        }[self.form]
        promoted = f"promoted from {self.promoted_from} by the CPU compiler" if self.promoted_from else ""
        return "; ".join(filter(None, (form, promoted)))

    def to_json(self) -> dict[str, Any]:
        """Return this lowering as plain data, without empty fields."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items() if value}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a step, or the sum of several of the same kind, axes and phase.

    Figures are per device and step. `wire_bytes` returns the bytes sent over links.
    """

    kind: Kind
    axes: tuple[str, ...]
    phase: Phase
    # Size of the array on one device, summed over the `count` runs in a step: the gathered result of an all-gather, the
    # unreduced operand of a reduce-scatter, the operand of the others.
    bytes: int
    count: int = 1
    seconds: float | None = None  # None if unknown.
    exposed_seconds: float | None = None  # Seconds not hidden behind compute; None if unknown.
    array: str = ""  # The array that is communicated, such as `query` in a plan or `bf16[512,256]` in a program.
    source: str = ""  # File, line and named scope in the user's program; '' in a plan.
    note: str = ""
    lowerings: tuple[Lowering, ...] = ()  # One for each way in which the compiled form differs from the program's.

    @property
    def remarks(self) -> str:
        """The text of all lowerings and the note, joined by `; `; '' if there are none."""
        return "; ".join(filter(None, (*map(str, self.lowerings), self.note)))

    def to_json(self) -> dict[str, Any]:
        """Return this collective as plain data, without empty texts and lowerings."""
        data = asdict(self) | {"lowerings": [one.to_json() for one in self.lowerings]}
        # Empty axes are kept: they mean that the device groups match no mesh axes.
        return {key: value for key, value in data.items() if value not in ("", [])} | {"axes": list(self.axes)}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The figures of one step, per device: bytes, seconds and flops. A figure that the origin cannot know is None.

    memory_bytes: each memory term by name, and `peak`. mfu: model flops (without recomputation) over step time times
    peak flops. flops: all executed flops, recomputation included. tokens_per_second: of all devices together.
    breakdown_seconds: the parts of the step time by name. bound: what most of the step waits for; `latency` is the
    least time of each op.
    """

    origin: Literal["predicted", "compiled", "measured"]
    mesh: Mapping[str, int]
    hardware: str
    step_seconds: float | None = None
    mfu: float | None = None
    flops: float | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    fits: bool | None = None
    bound: Bound | None = None
    tokens_per_second: float | None = None
    breakdown_seconds: Mapping[str, float] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return this record as plain data, in the schema that every command prints."""
        data = {key: value for key, value in vars(self).items() if key != "collectives"}
        return data | {
            "mesh": dict(self.mesh),
            "memory_bytes": dict(self.memory_bytes),
            "breakdown_seconds": dict(self.breakdown_seconds),
            "notes": list(self.notes),
            "collectives": [collective.to_json() for collective in self.collectives],
        }

    @property
    def own_collectives(self) -> tuple[Collective, ...]:
        """Collectives over this record's mesh, without those of a frozen reference model, which has its own mesh."""
        return tuple(move for move in self.collectives if move.phase != "reference")

    @property
    def shown_mfu(self) -> float | None:
        """`mfu`; None on simulated CPU devices, which share the cores of one machine and have no peak of their own."""
        return None if self.hardware.startswith("cpu:") else self.mfu

    def __str__(self) -> str:
        """Format step time, MFU, peak memory and the limiting resource in one line."""
        parts = [f"step {show_seconds(self.step_seconds)}"] if self.step_seconds is not None else []
        parts += [f"MFU {show_percent(self.shown_mfu)}"] if self.shown_mfu is not None else []
        parts += [show_bytes(self.memory_bytes["peak"])] if "peak" in self.memory_bytes else []
        parts += ["DOES NOT FIT"] if self.fits is False else []
        parts += [f"{self.bound} bound"] if self.bound else []
        return "   ".join(parts)

    def _repr_html_(self) -> str:
        """Return the record as HTML for a notebook."""
        return card(
            f"{self.origin} · {show_degrees(self.mesh)} · {self.hardware}", str(self), self.tables(), self.notes
        )

    def tables(self) -> tuple[Table, ...]:
        """Return three tables of text, each (header, rows): parts of the step, memory terms, largest collectives."""
        step = [(name, show_seconds(seconds)) for name, seconds in self.breakdown_seconds.items() if seconds]
        memory = [(name, show_bytes(size)) for name, size in self.memory_bytes.items() if size and name != "peak"]
        largest = sorted(merge(self.collectives), key=lambda move: -move.bytes)[:MOST_SHOWN]
        moves = [
            (move.kind, "*".join(move.axes), move.phase, show_bytes(move.bytes), _seconds(move.exposed_seconds))
            for move in largest
        ]
        return (
            (("step", ""), step),
            (("memory", ""), memory),
            (("collective", "over", "phase", "bytes a device", "exposed"), moves),
        )


MOST_SHOWN = 12
"""The most collectives that `Record.tables` lists, largest first."""


def _seconds(seconds: float | None) -> str:
    """Format seconds; '' if they are unknown."""
    return "" if seconds is None else show_seconds(seconds)


def record_from_json(data: Any) -> Record:
    """Read a record that `Record.to_json` wrote."""
    return from_data(Record, data)


def wire_bytes(kind: Kind, size: float, degree: int) -> float:
    """Return the bytes that one device sends in a ring collective over `degree` devices, for an array of `size` bytes.

    With V = size (as in `Collective.bytes`) and n = degree: all-gather, reduce-scatter and all-to-all V (n-1)/n,
    all-reduce twice that, collective-permute V.
    """
    share = (degree - 1) / degree
    return {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share) * size


def merge(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Sum up the collectives of equal kind, axes and phase, and order the sums by phase and kind."""
    sums: dict[tuple[str, tuple[str, ...], str], Collective] = {}
    for item in collectives:
        key = (item.kind, item.axes, item.phase)
        sums[key] = _add(sums[key], item) if key in sums else replace(item, array="", source="")
    return tuple(sorted(sums.values(), key=lambda c: (PHASES.index(c.phase), KINDS.index(c.kind), c.axes)))


def _add(left: Collective, right: Collective) -> Collective:
    """Return the sum of two collectives of the same kind, axes and phase."""
    return replace(
        left,
        bytes=left.bytes + right.bytes,
        count=left.count + right.count,
        seconds=_sum(left.seconds, right.seconds),
        exposed_seconds=_sum(left.exposed_seconds, right.exposed_seconds),
        note=left.note if right.note in left.note else "; ".join(filter(None, (left.note, right.note))),
        lowerings=tuple(dict.fromkeys((*left.lowerings, *right.lowerings))),
    )


def _sum(left: float | None, right: float | None) -> float | None:
    """Return the sum; None if either value is unknown."""
    return None if left is None or right is None else left + right
