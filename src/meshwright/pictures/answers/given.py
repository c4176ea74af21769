"""Read the arguments of answers, a mesh, sizes of dims and hardware, and apply defaults."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshwright.description.hardware.system import System
from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.expression import Chain, Einsum, Expression
from meshwright.description.notation.parser import parse, parse_numbers
from meshwright.errors import MeshwrightError, NotationError
from meshwright.mesh import MeshShape
from meshwright.options.values import Count, SystemLike, read_system

Numbers = str | Mapping[str, int]
"""Whole numbers by name, such as degrees by mesh axis: as text `X=2,Y=2` or as a mapping."""

DIM_SIZE = 8192
"""The default size of a dim, before it is rounded down to a multiple of the number of devices."""


@dataclass(frozen=True)
class Setting:
    """A mesh on hardware. degrees: by mesh axis. notes: the defaults that were applied, as texts."""

    degrees: dict[str, int]
    system: System
    notes: tuple[str, ...] = ()


def read_numbers(numbers: Numbers | MeshShape) -> dict[str, int]:
    """Return whole numbers by name. Raises if one is not at least 1."""
    if isinstance(numbers, MeshShape):
        return dict(numbers.degrees)
    if isinstance(numbers, str):
        return parse_numbers(numbers)
    if not isinstance(numbers, Mapping):
        raise MeshwrightError(f"{numbers!r} is not numbers by name, as 'X=2,Y=2' or {{'X': 2, 'Y': 2}}")
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise MeshwrightError(f"{name}={number!r}; it is a whole number from 1")
    return dict(numbers)


def read_keywords(keywords: Mapping[str, Count]) -> dict[str, int]:
    """Return degrees and sizes from keyword arguments, `X=4` or `I="8k"`."""
    return parse_numbers(",".join(f"{name}={number}" for name, number in keywords.items())) if keywords else {}


def read_setting(
    axes: Collection[str], degrees: Mapping[str, int], on: SystemLike | None, *, is_complete: bool
) -> Setting:
    """Return the mesh and the hardware of an answer.

    Args:
        axes: the mesh axes that are used. Those that are not in `degrees` share the remaining devices.
        degrees: degrees by mesh axis.
        on: the hardware; None for this machine's devices.
        is_complete: whether `degrees` is the whole mesh, so that no axis is added.

    Raises:
        MeshwrightError: the degrees do not divide the devices.
    """
    missing = [] if is_complete else [axis for axis in axes if axis not in degrees]
    used, notes = math.prod(degrees.values()), []
    if on is None:
        # Imported here: a named system is priced without JAX.
        from meshwright.execution.runtime.machine import this_machine

        system = this_machine(used if degrees and not missing else None)
        devices = "simulated devices" if system.chip.kind == "cpu" else "the devices of this machine"
        notes.append(f"on is left out: {system}, {devices}")
    else:
        system = read_system(on)
    whole = dict(degrees)
    if missing:
        if system.num_devices % used:
            raise MeshwrightError(
                f"{', '.join(missing)} of the mesh {'has' if len(missing) == 1 else 'have'} no degree, and"
                f" {system.num_devices} devices cannot be divided by {used}; give one, as {missing[0]}=4"
            )
        shares = _even_shares(system.num_devices // used, len(missing))
        whole |= dict(zip(missing, shares, strict=True))
        said = ", ".join(f"{axis}={whole[axis]}" for axis in missing)
        notes.append(f"{said}: all devices, because no degree is given")
    order = (*axes, *(axis for axis in degrees if axis not in axes)) if missing else degrees
    return Setting({axis: whole[axis] for axis in order}, system, tuple(notes))


def _even_shares(count: int, num_axes: int) -> list[int]:
    """Split a number of devices into `num_axes` factors, as equal as possible, the largest first."""
    shares, divisor = [1] * num_axes, 2
    primes = []
    while count > 1:
        while count % divisor == 0:
            primes.append(divisor)
            count //= divisor
        divisor += 1
    for prime in reversed(primes):
        shares[shares.index(min(shares))] *= prime
    return sorted(shares, reverse=True)


def default_dims(dims: Collection[str], given: Mapping[str, int], num_devices: int) -> tuple[dict[str, int], str]:
    """Return (size by dim, note); a dim that is not in `given` has the default size, which the note states.

    The default is `DIM_SIZE`, rounded down to a multiple of `num_devices`. The note is '' if no dim needs it.
    """
    size = max(DIM_SIZE // num_devices, 1) * num_devices
    missing = [dim for dim in dims if dim not in given]
    note = f"{', '.join(f'{dim}={size:,}' for dim in missing)}: the size of a dim that is left out" if missing else ""
    return {dim: given.get(dim, size) for dim in dims}, note


def arrays_of(expression: Expression) -> tuple[ShardedArray, ...]:
    """Return the arrays that an expression names."""
    if isinstance(expression, ShardedArray):
        return (expression,)
    if isinstance(expression, Chain):
        return (*arrays_of(expression.start), *(stage.result for stage in expression.stages))
    assert isinstance(expression, Einsum)
    return (*expression.operands, *([expression.result] if expression.result else []))


def named_dims_and_axes(text: str, known: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (dims, mesh axes) of an expression in the notation, in the order of first use.

    known: names of axes, so that `I_dpfsdp` is read as the two axes dp and fsdp and not as an axis dpfsdp.
    """
    try:
        expression = parse(text, axes=known)
    except NotationError as first:
        try:
            expression = parse(text)
        except NotationError as second:  # Show the later of two mistakes: the text before it was parsed.
            raise max(first, second, key=lambda error: error.position) from None
    arrays = arrays_of(expression)
    stages = expression.stages if isinstance(expression, Chain) else ()
    axes = [axis for array in arrays for axis in (*array.split_axes, *array.unreduced)]
    axes += [axis for stage in stages for axis in stage.axes]
    return tuple(dict.fromkeys(dim for array in arrays for dim in array.dims)), tuple(dict.fromkeys(axes))
