"""Recognize collectives that a compiler lowered as other collectives, by what the devices compute, never by names.

XLA:CPU has no reduce-scatter: it all-reduces, and every device slices its shard out of the sum. The TPU compiler lowers
some all-gathers, such as those over a whole torus flattened into one axis, by writing each device's shard into zeros
and all-reducing. XLA:CPU also communicates bf16 data in f32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np

from meshwright.description.hlo.dataflow import VIEWS, VIEWS_AND_CASTS, origin, uses
from meshwright.description.hlo.evaluation import evaluate, slice_sizes
from meshwright.description.hlo.groups import Axes
from meshwright.description.hlo.module import Instruction, Module
from meshwright.record import Collective, LoweredAs, Lowering

_HALVES = ("bf16", "f16")


def canonicalize_collective(collective: Collective, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Undo the lowerings of a compiled collective: return the collectives that the user's program has in its place.

    A partly sliced all-reduce is a reduce-scatter and an all-reduce; any other collective is one. The bytes are halved
    if XLA promoted 16-bit data to f32. A collective without lowerings is returned unchanged.

    mesh: the degree of every axis.
    """
    if any(lowering.promoted_from for lowering in collective.lowerings):
        collective = replace(collective, bytes=collective.bytes // 2)
    forms = {lowering.form: lowering for lowering in collective.lowerings}
    if LoweredAs.SLICED_ALL_REDUCE in forms:
        return (replace(collective, kind="reduce-scatter"),)
    if LoweredAs.PADDED_ALL_REDUCE in forms:
        return (replace(collective, kind="all-gather"),)
    if partly := forms.get(LoweredAs.PARTLY_SLICED_ALL_REDUCE):
        num_shards = math.prod(mesh[axis] for axis in partly.scatter_axes)
        return (
            replace(collective, kind="reduce-scatter", axes=partly.scatter_axes),
            replace(collective, axes=partly.reduce_axes, bytes=collective.bytes // num_shards),
        )
    return (collective,)


def slice_lowering(module: Module, value: Instruction, axes: Axes, mesh: Mapping[str, int]) -> Lowering | None:
    """Return the lowering of an all-reduce that replaces a reduce-scatter: devices use only their shards of the result.

    Every use of the result, followed through views, conversions and fusions, must be a dynamic-slice into equal tiles,
    and all uses on a device must take the same tile. The slice's offsets are evaluated for each device from its id and
    constants in the text. Along some of the all-reduce's axes, devices must take different tiles, which together are
    all tiles. Devices that differ only along its other axes must take the same tile.

    Args:
        module: the program.
        value: the result of the all-reduce.
        axes: the mesh axes of the all-reduce.
        mesh: the degree of every axis, in device order.

    Returns:
        `SLICED_ALL_REDUCE` if devices take different tiles along all axes. `PARTLY_SLICED_ALL_REDUCE` if they do along
        some: a reduce-scatter over these and an all-reduce over the others. `UNREADABLE_SLICE` if the text elides the
        table of offsets. None if the result has other uses or leaves its computation, or if offsets depend on anything
        else (a loop counter, data).
    """
    found: list[tuple[int, np.ndarray]] = []
    for user, held in uses(module, value, VIEWS_AND_CASTS):
        if user.opcode != "dynamic-slice" or user.operands[0] != held.name or held.name in user.operands[1:]:
            return None
        counts = _counts(held.shape.dims, slice_sizes(user))
        if counts is None or math.prod(counts) < 2:
            return None
        offsets = module.operands(user)[1:]
        tiles = _tiles(module, offsets, slice_sizes(user), counts, math.prod(mesh.values()))
        if tiles is None:
            # The text elides long constants as `{...}`.
            is_elided = any("..." in source.text for offset in offsets for source in _constants(module, offset))
            return Lowering(form=LoweredAs.UNREADABLE_SLICE) if is_elided else None
        found.append((math.prod(counts), tiles))
    if not found or any(count != found[0][0] or not np.array_equal(tiles, found[0][1]) for count, tiles in found):
        return None
    scattered = _tiled_axes(found[0][1], found[0][0], axes, mesh)
    if scattered is None:
        return None
    rest = tuple(axis for axis in axes if axis not in scattered)
    if not rest:
        return Lowering(form=LoweredAs.SLICED_ALL_REDUCE)
    return Lowering(form=LoweredAs.PARTLY_SLICED_ALL_REDUCE, scatter_axes=scattered, reduce_axes=rest)


def is_padded_gather(module: Module, operand: Instruction, axes: Axes, mesh: Mapping[str, int]) -> bool:
    """Whether an all-reduce is an all-gather in effect: its operand is the device's shard in an array of zeros.

    The operand, followed back through views, conversions and fusions, must be a dynamic-update-slice into a broadcast
    zero. Devices that differ along `axes` must write different tiles, which together are all tiles.
    """
    update = origin(module, operand, VIEWS_AND_CASTS)
    if update.opcode != "dynamic-update-slice":
        return False
    zeros = origin(module, module.operand(update), VIEWS_AND_CASTS)
    zero = origin(module, module.operand(zeros), VIEWS_AND_CASTS) if zeros.opcode == "broadcast" else zeros
    if zero.opcode != "constant" or not re.fullmatch(r"-?0(\.0)?", zero.text):
        return False
    sizes = module.operand(update, 1).shape.dims
    counts = _counts(update.shape.dims, sizes)
    if counts is None:
        return False
    tiles = _tiles(module, module.operands(update)[2:], sizes, counts, math.prod(mesh.values()))
    return tiles is not None and _tiled_axes(tiles, math.prod(counts), axes, mesh) == axes


def promoted_from(
    module: Module, operand: Instruction, result: Instruction, reducer: str, *, is_combined: bool = False
) -> str:
    """Return the 16-bit dtype that XLA promoted to f32 for a collective; '' if the program itself uses f32.

    A collective is promoted if XLA named its reduction `..._promoted`, or if its operand is converted from a 16-bit
    dtype and every use of its result converts back first. If the conversion was fused away, the dtype is the program's
    only 16-bit one. In a combined collective (`is_combined`) the name is not enough: XLA combines promoted arrays with
    float32 arrays and gives all of them the reduction of the first (jaxlib 0.12.0.1).

    reducer: the name of the collective's reduction; '' if it has none.
    """
    if operand.shape.dtype != "f32":
        return ""
    made = origin(module, operand)
    narrow = module.operand(made).shape.dtype if made.opcode == "convert" else ""
    if reducer.endswith("_promoted"):
        if narrow in _HALVES:
            return narrow
        halves = {instruction.shape.dtype for instruction in module.instructions()}.intersection(_HALVES)
        after = (user.opcode == "convert" and user.shape.dtype in halves for user, _ in uses(module, result))
        return halves.pop() if len(halves) == 1 and (not is_combined or any(after)) else ""
    if narrow not in _HALVES:
        return ""
    through = VIEWS | {"slice", "dynamic-slice"}
    back = [user.opcode == "convert" and user.shape.dtype == narrow for user, _ in uses(module, result, through)]
    return narrow if back and all(back) else ""


def _counts(dims: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the number of tiles along each dim of an array; None if the tile's `sizes` do not divide `dims`."""
    if len(dims) != len(sizes) or any(size < 1 or dim % size for dim, size in zip(dims, sizes, strict=True)):
        return None
    return tuple(dim // size for dim, size in zip(dims, sizes, strict=True))


def _tiles(
    module: Module, offsets: tuple[Instruction, ...], sizes: tuple[int, ...], counts: tuple[int, ...], num_devices: int
) -> np.ndarray | None:
    """Return the index of the tile that each device takes, [num_devices]; tiles are numbered in row-major order.

    None if offsets are unknown or not at the edge of a tile.

    Args:
        module: the program.
        offsets: the instruction that computes the slice's offset along each dim.
        sizes: the size of a tile along each dim.
        counts: the number of tiles along each dim.
        num_devices: the number of devices.
    """
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
    """Return the axes, out of `axes`, along which devices take different tiles; None if there are no such axes.

    Devices that differ along the returned axes must take all `num_tiles` tiles, one each. Devices that differ only
    along the rest of `axes` must take the same tile.

    tiles: the index of each device's tile, as from `_tiles`.
    """
    by_axis = tiles.reshape(tuple(mesh.values()))
    position = {axis: number for number, axis in enumerate(mesh)}
    groups = [axis for axis in mesh if axis not in axes]  # Devices that differ along these are in different groups.
    for scattered in (some for size in range(len(axes), 0, -1) for some in combinations(axes, size)):
        if math.prod(mesh[axis] for axis in scattered) != num_tiles:
            continue
        replicated = [axis for axis in axes if axis not in scattered]
        order = [position[axis] for axis in (*groups, *scattered, *replicated)]
        taken = by_axis.transpose(order).reshape(math.prod(mesh[axis] for axis in groups), num_tiles, -1)
        same = (taken == taken[..., :1]).all()
        if same and all(len(set(group)) == num_tiles for group in taken[..., 0].tolist()):
            return scattered
    return None


def _constants(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yield the constants from which a value is computed, directly or through other instructions."""
    waiting, seen = [instruction], set()
    while waiting and len(seen) < 200:
        made = origin(module, waiting.pop(), VIEWS_AND_CASTS)
        if (made.computation, made.name) in seen:
            continue
        seen.add((made.computation, made.name))
        if made.opcode == "constant":
            yield made
        elif made.opcode not in ("while", "fusion", "call"):
            waiting += module.operands(made)
