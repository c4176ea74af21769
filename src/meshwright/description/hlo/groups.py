"""Which devices communicate in a collective, and along which mesh axes.

A replica or partition id is a position in the mesh's devices, flattened with the last axis fastest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError

Groups = tuple[tuple[int, ...], ...]
Axes = tuple[str, ...]

MAX_DEVICES = 1 << 20

_LISTS = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))?\s*\{([^{}]*)\}")
_TILES = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([^'=,:\s]+)'?(?:=(\d+)|:\((\d+)\)(\d+))?")


class SubAxis(NamedTuple):
    """A part of a mesh axis, as in Shardy's `'a':(2)4`: one digit of a device's index along the axis, in mixed radix.

    degree: the degree of the whole axis. before: product of the sizes of more significant digits. size: number of
    values of the digit.
    """

    degree: int
    before: int
    size: int

    def digit(self, index: int) -> int:
        """Return the digit of a device at `index` along the axis."""
        return index // self.step % self.size

    @property
    def step(self) -> int:
        """The change of the index if the digit increases by one."""
        return self.degree // (self.before * self.size)


def parse_groups(text: str, *, num_devices: int) -> Groups:
    """Parse a `replica_groups` attribute into groups of device ids.

    There are three notations. `{{0,1},{2,3}}` lists the groups. `[4,2]<=[2,4]T(1,0)` is an iota of shape [2,4],
    transposed and reshaped to [4,2] (groups, devices). `mesh['a'=4,'b'=2] {'b'}` has one group along axis b for each
    index along the other axes; an axis may be partial (`'a':(2)2`) and devices reordered (`device_ids=([2,4]T(1,0))`).
    `{}` is one group of all devices.

    Raises:
        MeshwrightError: the text is in none of these notations, or its sizes contradict each other.
    """
    try:
        groups = _parse_groups(text.strip(), num_devices)
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise MeshwrightError(f"replica_groups {text[:80]!r} contradict themselves: {error}") from None
    if groups is None:
        raise MeshwrightError(f"replica_groups {text[:80]!r} are not in a form that HLO prints")
    return groups


def parse_pairs(text: str) -> Groups:
    """Return the (source, target) devices of a `source_target_pairs` attribute: `{{0,1},{1,0}}`.

    Raises:
        MeshwrightError: an entry is not a pair.
    """
    try:
        pairs = _lists(text)
    except ValueError:
        pairs = ((),)
    if any(len(pair) != 2 for pair in pairs):
        raise MeshwrightError(f"source_target_pairs {text[:80]!r} are not all pairs of devices")
    return pairs


def axes_of_groups(groups: Groups, mesh: Mapping[str, int]) -> Axes | None:
    """Return the mesh axes that form these device groups, in the mesh's order; None if no axes form them.

    Axes of degree 1 are never returned; () means groups of one device.

    mesh: every axis and its degree, outermost first.
    """
    degrees = tuple(mesh.values())
    found: Axes | None = None
    for group in groups:
        if len(set(group)) != len(group) or not all(0 <= device < math.prod(degrees) for device in group):
            return None
        indices = np.array(np.unravel_index(group, degrees)) if degrees else np.zeros((0, len(group)))
        spread = [len(set(row)) for row in indices.tolist()]
        axes = tuple(axis for axis, values in zip(mesh, spread, strict=True) if values > 1)
        if math.prod(spread) != len(group) or any(mesh[a] != n for a, n in zip(mesh, spread, strict=True) if n > 1):
            return None
        if found not in (None, axes):
            return None
        found = axes
    return found if found is not None else ()


def axes_of_pairs(pairs: Iterable[tuple[int, ...]], mesh: Mapping[str, int]) -> Axes:
    """Return the mesh axes along which any source differs from its target, in the mesh's order; () for no difference.

    Raises:
        MeshwrightError: a device is not on the mesh.
    """
    degrees = tuple(mesh.values())
    moved: set[str] = set()
    for pair in pairs:
        if not all(0 <= device < math.prod(degrees) for device in pair):
            raise MeshwrightError(f"a permute names device {max(pair)}; the mesh has {math.prod(degrees)}")
        source, target = (np.unravel_index(device, degrees) for device in pair)
        moved |= {axis for axis, a, b in zip(mesh, source, target, strict=True) if a != b}
    return tuple(axis for axis in mesh if axis in moved)


def _parse_groups(text: str, num_devices: int) -> Groups | None:
    """Return the groups of a text in one of the notations of `parse_groups`; None for any other text."""
    if text.startswith("{"):
        return _lists(text) or (tuple(range(num_devices)),)
    if found := _IOTA.fullmatch(text):
        rows = numbers(found[1])
        return tuple(map(tuple, iota(numbers(found[2]), found[3]).reshape(rows).tolist()))
    if found := _MESH.fullmatch(text):
        # One group along the axes named last for each index along the other axes.
        degrees, order = mesh_devices(found[1], found[2] or "")
        parts = sub_axes(found[3], degrees)
        groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for position, device in enumerate(order.tolist()):
            index = dict(zip(degrees, map(int, np.unravel_index(position, tuple(degrees.values()))), strict=True))
            digits = [part.digit(index[axis]) for axis, part in parts]
            for (axis, part), digit in zip(parts, digits, strict=True):
                index[axis] -= digit * part.step
            groups.setdefault(tuple(index.values()), []).append((tuple(digits), device))
        return tuple(tuple(device for _, device in sorted(group)) for group in groups.values())
    return None


def mesh_devices(mesh: str, devices: str) -> tuple[Mapping[str, int], np.ndarray]:
    """Return the degree of each axis of a mesh printed in HLO, and the device id at each position [devices].

    Args:
        mesh: text such as `'a'=4,'b'=2`.
        devices: the text of `device_ids`, such as `[2,4]T(1,0)` or `6,3,0,1`; '' for devices in order.
    """
    degrees = {axis[1]: int(axis[2] or 0) for axis in _AXIS.finditer(mesh)}
    _check_size(tuple(degrees.values()))
    return degrees, np.array(_device_order(devices, math.prod(degrees.values())))


def sub_axes(text: str, degrees: Mapping[str, int]) -> list[tuple[str, SubAxis]]:
    """Return (axis, part) for each axis, or part of one, in text such as `'a','b':(2)2`.

    degrees: the degree of every mesh axis.
    """
    return [
        (axis[1], SubAxis(degrees[axis[1]], int(axis[3] or 1), int(axis[4] or degrees[axis[1]])))
        for axis in _AXIS.finditer(text)
    ]


def _device_order(text: str, num_devices: int) -> list[int]:
    """Return the device id at each position, from text such as `[2,4]T(1,0)` or `6,3,0,1`; in order if it is empty."""
    if not text:
        return list(range(num_devices))
    if found := _TILES.fullmatch(text):
        return iota(numbers(found[1]), found[2]).ravel().tolist()
    return list(numbers(text))


def iota(shape: tuple[int, ...], order: str | None) -> np.ndarray:
    """Return 0, 1, 2, ... reshaped to `shape`, then transposed. Raises ValueError if that is impossible.

    order: the permutation of the dims, such as `1,0`; None for no transposition.
    """
    _check_size(shape)
    iota = np.arange(math.prod(shape)).reshape(shape)
    return iota.transpose(numbers(order)) if order else iota


def _check_size(shape: tuple[int, ...]) -> None:
    """Raise if a shape has no device, or more than `MAX_DEVICES`: corrupt text must not exhaust memory."""
    if not 0 < math.prod(shape) <= MAX_DEVICES:
        raise ValueError(f"{math.prod(shape)} devices")


def _lists(text: str) -> Groups:
    """Return the rows of `{{0,1},{2,3}}`, ((0, 1), (2, 3)); () for `{}`."""
    return tuple(numbers(row) for row in _LISTS.findall(text[1:-1]))


def numbers(text: str) -> tuple[int, ...]:
    """Return the integers of `1,2,3`."""
    return tuple(int(number) for number in text.split(",") if number.strip())
