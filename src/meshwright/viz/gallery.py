"""Every sharding of an array on a mesh, as a gallery of small grids."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.notation import ShardedArray, Sizes
from meshwright.notation.legality import is_legal
from meshwright.viz.grid import mesh_text, thumbnail
from meshwright.viz.holdings import holdings_of
from meshwright.viz.sketch import Panel, Sketch

_MAX_RANK = 2
_MAX_AXES = 3
_MAX_SCALED = 4  # devices up to which all grids of a gallery are drawn in one size


def every_sharding(array: ShardedArray, sizes: Sizes) -> tuple[ShardedArray, ...]:
    """Every legal sharding of an array over the axes of a mesh, those over fewer axes first.

    Each axis with more than one device shards one dim or none. Several axes on one dim are listed in every order, which
    puts different shards on the devices. Two dims and two axes have 11, if all degrees divide.
    """
    order = list(sizes.degrees)
    legal = [candidate for candidate in _candidates(array, sizes) if is_legal(candidate, sizes)]
    return tuple(
        sorted(legal, key=lambda found: (len(found.split_axes), [order.index(axis) for axis in found.split_axes]))
    )


def gallery_sketch(array: ShardedArray, sizes: Sizes) -> Sketch:
    """Every legal sharding of an array, side by side.

    Raises beyond two dims or three axes with more than one device.
    """
    live_axes = sum(degree > 1 for degree in sizes.degrees.values())
    if not 1 <= len(array.dims) <= _MAX_RANK or live_axes > _MAX_AXES:
        raise MeshwrightError(
            f"all shardings are drawn of arrays of 1 or 2 dims on meshes of up to {_MAX_AXES} axes;"
            f" {array} has {len(array.dims)} dims, the mesh {live_axes} axes"
        )
    shardings = every_sharding(array, sizes)
    panels = [thumbnail(holdings_of(sharding, sizes)) for sharding in shardings]
    left_out = sum(1 for _ in _candidates(array, sizes)) - len(shardings)
    dims = ", ".join(f"{dim}={sizes.dims[dim]}" for dim in array.dims)
    notes = ["under each: shards × copies of each, bytes a device"]
    notes += [f"{left_out} more are left out: their degrees do not divide {dims}"] if left_out else []
    title = f"{len(shardings)} shardings of {array.label}   {dims}   mesh {mesh_text(sizes.degrees)}"
    num_devices = math.prod(sizes.degrees.values())
    scaled = _to_one_size(panels, num_devices) if num_devices <= _MAX_SCALED else tuple(panels)
    return Sketch(title=title, panels=scaled, notes=tuple(notes), is_gallery=True)


def _candidates(array: ShardedArray, sizes: Sizes) -> Iterator[ShardedArray]:
    """Every assignment of axes to dims, legal or not."""
    axes = [axis for axis, degree in sizes.degrees.items() if degree > 1]
    for places in itertools.product((None, *array.dims), repeat=len(axes)):
        split = [[axis for axis, place in zip(axes, places, strict=True) if place == dim] for dim in array.dims]
        for orders in itertools.product(*map(itertools.permutations, split)):
            yield replace(array, axes=orders, unreduced=())


def _to_one_size(panels: Sequence[Panel], num_devices: int) -> tuple[Panel, ...]:
    """Stretch the panels to one size, so that they show one array cut in different ways.

    Row and column counts divide the number of devices. A rule takes a line, or a character.
    """
    widest = max(len(panel.cells[0]) * (panel.column_width + 1) for panel in panels)
    width = num_devices * math.ceil(widest / num_devices)
    height = 2 * max(len(panel.cells) for panel in panels)
    return tuple(
        replace(panel, cell_width=width // len(panel.cells[0]) - 1, cell_height=height // len(panel.cells) - 1)
        for panel in panels
    )
