"""Draw a sharded matmul: its operands and the result of each step, with the shards of one device marked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.steps import Communicate, Multiply, Step
from meshwright.errors import MeshwrightError
from meshwright.pictures.drawings.arrays import MAX_SCALED, array_panels, mesh_text, to_one_size
from meshwright.pictures.drawings.holdings import Holdings, holdings_of
from meshwright.pictures.panels import Panel, Sketch, limit_panels
from meshwright.planning.cost.rates.product import PricedImplementation, PricedProduct
from meshwright.units import show_bytes, show_flops, show_seconds


def product_sketch(priced: PricedProduct, *, title: str, device: int | None = None) -> Sketch:
    """Draw the operands of a matmul, then the result of each step of the chosen implementation.

    Partial sums are drawn as a stack of sheets. device: the number of the device whose shards are marked, or None.
    """
    inference, sizes = priced.inference, priced.inference.sizes
    panels = [panel for array in inference.operands for panel in _panels(array, priced, device, _bytes(array, priced))]
    for step, said in _steps(priced.chosen):
        panels += _panels(step.result, priced, device, said)
    notes = [f"mesh {mesh_text(sizes.degrees)}; each cell has the numbers of its devices"]
    notes += [] if device is None else [f"device {device} {part}" for part in device_parts(priced, device)]
    count = sizes.degree(sizes.degrees)
    scaled = to_one_size(panels, count) if count <= MAX_SCALED else panels
    return Sketch(title=title, panels=limit_panels(scaled), notes=tuple(notes), is_gallery=True)


def device_parts(priced: PricedProduct, device: int) -> Iterator[str]:
    """Yield lines on one device: its shards of the operands, its matmuls, its shard of the result.

    Raises:
        MeshwrightError: the mesh has no such device.
    """
    inference, way = priced.inference, priced.chosen.implementation
    count = inference.sizes.degree(inference.sizes.degrees)
    if not 0 <= device < count:
        raise MeshwrightError(f"device={device} is not on the mesh, whose devices are 0 to {count - 1}")
    for array in inference.operands:
        yield f"holds {_shard_text(array, priced, device)}"
    for product in way.products:
        yield f"computes {product}: {show_flops(product.flops)}"
    yield f"ends with {_shard_text(inference.result, priced, device)}"


def _shard_text(array: ShardedArray, priced: PricedProduct, device: int) -> str:
    """Return a device's shard of an array as text: `C[0:4, 0:8]`, or `C[0:4, 0:8], the partial sum of X=1`."""
    holdings = holdings_of(array, priced.inference.sizes)
    holder = holdings.holders[device]
    part = ",".join(f"{axis}={holder.coordinates[axis]}" for axis in holdings.unreduced)
    return holdings.block_text(holder.block) + (f", the partial sum of {part}" if part else "")


def _panels(array: ShardedArray, priced: PricedProduct, device: int | None, note: str) -> Iterator[Panel]:
    """Yield the grids of an array with its name above and `note` below; device: the device whose shard is marked."""
    holdings = holdings_of(array, priced.inference.sizes)
    marked = None if device is None or not _has_first_sum(holdings, device) else device
    for panel in array_panels(holdings, marked):
        caption = f"{array} {panel.caption}".rstrip()
        yield replace(panel, caption=caption, notes=(note, *_sum_notes(holdings)))


def _has_first_sum(holdings: Holdings, device: int) -> bool:
    """Whether a device holds the first partial sum, the only one whose shards are drawn; True without partial sums."""
    at = holdings.holders[device].coordinates
    return not any(at[axis] for axis in holdings.unreduced)


def _sum_notes(holdings: Holdings) -> tuple[str, ...]:
    """Return a note on the sheets of partial sums; () if there are none."""
    if not holdings.unreduced:
        return ()
    return (f"a sheet for each {', '.join(holdings.unreduced)}, to be summed",)


def _bytes(array: ShardedArray, priced: PricedProduct) -> str:
    """Return the shape and the bytes of a device's shard as text."""
    sizes = priced.inference.sizes
    return f"{list(sizes.local_shape(array))}, {show_bytes(sizes.local_bytes(array))} a device"


def _steps(way: PricedImplementation) -> Iterator[tuple[Step, str]]:
    """Yield (step, text) for each step of an implementation; the text has a collective's time or a matmul's flops."""
    collectives = iter(way.collectives)
    for step in way.implementation.steps:
        if isinstance(step, Communicate):
            yield step, f"{step.kind} over {'*'.join(step.axes)}: {show_seconds(next(collectives).seconds or 0.0)}"
        elif isinstance(step, Multiply):
            yield step, f"product: {show_flops(step.flops)} a device"
        else:
            yield step, "a slice of it: no communication"
