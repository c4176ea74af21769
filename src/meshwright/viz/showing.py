"""`show`: a picture of an array, a tree, a collective or a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.hardware import System, dtype_bytes, parse_system
from meshwright.mesh import MeshShape
from meshwright.notation import ShardedArray, Sizes, check, parse_array, parse_numbers
from meshwright.planner import read_system
from meshwright.record import Kind
from meshwright.step.schedule import Schedule
from meshwright.viz.collectives import DIGITS, Values, collective_sketch, run_collective
from meshwright.viz.gallery import gallery_sketch
from meshwright.viz.grid import array_sketch
from meshwright.viz.holdings import Holdings, holdings_of
from meshwright.viz.picture import Picture
from meshwright.viz.pipeline import pipeline_sketch
from meshwright.viz.rings import ring_sketch, run_ring
from meshwright.viz.sketch import Sketch
from meshwright.viz.table import table_sketch, tree_rows
from meshwright.viz.torus import torus_sketch

Numbers = str | Mapping[str, int]
"""`X=2,Y=2`, or the same as a mapping."""


def show(
    what: Any,
    *,
    mesh: Numbers | MeshShape | None = None,
    dims: Numbers | None = None,
    dtype: str = "bf16",
    every: bool = False,
    on: str | System | None = None,
) -> Picture:
    """A picture of what each device holds.

    Args:
      what: text in the notation, `A[I_X, J_Y]`, with `mesh`, `dims` and `dtype`; a live `jax.Array` of any rank and
          sharding; or a tree of arrays, such as a model's parameters, shown as a table.
      mesh: axes and degrees.
      dims: sizes of the dims.
      dtype: of the array.
      every: show all legal shardings of the array on the mesh.
      on: a system, `v5e:4x4`, on whose torus the mesh is drawn too.

    Raises MeshwrightError where the sharding is not legal, or an argument does not apply to `what`.

      >>> picture = show("A[I_X, J_Y]", mesh="X=2,Y=2", dims="I=8,J=8")
    """
    on = None if on is None else str(read_system(on))
    if isinstance(what, str):
        array, sizes = read_text(what, mesh=mesh, dims=dims, dtype=dtype)
        sketch = gallery_sketch(array, sizes) if every else array_sketch(holdings_of(array, sizes))
        return Picture((sketch, *_torus(on, sizes.degrees)))
    if mesh is not None or dims is not None or every:
        raise MeshwrightError("mesh, dims and every go with text in the notation; a live array has a mesh and a shape")
    holdings = _live(what)
    if holdings:
        return Picture((array_sketch(holdings), *_torus(on, holdings.degrees)))
    if on is not None:
        raise MeshwrightError(f"on={on!r} goes with one array; a tree may lie on several meshes")
    return Picture((table_sketch(tree_rows(what)),))


def show_collective(kind: Kind, values: Values = DIGITS, *, degree: int = 4) -> Picture:
    """A collective before and after, run on `degree` devices; `values` are split evenly over them."""
    return Picture((collective_sketch(run_collective(kind, values, degree=degree)),))


def show_ring(kind: Kind, values: Values = DIGITS, *, degree: int = 4) -> Picture:
    """A ring collective hop by hop: what each of `degree` devices holds after each."""
    return Picture((ring_sketch(run_ring(kind, values, degree=degree)),))


def show_pipeline(schedule: Schedule, *, num_layers: int | None = None) -> Picture:
    """A pipeline schedule: which microbatch each stage works on in each slot, and where it is idle.

    num_layers: of the model, to label stages with their layers.
    """
    return Picture((pipeline_sketch(schedule, num_layers),))


def read_text(
    text: str, *, mesh: Numbers | MeshShape | None, dims: Numbers | None, dtype: str
) -> tuple[ShardedArray, Sizes]:
    """Parse and check an array and its sizes: axes and dims are known, degrees divide."""
    if mesh is None or dims is None:
        raise MeshwrightError(f"{text!r} wants a mesh and the sizes of its dims, as in mesh='X=2,Y=2', dims='I=8,J=8'")
    degrees = mesh.degrees if isinstance(mesh, MeshShape) else _numbers(mesh)
    array = parse_array(text, axes=degrees)
    sizes = Sizes(degrees=degrees, dims=_numbers(dims), element_bytes=dtype_bytes(dtype))
    unknown = [dim for dim in sizes.dims if dim not in array.dims]
    if unknown:
        raise MeshwrightError(f"there is a size for {', '.join(unknown)}, which {array} has not")
    check(array, sizes)
    return array, sizes


def _numbers(numbers: Numbers) -> Mapping[str, int]:
    """Positive numbers by name."""
    if isinstance(numbers, str):
        return parse_numbers(numbers)
    if not isinstance(numbers, Mapping):
        raise MeshwrightError(f"{numbers!r} is not numbers by name, as 'X=2,Y=2' or {{'X': 2, 'Y': 2}}")
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise MeshwrightError(f"{name}={number!r}; it is a whole number from 1")
    return numbers


def _live(what: Any) -> Holdings | None:
    """The holdings of a single array; None for a tree."""
    if not hasattr(what, "shape") or not hasattr(what, "dtype"):
        return None
    from meshwright.viz.live import live_holdings

    return live_holdings(what)


def _torus(on: str | None, degrees: Mapping[str, int]) -> tuple[Sketch, ...]:
    """The mesh on a system, if one is given."""
    if on is None:
        return ()
    if not degrees:
        raise MeshwrightError(f"on={on!r} wants an array that lies on a mesh; this one lies on none")
    return (torus_sketch(parse_system(on), degrees),)
