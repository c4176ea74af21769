"""Collectives that a compiler spells as others: found by what the devices compute, never by names.

XLA:CPU makes no reduce-scatter: it all-reduces, and every device slices its share out of the sum. The TPU compiler
makes some gathers, as those over a whole torus flattened into one axis, by writing each device's shard into zeros and
all-reducing. And XLA:CPU carries bf16 collectives in f32.
"""

from __future__ import annotations

import math
import re

import numpy as np

from meshwright.compiled.dataflow import VIEWS, evaluate, origin, slice_sizes, uses
from meshwright.compiled.groups import Groups
from meshwright.compiled.hlo import Instruction, Module

SLICED = "reduce-scatter spelled as all-reduce + slice"
PADDED = "all-gather spelled as all-reduce of shards in zeros"
PROMOTED = "promoted from {dtype} by the CPU compiler"
UNREAD = "sliced afterwards by offsets that the text leaves out"

_SHARES = frozenset(VIEWS | {"convert"})
_HALVES = ("bf16", "f16")


def is_sliced(module: Module, value: Instruction, groups: Groups) -> bool:
    """Whether an all-reduce's result is used only as this device's share of it: a reduce-scatter in other words.

    The rule: every use, behind views and conversions and into and out of fusions, is a dynamic-slice of the value into
    as many equal tiles as a group has devices; the offsets, evaluated for each device from the constants in the text
    and its own number, give the devices of every group all the tiles, each one; and every use takes the same tile. A
    value that is used in any other way, leaves its computation, or is cut by offsets that depend on anything else (a
    loop's counter, data, a table the text leaves out) is not sliced.
    """
    tiles: list[np.ndarray] = []
    for user, held in uses(module, value, _SHARES):
        if user.opcode != "dynamic-slice" or user.operands[0] != held.name or held.name in user.operands[1:]:
            return False
        found = _tiles(module, held.shape.dims, slice_sizes(user), user, 1, groups)
        if found is None or (tiles and not np.array_equal(found, tiles[0])):
            return False
        tiles.append(found)
    return bool(tiles)


def is_padded(module: Module, operand: Instruction, groups: Groups) -> bool:
    """Whether an all-reduce's operand is one device's shard in an array of zeros: an all-gather in other words.

    The rule: behind views, conversions and fusions stands a dynamic-update-slice into a broadcast zero, of one tile out
    of as many as a group has devices, and each device of every group writes another.
    """
    update = origin(module, operand, _SHARES)
    if update.opcode != "dynamic-update-slice":
        return False
    zeros = origin(module, module.operand(update), _SHARES)
    zero = origin(module, module.operand(zeros), _SHARES) if zeros.opcode == "broadcast" else zeros
    if zero.opcode != "constant" or not re.fullmatch(r"-?0(\.0)?", zero.text):
        return False
    return _tiles(module, update.shape.dims, module.operand(update, 1).shape.dims, update, 2, groups) is not None


def promoted_from(module: Module, operand: Instruction, result: Instruction, reducer: str) -> str:
    """The 16-bit dtype that a collective's f32 data has before and after it; '' where the program itself wants f32.

    The rule: the operand is converted from that dtype, and either XLA named the reduction `..._promoted`, or every use
    of the result begins by converting back.
    """
    if operand.shape.dtype != "f32":
        return ""
    made = origin(module, operand)
    narrow = module.operand(made).shape.dtype if made.opcode == "convert" else ""
    if narrow not in _HALVES:
        return ""
    if reducer.endswith("_promoted"):
        return narrow
    through = VIEWS | {"slice", "dynamic-slice"}
    back = [user.opcode == "convert" and user.shape.dtype == narrow for user, _ in uses(module, result, through)]
    return narrow if back and all(back) else ""


def cut_by_unread_offsets(module: Module, value: Instruction, groups: Groups) -> bool:
    """Whether every use of a value is a slice of the size of a device's share, by offsets the text does not give."""
    found = False
    for user, held in uses(module, value, _SHARES):
        if user.opcode != "dynamic-slice" or user.operands[0] != held.name:
            return False
        shares = held.shape.size / max(1, user.shape.size)
        known = [evaluate(module, offset, module.num_devices) for offset in module.operands(user)[1:]]
        if shares != len(groups[0]) or all(offset is not None for offset in known):
            return False
        found = True
    return found


def _tiles(
    module: Module, dims: tuple[int, ...], sizes: tuple[int, ...], user: Instruction, first: int, groups: Groups
) -> np.ndarray | None:
    """The number of the tile that each device takes, where each group's devices take all tiles, each another.

    sizes: of a tile; the offsets are the operands of `user` from `first` on. None where there is no such tiling.
    """
    num_devices = sum(map(len, groups))
    if len(dims) != len(sizes) or any(size < 1 or dim % size for dim, size in zip(dims, sizes, strict=True)):
        return None
    counts = [dim // size for dim, size in zip(dims, sizes, strict=True)]
    if math.prod(counts) != len(groups[0]):
        return None
    tile = np.zeros(num_devices, dtype=np.int64)
    for offset, size, count in zip(module.operands(user)[first:], sizes, counts, strict=True):
        if count == 1:
            continue
        value = evaluate(module, offset, num_devices)
        if value is None or value.shape != (num_devices,) or (value % size).any() or (value >= size * count).any():
            return None
        tile = tile * count + value // size
    complete = all(sorted(tile[list(group)]) == list(range(len(group))) for group in groups)
    return tile if complete else None


