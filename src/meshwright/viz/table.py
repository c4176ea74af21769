"""A tree of parameters as a table: each array's sharding, its bytes on a device, and its copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.units import show_bytes
from meshwright.viz.sketch import Cell, Panel, Sketch

COLUMNS = ("array", "type", "a device holds", "bytes a device", "copies")


@dataclass(frozen=True)
class Row:
    """One array of a tree: its type as JAX prints it, and its spec. An unplaced array has no bytes on a device."""

    path: str
    type: str
    shape: tuple[int, ...]
    spec: str
    local_shape: tuple[int, ...]
    total_bytes: int
    bytes_per_device: int
    copies: int


def tree_rows(tree: Any) -> tuple[Row, ...]:
    """A row for every array of a tree, with JAX's order and paths. Raises where there is none."""
    from jax.tree_util import keystr, tree_flatten_with_path

    leaves, _ = tree_flatten_with_path(tree)
    if not leaves:
        raise MeshwrightError(f"{type(tree).__name__} holds no arrays to show")
    return tuple(_row(keystr(path, simple=True, separator=".") or "array", leaf) for path, leaf in leaves)


def table_sketch(rows: Sequence[Row]) -> Sketch:
    """The rows as a table, with totals in its title."""
    total, local = (sum(getattr(row, name) for row in rows) for name in ("total_bytes", "bytes_per_device"))
    title = f"{len(rows)} arrays   {show_bytes(total)}   {show_bytes(local)} a device"
    cells = tuple(tuple(Cell(text) for text in _texts(row)) for row in rows)
    return Sketch(title=title, panels=(Panel(cells=cells, columns=COLUMNS, frame="open"),))


def _row(path: str, leaf: Any) -> Row:
    from jax.sharding import Sharding

    from meshwright.viz.live import check_concrete, live_holdings, spec_text, type_text

    check_concrete(leaf, path)
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, Sharding):
        return _unplaced(path, leaf)
    held = live_holdings(leaf, name=path)
    return Row(
        path=path,
        type=type_text(leaf, sharding),
        shape=held.shape,
        spec=spec_text(sharding, len(held.shape)),
        local_shape=held.local_shape,
        total_bytes=math.ceil(math.prod(held.shape) * held.element_bytes),
        bytes_per_device=held.bytes_per_device,
        copies=held.copies,
    )


def _unplaced(path: str, leaf: Any) -> Row:
    """The row of a leaf that no device holds: a host array, a plain number, an abstract array."""
    shape, dtype = tuple(getattr(leaf, "shape", ())), getattr(leaf, "dtype", None)
    if dtype is None:
        return Row(path, type(leaf).__name__, shape, "not placed", (), 0, 0, 0)
    text = f"{dtype}[{','.join(map(str, shape))}]"
    return Row(path, text, shape, "not placed", (), math.prod(shape) * dtype.itemsize, 0, 0)


def _texts(row: Row) -> tuple[str, ...]:
    """The cells of a row; a spec without a mesh is shown beside the type, which cannot express it."""
    kind = row.type if row.spec.startswith("P(") else f"{row.type} {row.spec}"
    if not row.copies:
        return row.path, kind, "-", "-", "-"
    local = f"[{','.join(map(str, row.local_shape))}]"
    return row.path, kind, local, show_bytes(row.bytes_per_device), str(row.copies)
