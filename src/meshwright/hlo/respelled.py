"""Collectives that a compiler spells as others: found by what the devices compute, never by names.

XLA:CPU makes no reduce-scatter: it all-reduces, and every device slices its share out of the sum. The TPU compiler
makes some gathers, as those over a whole torus flattened into one axis, by writing each device's shard into zeros and
all-reducing. And XLA:CPU carries bf16 collectives in f32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np

from meshwright.hlo.dataflow import VIEWS, origin, uses
from meshwright.hlo.evaluation import evaluate, slice_sizes
from meshwright.hlo.groups import Axes
from meshwright.hlo.module import Instruction, Module
from meshwright.record import Collective

SLICED = "all-reduce + slice"
SLICED_IN_PART = "reduce-scatter over {scattered} and all-reduce over {rest}, done as one and sliced"
PADDED = "as all-reduce of shards in zeros"
PROMOTED = "promoted from {dtype} by the CPU compiler"
UNREAD = "sliced afterwards by offsets that the text leaves out"

_SHARES = frozenset(VIEWS | {"convert"})
_HALVES = ("bf16", "f16")
_IN_PART = re.compile(re.escape(SLICED_IN_PART).replace(r"\{scattered\}", "(.+?)").replace(r"\{rest\}", "(.+?)"))


def meant(collective: Collective, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """What a collective of a compiled program stands for, by its note: what a plan would call it, in the plan's dtype.

    mesh: the degree of every axis. A collective without such a note is itself.
    """
    note = collective.note
    if PROMOTED.format(dtype="bf16") in note or PROMOTED.format(dtype="f16") in note:
        collective = replace(collective, bytes=collective.bytes // 2)
    if SLICED in note:
        return (replace(collective, kind="reduce-scatter"),)
    if PADDED in note:
        return (replace(collective, kind="all-gather"),)
    if found := _IN_PART.search(note):
        scattered, rest = (tuple(axes.split(" x ")) for axes in found.groups())
        shares = math.prod(mesh[axis] for axis in scattered)
        return (
            replace(collective, kind="reduce-scatter", axes=scattered),
            replace(collective, axes=rest, bytes=collective.bytes // shares),
        )
    return (collective,)


def sliced_note(module: Module, value: Instruction, axes: Axes, mesh: Mapping[str, int]) -> str:
    """The note on an all-reduce over some axes whose result is used only as this device's share of it; '' on others.

    The rule: every use, behind views and conversions and into and out of fusions, is a dynamic-slice of the value into
    equal tiles; the offsets, evaluated for each device from the constants in the text and its own number, give devices
    that differ along some of the axes all the tiles, each another, and the same one to devices that do not; and every
    use takes the same tile. Where these are all the axes it is a reduce-scatter; where they are a part, a
    reduce-scatter over them and an all-reduce over the rest. A value that is used in any other way, leaves its
    computation, or is cut by offsets that depend on anything else (a loop's counter, data) has no note; one whose
    offsets come from a table that the text leaves out has one that says no more than that.
    """
    found: list[tuple[int, np.ndarray]] = []
    for user, held in uses(module, value, _SHARES):
        if user.opcode != "dynamic-slice" or user.operands[0] != held.name or held.name in user.operands[1:]:
            return ""
        counts = _counts(held.shape.dims, slice_sizes(user))
        if counts is None or math.prod(counts) < 2:
            return ""
        offsets = module.operands(user)[1:]
        tiles = _tiles(module, offsets, slice_sizes(user), counts, math.prod(mesh.values()))
        if tiles is None:
            return UNREAD if _come_from_tables(module, offsets) else ""
        found.append((math.prod(counts), tiles))
    if not found or any(count != found[0][0] or not np.array_equal(tiles, found[0][1]) for count, tiles in found):
        return ""
    scattered = _tiled_axes(found[0][1], found[0][0], axes, mesh)
    if scattered is None:
        return ""
    rest = tuple(axis for axis in axes if axis not in scattered)
    return SLICED_IN_PART.format(scattered=" x ".join(scattered), rest=" x ".join(rest)) if rest else SLICED


def is_padded(module: Module, operand: Instruction, axes: Axes, mesh: Mapping[str, int]) -> bool:
    """Whether an all-reduce's operand is one device's shard in an array of zeros: an all-gather in other words.

    The rule: behind views, conversions and fusions stands a dynamic-update-slice into a broadcast zero, of one tile out
    of as many as there are devices along the axes, and each of those writes another.
    """
    update = origin(module, operand, _SHARES)
    if update.opcode != "dynamic-update-slice":
        return False
    zeros = origin(module, module.operand(update), _SHARES)
    zero = origin(module, module.operand(zeros), _SHARES) if zeros.opcode == "broadcast" else zeros
    if zero.opcode != "constant" or not re.fullmatch(r"-?0(\.0)?", zero.text):
        return False
    sizes = module.operand(update, 1).shape.dims
    counts = _counts(update.shape.dims, sizes)
    if counts is None:
        return False
    tiles = _tiles(module, module.operands(update)[2:], sizes, counts, math.prod(mesh.values()))
    return tiles is not None and _tiled_axes(tiles, math.prod(counts), axes, mesh) == axes


def promoted_from(module: Module, operand: Instruction, result: Instruction, reducer: str) -> str:
    """The 16-bit dtype that a collective's f32 data has before and after it; '' where the program itself wants f32.

    The rule: XLA named the reduction `..._promoted`; or the operand is converted from that dtype, and every use of the
    result begins by converting back. A conversion that was fused away leaves the one 16-bit dtype of the program.
    """
    if operand.shape.dtype != "f32":
        return ""
    made = origin(module, operand)
    narrow = module.operand(made).shape.dtype if made.opcode == "convert" else ""
    if reducer.endswith("_promoted"):
        halves = {instruction.shape.dtype for instruction in module.instructions()}.intersection(_HALVES)
        return narrow if narrow in _HALVES else halves.pop() if len(halves) == 1 else ""
    if narrow not in _HALVES:
        return ""
    through = VIEWS | {"slice", "dynamic-slice"}
    back = [user.opcode == "convert" and user.shape.dtype == narrow for user, _ in uses(module, result, through)]
    return narrow if back and all(back) else ""


def _counts(dims: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """How many tiles of some size an array has along each dim; None where they do not fill it."""
    if len(dims) != len(sizes) or any(size < 1 or dim % size for dim, size in zip(dims, sizes, strict=True)):
        return None
    return tuple(dim // size for dim, size in zip(dims, sizes, strict=True))


def _tiles(
    module: Module, offsets: tuple[Instruction, ...], sizes: tuple[int, ...], counts: tuple[int, ...], num_devices: int
) -> np.ndarray | None:
    """The number of the tile that each device takes; None where offsets are unknown or not at the edge of a tile."""
    tile = np.zeros(num_devices, dtype=np.int64)
    for offset, size, count in zip(offsets, sizes, counts, strict=True):
        if count == 1:
            continue
        value = evaluate(module, offset, num_devices)
        if value is None or value.shape != (num_devices,):
            return None
        if (value % size).any() or (value < 0).any() or (value >= size * count).any():
            return None
        tile = tile * count + value // size
    return tile


def _tiled_axes(tiles: np.ndarray, num_tiles: int, axes: Axes, mesh: Mapping[str, int]) -> Axes | None:
    """The axes among some along which devices take all tiles there are, each another; None where there are none.

    Along the others of them all devices take the same.
    """
    index = dict(zip(mesh, np.unravel_index(np.arange(tiles.size), tuple(mesh.values())), strict=True))
    # Devices with equal `group` take part in one collective.
    group = _number([index[axis] for axis in mesh if axis not in axes], tiles.size)
    for scattered in (some for size in range(len(axes), 0, -1) for some in combinations(axes, size)):
        if math.prod(mesh[axis] for axis in scattered) != num_tiles:
            continue
        place = _number([index[axis] for axis in scattered], tiles.size)
        pairs = {(g, p): t for g, p, t in zip(group.tolist(), place.tolist(), tiles.tolist(), strict=True)}
        same = all(pairs[g, p] == t for g, p, t in zip(group.tolist(), place.tolist(), tiles.tolist(), strict=True))
        if same and len({(g, t) for (g, _), t in pairs.items()}) == len(pairs):
            return scattered
    return None


def _number(indices: list[np.ndarray], num_devices: int) -> np.ndarray:
    """One number for each different combination of indices."""
    number = np.zeros(num_devices, dtype=np.int64)
    for index in indices:
        number = number * (int(index.max()) + 1) + index
    return number


def _come_from_tables(module: Module, offsets: tuple[Instruction, ...]) -> bool:
    """Whether some offset is looked up in a constant that the compiler printed as `{...}`."""
    return any("..." in source.text for offset in offsets for source in _sources(module, offset))


def _sources(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The constants that a value is computed from."""
    waiting, seen = [instruction], set()
    while waiting and len(seen) < 200:
        made = origin(module, waiting.pop(), _SHARES)
        if (made.computation, made.name) in seen:
            continue
        seen.add((made.computation, made.name))
        if made.opcode == "constant":
            yield made
        elif made.opcode not in ("while", "fusion", "call"):
            waiting += module.operands(made)
