"""Draw a sharded matmul: its operands, the result of each step, and the part of one device."""

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
    """Draw the operands, then the result of each step of the first implementation.

    Partial sums are drawn as sheets behind each other. device: its shards are marked.
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
        yield f"holds {_held(array, priced, device)}"
    for product in way.products:
        yield f"computes {product}: {show_flops(product.flops)}"
    yield f"ends with {_held(inference.result, priced, device)}"


def _held(array: ShardedArray, priced: PricedProduct, device: int) -> str:
    """Return a device's shard of an array as text, with the number of its partial sum."""
    holdings = holdings_of(array, priced.inference.sizes)
    holder = holdings.holders[device]
    part = ",".join(f"{axis}={holder.coordinates[axis]}" for axis in holdings.unreduced)
    return holdings.block_text(holder.block) + (f", the partial sum of {part}" if part else "")


def _panels(array: ShardedArray, priced: PricedProduct, device: int | None, said: str) -> Iterator[Panel]:
    """Yield the grids of an array, with its name above and a text (`said`) below."""
    holdings = holdings_of(array, priced.inference.sizes)
    marked = None if device is None or not _is_in_front(holdings, device) else device
    for panel in array_panels(holdings, marked):
        caption = f"{array} {panel.caption}".rstrip()
        yield replace(panel, caption=caption, notes=(said, *_sum_notes(holdings)))


def _is_in_front(holdings: Holdings, device: int) -> bool:
    """Whether a device holds the partial sum that is drawn in front."""
    at = holdings.holders[device].coordinates
    return not any(at[axis] for axis in holdings.unreduced)


def _sum_notes(holdings: Holdings) -> tuple[str, ...]:
    """Return a note on the sheets of partial sums."""
    if not holdings.unreduced:
        return ()
    return (f"a sheet for each {', '.join(holdings.unreduced)}, to be summed",)


def _bytes(array: ShardedArray, priced: PricedProduct) -> str:
    """Return the shape of a device's shard, and its bytes."""
    sizes = priced.inference.sizes
    return f"{list(sizes.local_shape(array))}, {show_bytes(sizes.local_bytes(array))} a device"


def _steps(way: PricedImplementation) -> Iterator[tuple[Step, str]]:
    """Yield the steps of an implementation, each with its bytes or flops and its time as text."""
    collectives = iter(way.collectives)
    for step in way.implementation.steps:
        if isinstance(step, Communicate):
            yield step, f"{step.kind} over {'*'.join(step.axes)}: {show_seconds(next(collectives).seconds or 0.0)}"
        elif isinstance(step, Multiply):
            yield step, f"product: {show_flops(step.flops)} a device"
        else:
            yield step, "a slice of it: no communication"
