"""Ring collectives hop by hop: the contents of each device after each message. Pure Python.

In every hop each device i sends to device i + 1, and the last to the first, all at once. In an all-gather a device
passes on the part received last. In a reduce-scatter it passes on a running sum, to which each device adds its part. An
all-reduce is a reduce-scatter followed by an all-gather. In an all-to-all a device passes on everything that has not
arrived at its destination. Algorithms and cost: jax-ml.github.io/scaling-book/sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.pictures.drawings.collectives import DIGITS, Values, ring_fills, split_values, values_text
from meshwright.pictures.panels import Cell, Panel, Sketch
from meshwright.record import Kind

Slots = tuple[tuple[Values | None, ...], ...]
"""For each device, its slots: one for each part of the array, with the part's values, or None if the slot is empty.

In an all-to-all, a device has one slot for each device that sends to it.
"""

RING_KINDS: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


@dataclass(frozen=True)
class Frame:
    """The values of all devices after a hop of a ring collective."""

    phase: Kind  # The collective that the hop belongs to; an all-reduce consists of two.
    slots: Slots
    to_pass_on: tuple[tuple[Values, ...], ...]  # By device: values that it holds only to pass them on.
    arrived: tuple[int | None, ...]  # By device: the number of the slot that the hop filled or added to.
    sent: int  # The number of array elements that each device sent in the hop.


@dataclass(frozen=True)
class RingFrames:
    """A ring collective: the values of all devices before it (the first frame) and after each hop."""

    kind: Kind
    frames: tuple[Frame, ...]

    @property
    def result(self) -> tuple[Values, ...]:
        """The values on each device at the end."""
        return tuple(tuple(n for part in slots if part is not None for n in part) for slots in self.frames[-1].slots)

    @property
    def sent(self) -> int:
        """The number of array elements that each device sends, over all hops."""
        return sum(frame.sent for frame in self.frames)


def run_ring(kind: Kind, values: Sequence[int] = DIGITS, *, degree: int = 4) -> RingFrames:
    """Run a collective on a ring of `degree` devices, with `values` split evenly over them.

    Raises for a permute, which has no ring algorithm.
    """
    if kind not in RING_KINDS:
        raise MeshwrightError(f"{kind} has no ring algorithm; those with one are {', '.join(RING_KINDS)}")
    parts = split_values(kind, values, degree, cut_again=("reduce-scatter", "all-reduce", "all-to-all"))
    if kind == "all-gather":
        start = tuple(tuple(part if slot == i else None for slot in range(degree)) for i, part in enumerate(parts))
        return RingFrames(kind, (_first_frame(kind, start), *_gather(start)))
    size = len(parts[0]) // degree
    blocks = tuple(tuple(part[slot * size : (slot + 1) * size] for slot in range(degree)) for part in parts)
    if kind == "all-to-all":
        return RingFrames(kind, tuple(_exchange(blocks)))
    frames = (_first_frame("reduce-scatter", blocks), *_scatter(blocks))
    return RingFrames(kind, frames + tuple(_gather(frames[-1].slots)) if kind == "all-reduce" else frames)


def ring_sketch(ring: RingFrames, members: Mapping[int, str] | None = None) -> Sketch:
    """Draw a ring collective: a table of the devices' slots before it and after each hop. New values are marked.

    members: the colour of each device of the ring, by its number on the mesh; by default the ring is the whole mesh.
    """
    degree = len(ring.frames[0].slots)
    members = members or dict(enumerate(ring_fills(degree)))
    numbers = [*map(str, members)]
    around = " → ".join([*(numbers if degree <= 8 else [*numbers[:2], "…", numbers[-1]]), numbers[0]])
    panels = tuple(_panel(ring, hop, members) for hop in range(len(ring.frames)))
    notes = [f"each device sends {_numbers(ring.sent)} in {len(ring.frames) - 1} hops, all in one direction"]
    if ring.kind != "all-to-all":
        notes.append("links carry both directions: two such rings can run at once, each with half of the numbers")
    title = f"ring {ring.kind} over {degree} devices   {around}"
    return Sketch(title=title, panels=panels, notes=tuple(notes) if ring.sent else ())


def _first_frame(kind: Kind, held: Slots) -> Frame:
    return Frame(kind, held, ((),) * len(held), (None,) * len(held), 0)


def _gather(held: Slots) -> Iterator[Frame]:
    """Yield the frames of an all-gather; device i starts with slot i."""
    degree = len(held)
    for hop in range(1, degree):
        sent = [(device - hop + 1) % degree for device in range(degree)]
        arrived = tuple(sent[device - 1] for device in range(degree))
        held = tuple(
            _replace_slot(slots, arrived[device], held[device - 1][arrived[device]])
            for device, slots in enumerate(held)
        )
        yield Frame("all-gather", held, ((),) * degree, arrived, _length(held[0]))


def _scatter(held: Slots) -> Iterator[Frame]:
    """Yield the frames of a reduce-scatter. The sum of slot i starts at device i + 1 and is complete at device i."""
    degree = len(held)
    for hop in range(1, degree):
        sent = [(device - hop) % degree for device in range(degree)]
        arrived = tuple(sent[device - 1] for device in range(degree))
        before, held = held, tuple(_replace_slot(slots, sent[device], None) for device, slots in enumerate(held))
        held = tuple(
            _replace_slot(slots, slot, _sum(before[device - 1][slot], slots[slot]))
            for device, (slots, slot) in enumerate(zip(held, arrived, strict=True))
        )
        yield Frame("reduce-scatter", held, ((),) * degree, arrived, _length(held[0]))


def _exchange(blocks: tuple[tuple[Values, ...], ...]) -> Iterator[Frame]:
    """Yield the frames of an all-to-all: block j of device i goes to slot i of device j."""
    degree = len(blocks)
    held: Slots = tuple(_replace_slot((None,) * degree, device, blocks[device][device]) for device in range(degree))
    # Values that each device sends, nearest destination first. After `hop` hops they are `hop` devices further.
    ahead = [[blocks[device][(device + far) % degree] for far in range(1, degree)] for device in range(degree)]
    arrived: tuple[int | None, ...] = (None,) * degree
    sent = 0
    for hop in range(degree):
        passing = tuple(tuple(ahead[device - hop][hop:]) for device in range(degree))
        yield Frame("all-to-all", held, passing, arrived, sent)
        sent = sum(map(len, passing[0]))
        arrived = tuple((device - hop - 1) % degree for device in range(degree))
        if hop < degree - 1:
            held = tuple(
                _replace_slot(slots, slot, ahead[slot][hop]) for slots, slot in zip(held, arrived, strict=True)
            )


def _replace_slot(slots: tuple[Values | None, ...], slot: int, part: Values | None) -> tuple[Values | None, ...]:
    return (*slots[:slot], part, *slots[slot + 1 :])


def _sum(left: Values | None, right: Values | None) -> Values:
    assert left is not None
    assert right is not None
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _length(slots: tuple[Values | None, ...]) -> int:
    """Return the number of array elements in a slot."""
    return next(len(part) for part in slots if part is not None)


def _numbers(count: int) -> str:
    return f"{count} number{'s' * (count != 1)}"


def _panel(ring: RingFrames, hop: int, members: Mapping[int, str]) -> Panel:
    """Return the table of frame number `hop`: a row for each device, a column for each slot."""
    frame, degree = ring.frames[hop], len(ring.frames[0].slots)
    fills = tuple(members.values())
    is_exchange = ring.kind == "all-to-all"
    cells = []
    for slots, passing, arrived in zip(frame.slots, frame.to_pass_on, frame.arrived, strict=True):
        row = [
            Cell("·") if part is None else Cell(values_text(part), fills[slot], is_marked=slot == arrived)
            for slot, part in enumerate(slots)
        ]
        cells.append((*row, *([Cell(" | ".join(map(values_text, passing)))] if is_exchange else [])))
    word = "from" if is_exchange else "part"
    columns = [f"{word} {slot}" for slot in range(degree)] + ["to hand on"] * is_exchange
    phase = f" ({frame.phase})" if frame.phase != ring.kind else ""
    last = len(ring.frames) - 1
    caption = f"hop {hop} of {last}{phase}: each device sent {_numbers(frame.sent)}" if hop else "before"
    caption = f"after {caption}" if hop == last and hop else caption
    return Panel(
        cells=tuple(cells),
        rows=tuple(f"device {device}" for device in members),
        row_fills=fills,
        columns=tuple(columns),
        caption=caption,
        frame="table",
    )
