"""`meshwright.matmul`: the case of a sharded matmul, its collectives, and the predicted time of each implementation.

The cases 1 to 4 are those of the scaling book: each is a way in which the operands are sharded, and determines the
collectives (`cases`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.system import System
from meshwright.description.notation.inference import Inference, infer
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.parser import parse
from meshwright.description.notation.steps import Communicate
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.options.values import Count, SystemLike
from meshwright.pictures.answers.answer import DrawnAnswer
from meshwright.pictures.answers.given import (
    Numbers,
    default_dims,
    named_dims_and_axes,
    read_keywords,
    read_numbers,
    read_setting,
)
from meshwright.pictures.answers.matmul_run import MatmulRun, run_product
from meshwright.pictures.drawings.products import device_parts, product_sketch
from meshwright.pictures.drawings.roofline import roofline_sketch
from meshwright.pictures.picture import Picture
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded, terms, wrap
from meshwright.planning.cost.rates.product import PricedImplementation, PricedProduct, price
from meshwright.planning.cost.threshold import say_threshold
from meshwright.record import Bound
from meshwright.support.field_types import check_value
from meshwright.units import show_bytes, show_flops, show_mesh, show_range, show_seconds

MOST_SHOWN = 6
"""The default number of implementations that are printed."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Matmul(DrawnAnswer):
    """A sharded matmul, or a resharding, with its predicted time on some hardware.

    product: the expression as it was typed. priced: its implementations with their times. notes: the defaults that were
    applied. device: the device whose shards are marked and printed, or None.
    """

    product: str
    priced: PricedProduct
    dtype: str
    notes: tuple[str, ...] = field(default=())
    device: int | None = None

    @property
    def inference(self) -> Inference:
        """What follows from the shardings: result, case (1 to 4) of each mesh axis, implementations without times."""
        return self.priced.inference

    @property
    def case(self) -> int | None:
        """The case of the whole matmul, 1 to 4; None for a resharding."""
        return self.inference.case

    @property
    def result(self) -> str:
        """The result with its sharding: `C[I_X, K]`."""
        return str(self.inference.result)

    @property
    def mesh(self) -> Mapping[str, int]:
        """The degree of each mesh axis, outermost first."""
        return self.inference.sizes.degrees

    @property
    def dims(self) -> Mapping[str, int]:
        """The size of each dim."""
        return self.inference.sizes.dims

    @property
    def system(self) -> System:
        """The hardware."""
        return self.priced.layout.system

    @property
    def ways(self) -> tuple[PricedImplementation, ...]:
        """The implementations: first the one that was typed, else the fastest; then the others, fastest first."""
        return (self.priced.chosen, *self.priced.alternatives)

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of the first of `ways`: (with collectives that overlap with matmuls, without overlap)."""
        return self.priced.chosen.seconds, self.priced.chosen.serial_seconds

    @property
    def bound(self) -> Bound | None:
        """What bounds the first of `ways`: compute, memory or communication; None for a resharding."""
        return self.priced.chosen.bound

    @property
    def picture(self) -> Picture:
        """The operands, the result of each step of the first of `ways`, and the matmul in the chip's roofline."""
        case = f"case {self.case}" if self.case else "a resharding"
        drawn = product_sketch(self.priced, title=f"{self.product}   {case}", device=self.device)
        roofline = roofline_sketch(self.priced, dtype=self.dtype)
        return Picture((drawn, roofline) if roofline else (drawn,))

    def run(self) -> MatmulRun:
        """Run the first of `ways` on simulated devices in every mode of JAX (`run_product`)."""
        return run_product(self.priced)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data, in the schema of `meshwright matmul --json`."""
        setting = {"mesh": dict(self.mesh), "dims": dict(self.dims), "on": str(self.system), "dtype": self.dtype}
        return {"product": self.product, **setting, **self.priced.to_json()}

    def print(self, top: int = MOST_SHOWN) -> None:
        """Print the case, then the first `top` implementations, then local shapes, flops, intensities and bound."""
        inference, ways = self.inference, self.ways
        mesh = show_mesh(self.mesh)
        show(console(), f"{self.product}   {mesh} on {self.system}")
        print()
        if inference.case is None:
            case = "a resharding: nothing is multiplied"
        else:
            reasons = "; ".join(found.reason for found in inference.cases) or "no axis splits an operand"
            case = f"case {inference.case}: {reasons}"
        show(console(), f"  {case}", style="bold")
        print()
        rows = [row for place, way in enumerate(ways[:top], start=1) for row in _rows(place, way)]
        heads = ("", "steps", "network", "", "matmul", "together", "bound by")
        show(console(), table(heads, rows, left=(1, 6), folds=1))
        if len(ways) > top:
            print(f"\n  {len(ways) - top} more implementations; --top {len(ways)} prints them")
        print()
        if any(way.collectives and way.implementation.flops for way in ways[:top]):
            print(
                folded(
                    "together: from full overlap, which takes as long as the longest of matmul and collectives, to no"
                    " overlap; a matmul that needs the result of a collective can overlap it only in chunks"
                )
            )
        if any("{U_" in line for row in rows for line in row):
            print(folded("{U_X}: partial sums, which the devices along X have yet to add up"))
        for note in (f"elements are {self.dtype} (--dtype)", *self.notes):
            print(folded(note))
        print()
        print("\n".join(_why(self.priced)))
        if self.device is not None:
            parts = "; ".join(device_parts(self.priced, self.device))
            print("\n".join(wrap(f"device {self.device} {parts}", first=" ", then="  ")))


def matmul(
    product: str,
    *,
    mesh: Numbers | MeshShape | None = None,
    dims: Numbers | None = None,
    on: SystemLike | None = None,
    dtype: str = "bf16",
    device: int | None = None,
    **sizes: Count,
) -> Matmul:
    """Return the case of a sharded matmul, its collectives, and every implementation with its predicted times.

    Args:
        product: the matmul or the resharding, in the scaling book's notation or MaxText's; the result is optional.
        mesh: the degree of every mesh axis, outermost first, such as "X=4,Y=2".
        dims: the size of every dim, such as "I=8k,J=8k".
        on: the hardware, such as "v5e:2x4"; by default this machine's devices.
        dtype: dtype of the elements.
        device: the number of a device whose shards are marked and printed.
        sizes: degrees of mesh axes and sizes of dims by name, instead of mesh and dims. An axis without a degree takes
            the remaining devices, and a dim without a size has `DIM_SIZE`.

    Raises:
        MeshwrightError: the matmul cannot be parsed, or the mesh cannot shard it.

    >>> answer = matmul("A[I, J_X] @ B[J_X, K]", X=4, on="v5e:2x4")
    >>> answer.case, answer.result, answer.bound
    (3, 'C[I, K]', 'communication')
    """
    check_value("product", product, str)
    degrees = read_numbers(mesh) if mesh else {}
    names, axes = named_dims_and_axes(product, [*degrees, *sizes])
    keywords = read_keywords(sizes)
    if wrong := [name for name in keywords if name not in (*names, *axes)]:
        raise MeshwrightError(
            f"{wrong[0]} is neither a dim nor a mesh axis of {product}; further axes go into mesh='X=4,Y=2'"
        )
    lengths = read_numbers(dims) if dims else {}
    for name, number in keywords.items():
        (lengths if name in names else degrees)[name] = number
    setting = read_setting(axes, degrees, on, is_complete=mesh is not None)
    notes = list(setting.notes)
    if dims is None:
        lengths, note = default_dims(names, lengths, math.prod(setting.degrees.values()))
        notes += [note] if note else []
    sizes_of = Sizes(degrees=setting.degrees, dims=lengths, element_bytes=dtype_bytes(dtype))
    inference = infer(parse(product, axes=setting.degrees), sizes_of)
    there = {dim for array in (*inference.operands, inference.result) for dim in array.dims}
    if unknown := [dim for dim in lengths if dim not in there]:
        raise MeshwrightError(f"--dims names {unknown[0]}, which is no dim of {product}; leave it out")
    priced = price(inference, setting.system, dtype=dtype)
    if device is not None:
        tuple(device_parts(priced, device))  # Raises where the mesh has no such device.
    return Matmul(product=product, priced=priced, dtype=dtype, notes=tuple(notes), device=device)


def _rows(place: int, priced: PricedImplementation) -> Iterator[tuple[str, ...]]:
    """Yield a row for each step of an implementation; the first row also has its `place`, total times and bound.

    place: the implementation's number in the ranking, from 1.
    """
    product = show_seconds(max(priced.flops_seconds, priced.memory_seconds))
    first = (product, show_range(priced.seconds, priced.serial_seconds), priced.bound or "nothing")
    collectives = iter(priced.collectives)
    for number, step in enumerate(priced.implementation.steps):
        amounts = ("", "")
        if isinstance(step, Communicate):
            move = next(collectives)
            amounts = (show_bytes(move.bytes), show_seconds(move.seconds or 0.0))
        yield ("" if number else str(place), str(step), *amounts, *(("", "", "") if number else first))


def _why(priced: PricedProduct) -> list[str]:
    """Return lines on local shapes, flops, intensities, the bound and its threshold."""
    chosen, inference = priced.chosen, priced.inference
    shapes = {
        str(array): str(list(inference.sizes.local_shape(array))) for array in (*inference.operands, inference.result)
    }
    lines = [terms("local", shapes)]
    if chosen.implementation.flops:
        repeated = chosen.implementation.repeated_axes
        again = f", the same work on every device of {', '.join(repeated)}" if repeated else ""
        lines.append(f" flops   {show_flops(chosen.implementation.flops)} a device{again}")
    for name, found in (("network", chosen.network), ("memory", chosen.memory)):
        if found:
            dims = f"{found.dims} = " if found.dims else ""
            lines += wrap(
                f"{name} intensity {dims}{found.value:.0f} flops a byte; hardware intensity {found.hardware:.0f}",
                first=" ",
                then="  ",
            )
    if chosen.bound:
        threshold = say_threshold(chosen.threshold) if chosen.threshold else ""
        lines += wrap("; ".join(filter(None, (f"{chosen.bound} bound", threshold))), first=" ", then="  ")
    return lines + [folded(f"note: {note}") for note in priced.layout.notes]
