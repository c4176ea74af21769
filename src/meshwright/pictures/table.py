"""A whole tree of parameters as a table: how each array is split, what a device holds of it, and in how many copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.pictures.sketch import Cell, Panel, Sketch
from meshwright.units import show_bytes

COLUMNS = ("array", "type", "spec", "a device holds", "bytes a device", "copies")


@dataclass(frozen=True)
class Row:
    """One array of a tree. An array that is placed nowhere has the spec `not placed`, and no bytes on a device."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    spec: str
    local_shape: tuple[int, ...]
    total_bytes: int
    bytes_per_device: int
    copies: int


def tree_rows(tree: Any) -> tuple[Row, ...]:
    """A row for every array of a tree, in the order and with the paths of JAX. Raises where there is none."""
    from jax.tree_util import keystr, tree_flatten_with_path

    leaves, _ = tree_flatten_with_path(tree)
    if not leaves:
        raise MeshwrightError(f"{type(tree).__name__} holds no arrays to show")
    return tuple(_row(keystr(path, simple=True, separator=".") or "array", leaf) for path, leaf in leaves)


def table_sketch(rows: Sequence[Row]) -> Sketch:
    """The rows as a table, the sums in its title."""
    total, local = (sum(getattr(row, name) for row in rows) for name in ("total_bytes", "bytes_per_device"))
    title = f"{len(rows)} arrays   {show_bytes(total)}   {show_bytes(local)} a device"
    cells = tuple(tuple(Cell(text) for text in _texts(row)) for row in rows)
    return Sketch(title=title, panels=(Panel(cells=cells, columns=COLUMNS, frame="open"),))


def _row(path: str, leaf: Any) -> Row:
    """The row of one leaf."""
    from jax.sharding import Sharding

    from meshwright.pictures.live import check_concrete, live_holdings, spec_text

    check_concrete(leaf, path)
    shape, dtype = tuple(getattr(leaf, "shape", ())), getattr(leaf, "dtype", None)
    sharding = getattr(leaf, "sharding", None)
    size = math.prod(shape) * (dtype.itemsize if dtype is not None else 0)
    name = str(dtype) if dtype is not None else type(leaf).__name__
    if not isinstance(sharding, Sharding):
        return Row(path, name, shape, "not placed", (), size, 0, 0)
    held = live_holdings(leaf, name=path)
    spec = spec_text(sharding, len(shape))
    return Row(path, name, shape, spec, held.local_shape, size, held.bytes_per_device, held.copies)


def _texts(row: Row) -> tuple[str, ...]:
    """The cells of a row."""
    kind = f"{row.dtype}[{','.join(map(str, row.shape))}]"
    if not row.copies:
        return row.path, kind, row.spec, "-", "-", "-"
    local = f"[{','.join(map(str, row.local_shape))}]"
    return row.path, kind, row.spec, local, show_bytes(row.bytes_per_device), str(row.copies)
