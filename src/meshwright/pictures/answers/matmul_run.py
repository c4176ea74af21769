"""Run a sharded matmul on simulated devices in every mode of JAX, and compare inferred and compiled collectives."""

from __future__ import annotations

import itertools as it
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.system import parse_system
from meshwright.description.notation.inference import Inference
from meshwright.description.notation.steps import Communicate
from meshwright.errors import MeshwrightError
from meshwright.pictures.answers.answer import Answer
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded
from meshwright.planning.cost.rates.product import PricedProduct
from meshwright.record import Collective
from meshwright.units import show_bytes

if TYPE_CHECKING:
    from meshwright.execution.runtime.modes import Mode
    from meshwright.proof.verification.products import ProductCheck

LARGEST = 256
"""The size to which larger dims are reduced on simulated devices."""

MOST_DEVICES = 64
"""The most devices that are simulated: a laptop has too few threads for more."""


@dataclass(frozen=True, repr=False)
class MatmulRun(Answer):
    """A run of a matmul's chosen implementation (`Matmul.ways[0]`) on simulated devices.

    inference: the matmul with reduced dims, and its inferred collectives. checks: by mode of JAX, the comparison of the
    inferred with the compiled collectives.
    """

    inference: Inference
    checks: Mapping[Mode, ProductCheck]

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data: `dims`, the sizes that were used, and `modes`, the comparison in each mode."""
        modes = {
            mode: {
                "error": check.error,
                "is_as_inferred": check.is_as_inferred,
                "inferred": [_in_short(move) for move in check.inferred],
                "compiled": [_in_short(move) for move in check.compiled],
            }
            for mode, check in self.checks.items()
        }
        return {"dims": dict(self.inference.sizes.dims), "modes": modes}

    def print(self) -> None:
        """Print for each mode the largest error, and the inferred and compiled collectives side by side."""
        from meshwright.description.hlo.versions import untested_notes

        sizes = self.inference.sizes
        dims = ",".join(f"{dim}={size}" for dim, size in sizes.dims.items())
        count = sizes.degree(sizes.degrees)
        show(
            console(),
            f" implementation 1, run on {count} simulated devices in float32, dims reduced to {LARGEST}: {dims}",
        )
        print()
        rows = [row for mode, check in self.checks.items() for row in _run_rows(mode, check)]
        show(console(), table(("mode", "error", "inferred", "compiled", ""), rows, left=(0, 2, 3, 4), folds=-1))
        for note in untested_notes():
            print(folded(f"note: {note}"))


def run_product(priced: PricedProduct) -> MatmulRun:
    """Run a matmul's chosen implementation on simulated devices in every mode of JAX, with dims of about `LARGEST`.

    Raises:
        MeshwrightError: the mesh has more than `MOST_DEVICES`, or JAX has started with fewer devices.
    """
    from meshwright.execution.runtime.devices import claim_devices

    # Only the chosen implementation, in float32, each dim at most `LARGEST`, or the least multiple of the degrees that
    # split it.
    inference, way = priced.inference, priced.chosen.implementation
    arrays = [*inference.operands, *(step.result for step in way.steps)]
    dims = {}
    for dim, size in inference.sizes.dims.items():
        unit = math.lcm(*(inference.sizes.degree(array.axes_of(dim)) for array in arrays))
        dims[dim] = min(size, max(LARGEST // unit, 1) * unit)
    sizes = replace(inference.sizes, dims=dims, element_bytes=dtype_bytes("f32"))
    steps = tuple(
        replace(step, bytes=sizes.local_bytes(step.counted)) if isinstance(step, Communicate) else step
        for step in way.steps
    )
    inference = replace(inference, sizes=sizes, implementations=(replace(way, steps=steps),), prescribed=None)
    check_simulated(math.prod(inference.sizes.degrees.values()))
    claim_devices(parse_system(f"cpu:{math.prod(inference.sizes.degrees.values())}"))
    from meshwright.execution.runtime.modes import MODES
    from meshwright.proof.verification.products import check_product

    return MatmulRun(inference, {mode: check_product(inference, mode=mode) for mode in MODES})


def check_simulated(num_devices: int) -> None:
    """Raise if there are more than `MOST_DEVICES` devices to simulate."""
    if num_devices > MOST_DEVICES:
        raise MeshwrightError(f"--run simulates up to {MOST_DEVICES} devices; the mesh has {num_devices}, take fewer")


def _run_rows(mode: str, check: ProductCheck) -> Iterator[tuple[str, ...]]:
    """Yield a row of cells for each inferred or compiled collective of a mode.

    Cells: mode, largest error, inferred collective, compiled collective, verdict. Only the first row has mode, error
    and verdict.
    """
    verdict = "as inferred" if check.is_as_inferred else "NOT AS INFERRED"
    error = f"{check.error:.1e}" if check.error else "0"
    moves = it.zip_longest(*([_kind(move) for move in moves] or ["none"] for moves in (check.inferred, check.compiled)))
    for number, (inferred, compiled) in enumerate(moves):
        first = (mode, error) if number == 0 else ("", "")
        yield (*first, inferred or "", compiled or "", "" if number else "; ".join((verdict, *check.notes)))


def _kind(move: Collective) -> str:
    """Return a collective's kind, axes and bytes as text."""
    return f"{move.kind} {'*'.join(move.axes)} {show_bytes(move.bytes)}"


def _in_short(move: Collective) -> dict[str, Any]:
    """Return a collective's kind, axes and bytes as plain data."""
    return {"kind": move.kind, "axes": list(move.axes), "bytes": move.bytes}
