"""Arrays that take up more memory than their elements, because a TPU stores them in tiles."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.hlo import Instruction, Shape
from meshwright.inspection.finding import Finding
from meshwright.inspection.subject import Subject
from meshwright.units import show_bytes

_SHARE_OF_MEMORY = 0.02
"""The part of all that a program holds below which padding is left alone."""

_GROWTH = 1.25
"""How much larger than its elements an array must be stored."""

_MOST = 3
"""How many shapes are named; the largest say it all."""


def padding(subject: Subject) -> Iterator[Finding]:
    """The shapes that waste the most memory on tiles that they do not fill."""
    held = _held(subject)
    floor = _SHARE_OF_MEMORY * _peak(subject)
    wasted = {shape: (shape.padded_bytes - shape.bytes) * count for shape, (count, _) in held.items()}
    for shape in sorted(wasted, key=wasted.__getitem__, reverse=True)[:_MOST]:
        count, first = held[shape]
        if wasted[shape] < max(floor, 1) or shape.padded_bytes < _GROWTH * shape.bytes:
            continue
        many = f"{count} arrays {shape}" if count > 1 else str(shape)
        yield Finding(
            kind="padding",
            evidence=f"{many} of {show_bytes(count * shape.bytes)} take {show_bytes(count * shape.padded_bytes)} in"
            f" memory, {shape.padded_bytes / shape.bytes:.3g} times their elements: their tiles are not filled",
            bytes=wasted[shape],
            seconds=_seconds(subject, wasted[shape]),
            source=subject.first_use(first) if first.opcode == "parameter" else subject.place(first),
            fix="make the last dim a multiple of 128 and the one before it of 8 (bf16: 16, 8 bits: 32), as one device"
            " holds them: merge small dims, or split another dim",
        )


def _held(subject: Subject) -> dict[Shape, tuple[int, Instruction]]:
    """The arrays in memory by shape: how many are held at once at least, and the first of them.

    Arguments are held together; of all other arrays of one shape, one.
    """
    held: dict[Shape, tuple[int, Instruction]] = {}
    for argument in subject.arguments:
        count, first = held.get(argument.instruction.shape, (0, argument.instruction))
        held[argument.instruction.shape] = (count + 1, first)
    fused = {name for one in subject.module.instructions() for name in one.called("calls", "to_apply")}
    for instruction in subject.module.instructions():
        if instruction.computation in fused or not subject.runs.times[instruction.computation]:
            continue
        if instruction.shape.dtype != "tuple" and instruction.shape.is_in_hbm:
            held.setdefault(instruction.shape, (1, instruction))
    return held


def _peak(subject: Subject) -> int:
    """The memory of the program, or of its arguments where that is all there is."""
    if subject.program and subject.program.memory_bytes:
        return subject.program.memory_bytes["peak"]
    return sum(argument.instruction.shape.padded_bytes for argument in subject.arguments)


def _seconds(subject: Subject, wasted: int) -> float | None:
    """The time to read the padding once."""
    return None if subject.system is None else wasted / subject.system.hbm_bytes_per_second
