"""Constraints that do not do what they say, and values that the partitioner makes whole because it knows no way."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.compiler import Laid, read_rematerialized, read_shardings
from meshwright.hlo import Shape
from meshwright.inspection.finding import Finding
from meshwright.inspection.subject import Subject
from meshwright.units import show_bytes

UNUSED = "meshwright: nothing uses the result of with_sharding_constraint"
"""How the process that lowers a function begins the line on a constraint whose result is thrown away."""

_UNUSED = re.compile(re.escape(UNUSED) + r" on (\S+)\[([\d,]*)\] at (.*)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_NAMES = re.compile(r"'(\w+)'")


def constraints_without_effect(subject: Subject) -> Iterator[Finding]:
    """Constraints whose result nothing uses, that do not divide the dim they split, or that the partitioner ignored."""
    if subject.program is None:
        return
    for dtype, dims, source in dict.fromkeys(_UNUSED.findall(subject.program.messages)):
        shape = _shape(f"{dtype}[{dims}]")
        yield Finding(
            kind="constraint without effect",
            evidence=f"nothing uses the result of with_sharding_constraint on {shape}; the value stays as it was",
            bytes=shape.bytes,
            seconds=None,
            source=source,
            fix="go on with what it returns: x = with_sharding_constraint(x, …)",
        )
    for laid in read_shardings(subject.program, subject.mesh):
        if laid.role == "intermediate" and laid.wanted is not None:
            yield from _uneven(subject, laid)
            yield from _ignored(laid)


def full_rematerializations(subject: Subject) -> Iterator[Finding]:
    """Values that go from one sharding to another by being whole on every device in between."""
    if subject.program is None:
        return
    for value in read_rematerialized(subject.program, subject.mesh):
        shape = _shape(value.array)
        axes = tuple(axis for axis in _NAMES.findall(value.before) if axis in subject.mesh)
        size = shape.bytes * subject.degree(axes)
        yield Finding(
            kind="full rematerialization",
            evidence=f"{shape} a device goes from {value.before} to {value.after} by being gathered whole,"
            f" {show_bytes(size)} on every device, and cut again ({value.op})",
            bytes=size,
            seconds=subject.collective_seconds("all-gather", size, axes),
            source=value.source,
            fix="keep each axis on a dim that the op keeps, or constrain the value in between to a sharding that"
            " differs from either in one axis",
        )


def _uneven(subject: Subject, laid: Laid) -> Iterator[Finding]:
    """A dim that is not a multiple of the axes it is split over: the partitioner pads it."""
    shape = _shape(laid.array)
    for number, (dim, axes) in enumerate(zip(shape.dims, laid.wanted.dims if laid.wanted else (), strict=False)):
        degree = subject.degree(axes or ())
        if dim % degree:
            padded = -(-dim // degree) * degree
            yield Finding(
                kind="constraint without effect",
                evidence=f"dim {number} of {shape} does not divide over {'*'.join(axes or ())}={degree}:"
                f" {dim} % {degree} = {dim % degree}; it is padded to {padded} inside the program,"
                " and whole again wherever it leaves it",
                bytes=shape.bytes,
                seconds=None,
                source=laid.source,
                fix=f"make the dim a multiple of {degree}, as {padded}, or constrain another dim",
            )


def _ignored(laid: Laid) -> Iterator[Finding]:
    """A value that lies otherwise than its constraint asked."""
    if laid.got is not None and not laid.is_as_wanted:
        shape = _shape(laid.array)
        yield Finding(
            kind="constraint without effect",
            evidence=f"{shape} was asked to lie as {laid.wanted} and lies as {laid.got}",
            bytes=shape.bytes,
            seconds=None,
            source=laid.source,
            fix="look for another constraint on the same value, and keep one",
        )


def _shape(text: str) -> Shape:
    """The shape of `f32[8,16]`."""
    found = _ARRAY.search(text)
    dtype, dims = (found[1], found[2]) if found else ("f32", "")
    return Shape(dtype, tuple(int(dim) for dim in dims.split(",") if dim))
