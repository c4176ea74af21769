"""Draw a sharded array as a grid of shards labelled with their devices, or all its shardings side by side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.legality import Sizes, is_legal
from meshwright.errors import MeshwrightError
from meshwright.pictures.colours import device_fill
from meshwright.pictures.drawings.holdings import Block, Holdings, Span, holdings_of
from meshwright.pictures.panels import ELLIPSIS, MAX_PANELS, Cell, Panel, Sketch, limit_panels
from meshwright.units import show_bytes

_WIDE = 9  # The width of a cell in characters, if there is enough space.
_MAX_RANK = 2
MAX_SCALED = 4
"""The largest number of devices for which grids that are drawn side by side have the same size."""

MAX_SHEETS = 7
"""The most partial sums that are drawn behind the first one."""

_MAX_AXES = 3


def array_sketch(holdings: Holdings) -> Sketch:
    """Draw an array of any rank as grids of shards.

    The last two sharded dims are the rows and columns of a grid; if more dims are sharded, there is a grid for each
    combination of their shards. Dims that are not drawn are mentioned in a note.
    """
    panels, notes = list(array_panels(holdings)), tuple(_notes(holdings))
    mesh = f"   mesh {mesh_text(holdings.degrees)}" if holdings.degrees else ""
    title = f"{holdings.label}   {list(holdings.shape)}{mesh}"
    if len(panels) > 1:
        return Sketch(title=title, panels=limit_panels(panels), notes=notes, is_gallery=True)
    width = _WIDE if len(panels[0].cells[0]) <= MAX_PANELS else 0
    return Sketch(title=title, panels=(replace(panels[0], notes=notes, cell_width=width),))


def fills_of(holdings: Holdings) -> Mapping[Block, str]:
    """Return the colour of each shard, determined by the mesh coordinates that all devices with the shard share.

    Without a mesh it is determined by the number of the shard.
    """
    if not holdings.degrees:
        degrees = {"shard": len(holdings.shards)}
        return {block: device_fill({"shard": number}, degrees) for number, block in enumerate(holdings.shards)}
    shared: dict[Block, dict[str, int]] = {}
    for holder in holdings.holders:
        known = shared.setdefault(holder.block, dict(holder.coordinates))
        shared[holder.block] = {axis: at for axis, at in known.items() if holder.coordinates[axis] == at}
    return {block: device_fill(coordinates, holdings.degrees) for block, coordinates in shared.items()}


def drawn_dims(holdings: Holdings) -> tuple[int | None, int | None]:
    """Return (index of the dim drawn as rows, index of the dim drawn as columns).

    None stands for a missing dim: both for a scalar, the first for an array of rank 1.
    """
    cuts = holdings.cuts
    split = [dim for dim, spans in enumerate(cuts) if len(spans) > 1]
    whole = [dim for dim in range(len(cuts)) if dim not in split]
    chosen: list[int | None] = [None, None, *sorted((whole + split)[-2:])]
    return chosen[-2], chosen[-1]


def device_text(devices: Sequence[int]) -> str:
    """Return device numbers as short text: `0`, `0,2`, `0-3`, `0,4,…,28`."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][-1] == device - 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    parts = [
        text for run in runs for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(device) for device in run])
    ]
    return ",".join(parts if len(parts) <= 4 else [*parts[:2], ELLIPSIS, parts[-1]])


def mesh_text(degrees: Mapping[str, int]) -> str:
    """Return a mesh as users type it: `fsdp=2, tp=2`."""
    return ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())


def array_panels(holdings: Holdings, device: int | None = None) -> Iterator[Panel]:
    """Yield a grid for every combination of shards of the dims that are neither rows nor columns.

    If devices hold partial sums, a grid shows the first one, with equal grids behind it (`Panel.sheets`) for the
    others. device: the number of the device whose shard is marked, or None.
    """
    sheets = list(itertools.product(*(range(holdings.degrees[axis]) for axis in holdings.unreduced)))
    behind = [dict(zip(holdings.unreduced, sheet, strict=True)) for sheet in sheets[1 : MAX_SHEETS + 1]]
    fills_behind = tuple(device_fill(coordinates, holdings.degrees) for coordinates in behind)
    in_front = [
        holder for holder in holdings.holders if not any(holder.coordinates[axis] for axis in holdings.unreduced)
    ]
    for panel in _grids(replace(holdings, holders=tuple(in_front)), device):
        yield replace(panel, sheets=fills_behind)


def _grids(holdings: Holdings, device: int | None) -> Iterator[Panel]:
    """Yield the grids of `array_panels`, without `Panel.sheets`; device: the device whose shard is marked, or None."""
    row_dim, column_dim = drawn_dims(holdings)
    fills = fills_of(holdings)
    leading = [dim for dim in range(len(holdings.shape)) if dim not in (row_dim, column_dim)]
    for spans in itertools.product(*(holdings.cuts[dim] for dim in leading)):
        fixed = dict(zip(leading, spans, strict=True))
        yield Panel(
            cells=tuple(
                tuple(
                    _cell(holdings, fills, {**fixed, row_dim: row, column_dim: column}, device)
                    for column in _spans(holdings, column_dim)
                )
                for row in _spans(holdings, row_dim)
            ),
            rows=_labels(holdings, row_dim),
            columns=_labels(holdings, column_dim),
            caption=", ".join(_caption(holdings, dim, fixed[dim]) for dim in leading if len(holdings.cuts[dim]) > 1),
        )


def _spans(holdings: Holdings, dim: int | None) -> tuple[Span, ...]:
    """Return the (start, stop) of each part of a dim; one placeholder if `dim` is None."""
    return ((0, 0),) if dim is None else holdings.cuts[dim]


def _cell(holdings: Holdings, fills: Mapping[Block, str], spans: Mapping[int | None, Span], device: int | None) -> Cell:
    """Return the cell of one shard, with the devices that hold it.

    fills: the colour of each shard. spans: the shard's span of each dim. device: the device whose shard is marked.
    """
    block = tuple(spans[dim] for dim in range(len(holdings.shape)))
    devices = holdings.shards.get(block, ())
    noun, verb = ("device", "holds") if len(devices) == 1 else ("devices", "hold")
    text = device_text(devices)
    hint = f"{noun} {text} {verb} {holdings.block_text(block)}"
    return Cell(text, fills.get(block), hint, is_marked=device in devices)


def _labels(holdings: Holdings, dim: int | None) -> tuple[str, ...]:
    """Return a label for each part of a dim: mesh coordinates (`X=0,Y=1`) or its span (`0:4`); ('',) if not split."""
    if dim is None or len(holdings.cuts[dim]) == 1:
        return ("",)
    if not holdings.axes[dim]:
        return tuple(f"{start}:{stop}" for start, stop in holdings.cuts[dim])
    at = {holder.block[dim]: holder.coordinates for holder in holdings.holders}
    return tuple(",".join(f"{axis}={at[span][axis]}" for axis in holdings.axes[dim]) for span in holdings.cuts[dim])


def _caption(holdings: Holdings, dim: int, span: Span) -> str:
    """Return the caption of a grid for its span of a dim that is neither row nor column: `L 0:2 (pp=0)`."""
    label = _labels(holdings, dim)[holdings.cuts[dim].index(span)]
    where = f" ({label})" if holdings.axes[dim] else ""
    return f"{holdings.dims[dim]} {span[0]}:{span[1]}{where}"


def _notes(holdings: Holdings) -> Iterator[str]:
    """Yield notes: the first device's part, the number of shards, and what the grid omits."""
    first = holdings.holders[0]
    yield f"device {first.device} holds {holdings.block_text(first.block)}"
    shards, copies = len(holdings.shards), holdings.copies
    counts = f"{shards} {'shard' if shards == 1 else 'shards'}, {copies} {'copy' if copies == 1 else 'copies'}"
    yield f"{counts}{' of each' if shards > 1 else ''}, {show_bytes(holdings.bytes_per_device)} a device"
    if holdings.copied_axes:
        yield f"copied over {', '.join(holdings.copied_axes)}"
    if holdings.unreduced:
        yield f"each device has its part of a sum over {', '.join(holdings.unreduced)}: sheets, the first in front"
    folded = [dim for dim, spans in enumerate(holdings.cuts) if dim not in drawn_dims(holdings) and len(spans) == 1]
    if folded:
        dims = ", ".join(f"{holdings.dims[dim]} ({holdings.shape[dim]})" for dim in folded)
        yield f"not drawn, whole on every device: {dims}"


def every_sharding(array: ShardedArray, sizes: Sizes) -> tuple[ShardedArray, ...]:
    """Return every legal sharding of an array over the axes of a mesh; fewer axes come first.

    Each axis with more than one device shards one dim or none. Several axes on one dim are listed in every order, since
    each order puts different shards on the devices. Two dims and two axes have 11 shardings, if all degrees divide the
    dims.
    """
    order = list(sizes.degrees)
    legal = [candidate for candidate in _candidates(array, sizes) if is_legal(candidate, sizes)]
    return tuple(
        sorted(legal, key=lambda found: (len(found.split_axes), [order.index(axis) for axis in found.split_axes]))
    )


def gallery_sketch(array: ShardedArray, sizes: Sizes) -> Sketch:
    """Draw every legal sharding of an array, side by side.

    Raises for more than two dims or three axes larger than 1.
    """
    live_axes = sum(degree > 1 for degree in sizes.degrees.values())
    if not 1 <= len(array.dims) <= _MAX_RANK or live_axes > _MAX_AXES:
        raise MeshwrightError(
            f"all shardings are drawn of arrays of 1 or 2 dims on meshes of up to {_MAX_AXES} axes;"
            f" {array} has {len(array.dims)} dims, the mesh {live_axes} axes"
        )
    shardings = every_sharding(array, sizes)
    panels = [_thumbnail(holdings_of(sharding, sizes)) for sharding in shardings]
    left_out = sum(1 for _ in _candidates(array, sizes)) - len(shardings)
    dims = ", ".join(f"{dim}={sizes.dims[dim]}" for dim in array.dims)
    notes = ["under each: shards × copies of each, bytes a device"]
    notes += [f"{left_out} more are left out: their degrees do not divide {dims}"] if left_out else []
    title = f"{len(shardings)} shardings of {array.label}   {dims}   mesh {mesh_text(sizes.degrees)}"
    num_devices = math.prod(sizes.degrees.values())
    scaled = to_one_size(panels, num_devices) if num_devices <= MAX_SCALED else tuple(panels)
    return Sketch(title=title, panels=scaled, notes=tuple(notes), is_gallery=True)


def _candidates(array: ShardedArray, sizes: Sizes) -> Iterator[ShardedArray]:
    """Yield every assignment of axes to dims, legal or not."""
    axes = [axis for axis, degree in sizes.degrees.items() if degree > 1]
    for places in itertools.product((None, *array.dims), repeat=len(axes)):
        split = [[axis for axis, place in zip(axes, places, strict=True) if place == dim] for dim in array.dims]
        for orders in itertools.product(*map(itertools.permutations, split)):
            yield replace(array, axes=orders, unreduced=())


def to_one_size(panels: Sequence[Panel], num_devices: int) -> tuple[Panel, ...]:
    """Stretch the panels to one size, so that they show one array cut in different ways.

    num_devices: a multiple of each panel's number of rows and of columns. A rule between cells is one line high or one
    character wide.
    """
    widest = max(len(panel.cells[0]) * (panel.column_width + 1) for panel in panels)
    width = num_devices * math.ceil(widest / num_devices)
    height = 2 * max(len(panel.cells) for panel in panels)
    return tuple(
        replace(panel, cell_width=width // len(panel.cells[0]) - 1, cell_height=height // len(panel.cells) - 1)
        for panel in panels
    )


def _thumbnail(holdings: Holdings) -> Panel:
    """Return a small grid without labels, with a note: shards × copies, bytes per device."""
    panel = next(array_panels(holdings))
    note = f"{len(holdings.shards)} × {holdings.copies}, {show_bytes(holdings.bytes_per_device)}"
    return replace(panel, rows=(), columns=(), caption=holdings.label, notes=(note,))
