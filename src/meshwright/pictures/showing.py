"""`show` and related functions: pictures of arrays, trees of arrays, plans and collectives."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import NoneType
from typing import Any

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import System, parse_system
from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.array_parser import parse_array
from meshwright.description.notation.legality import Sizes, check
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.options.values import read_system
from meshwright.pictures.answers.given import Numbers, read_numbers
from meshwright.pictures.drawings.arrays import array_sketch, every_sharding, gallery_sketch
from meshwright.pictures.drawings.collectives import DIGITS, Values, collective_sketch, run_collective
from meshwright.pictures.drawings.holdings import Holdings, holdings_of
from meshwright.pictures.drawings.memory import memory_sketch
from meshwright.pictures.drawings.rings import ring_sketch, run_ring
from meshwright.pictures.drawings.torus import device_coordinates, torus_sketch
from meshwright.pictures.panels import Sketch
from meshwright.pictures.picture import Picture
from meshwright.planning.files import is_run_directory
from meshwright.planning.plan import Plan, is_plan_file, read_plan
from meshwright.record import Kind
from meshwright.units import show_degrees


def show(
    what: Any,
    *,
    mesh: Numbers | MeshShape | None = None,
    dims: Numbers | None = None,
    dtype: str = "bf16",
    every: bool = False,
    on: str | System | None = None,
) -> Picture:
    """Return a picture of each device's part of an array, or of the arrays of a tree or plan.

    Args:
      what: text in the notation, `A[I_X, J_Y]`, with `mesh`, `dims` and `dtype`; a live `jax.Array` of any rank and
          sharding; a tree of arrays, such as a model's parameters, shown as a table; or a plan (also of a
          function), a plan file or a run directory, shown as the memory of a device and a table of the plan's arrays.
      mesh: degrees by mesh axis.
      dims: sizes by dim.
      dtype: the array's dtype.
      every: draw all legal shardings of the array on the mesh.
      on: a system with a torus, such as `v5e:4x4`, on which the mesh is drawn too.

    Raises MeshwrightError if the sharding is not legal, or if an argument has no effect for this `what`.

      >>> picture = show("A[I_X, J_Y]", mesh="X=2,Y=2", dims="I=8,J=8")
    """
    on = None if on is None else str(read_system(on))
    if (plan := _plan_in_file(what)) is not None:
        what = plan
    if isinstance(what, str):
        array, sizes = read_text(what, mesh=mesh, dims=dims, dtype=dtype)
        holdings = holdings_of(array, sizes)
        sketch = gallery_sketch(array, sizes) if every else array_sketch(holdings)
        return Picture((sketch, *_torus(on, holdings)))
    if mesh is not None or dims is not None or every:
        raise MeshwrightError("mesh, dims and every go with text in the notation; a live array has a mesh and a shape")
    # Imported here, so that text in the notation is shown without JAX.
    from meshwright.pictures.live import live_holdings, plan_rows, program_rows, table_sketch, tree_rows
    from meshwright.proof.program_plans.plan import ProgramPlan

    if hasattr(what, "shape") and hasattr(what, "dtype"):
        holdings = live_holdings(what)
        return Picture((array_sketch(holdings), *_torus(on, holdings)))
    if on is not None:
        raise MeshwrightError(f"on={on!r} goes with one array; the arrays of a tree may be on several meshes")
    if isinstance(what, Plan):
        table = table_sketch(plan_rows(what), owner=f"{what.workload.model.name} on {what.mesh}, {what.hardware}")
        return Picture((memory_sketch(what.predicted.memory_bytes, what.system.usable_bytes), table))
    if isinstance(what, ProgramPlan):
        record = what.compiled or what.predicted
        table = table_sketch(program_rows(what), owner=f"{what.name} on {show_degrees(what.mesh)}, {what.system}")
        return Picture((memory_sketch(record.memory_bytes, what.system.usable_bytes), table))
    return Picture((table_sketch(tree_rows(what)),))


def _plan_in_file(what: Any) -> Plan | None:
    """Return the plan in a plan file or a run directory; None if `what` is something else."""
    if not isinstance(what, str | Path):
        return None
    if is_plan_file(what):
        return read_plan(Path(what))
    if not is_run_directory(what):
        return None
    # Imported here: it loads JAX.
    from meshwright.execution.training.run_directory.run import read_config

    return read_config(Path(what)).plan


def show_data(array: ShardedArray, sizes: Sizes, *, every: bool = False, on: str | None = None) -> dict[str, Any]:
    """Return what `show` draws of an array as plain data: each device's shard.

    every: add all legal shardings. on: add the devices' positions on this system.
    """
    data = holdings_of(array, sizes).to_json()
    if every:
        data["shardings"] = [holdings_of(other, sizes).to_json() for other in every_sharding(array, sizes)]
    if on is not None:
        places = device_coordinates(lay_mesh(parse_system(on), sizes.degrees))
        data["torus"] = [place._asdict() | {"coordinates": dict(at)} for place, at in places.items()]
    return data


def show_collective(kind: Kind, values: Values = DIGITS, *, degree: int = 4) -> Picture:
    """Return a picture of a collective, run on `degree` devices: their values before and after.

    values: the values of the array, which is split evenly over the devices.
    """
    return Picture((collective_sketch(run_collective(kind, values, degree=degree)),))


def show_ring(kind: Kind, values: Values = DIGITS, *, degree: int = 4) -> Picture:
    """Return a picture of a ring collective: the values on each of `degree` devices before it and after each hop.

    values: the values of the array, which is split evenly over the devices.
    """
    return Picture((ring_sketch(run_ring(kind, values, degree=degree)),))


def read_text(
    text: str, *, mesh: Numbers | MeshShape | None, dims: Numbers | None, dtype: str
) -> tuple[ShardedArray, Sizes]:
    """Return the array in a text, and the sizes of its dims and mesh axes.

    text: in the notation, `A[I_X, J]`, or a spec of JAX, `P('X', None)`. mesh: degrees by axis. dims: sizes by dim.

    Raises:
        MeshwrightError: mesh or dims is None, a dim or an axis is unknown, or a degree does not divide a dim.
    """
    if mesh is None or dims is None:
        raise MeshwrightError(f"{text!r} needs a mesh and the sizes of its dims, as in mesh='X=2,Y=2', dims='I=8,J=8'")
    degrees, lengths = read_numbers(mesh), read_numbers(dims)
    array = parse_array(_from_spec(text, list(lengths)), axes=degrees)
    sizes = Sizes(degrees=degrees, dims=lengths, element_bytes=dtype_bytes(dtype))
    unknown = [dim for dim in sizes.dims if dim not in array.dims]
    if unknown:
        raise MeshwrightError(f"there is a size for {', '.join(unknown)}, which {array} does not have")
    check(array, sizes)
    return array, sizes


def _from_spec(text: str, dims: list[str]) -> str:
    """Return JAX's `P('x', None)` as `A[I_x, J]`, with these dims; any other text is unchanged."""
    if (match := re.fullmatch(r"(?:P|PartitionSpec)\((.*)\)", text.strip())) is None:
        return text
    try:
        entries: list[Any] = ast.literal_eval(f"[{match[1]}]")
    except (SyntaxError, ValueError):
        entries = [...]
    if not all(isinstance(entry, (str, tuple, NoneType)) for entry in entries):
        raise MeshwrightError(f"{text}: each entry is an axis in quotes, as 'x', several, as ('x', 'y'), or None")
    if len(entries) > len(dims):
        raise MeshwrightError(f"{text} has {len(entries)} entries, and sizes are said of {', '.join(dims)}")
    axes = [[entry] if isinstance(entry, str) else list(entry or ()) for entry in entries]
    axes += [[]] * (len(dims) - len(axes))
    split = [dim + (f"_{{{','.join(of)}}}" if of else "") for dim, of in zip(dims, axes, strict=True)]
    return f"A[{', '.join(split)}]"


def _torus(on: str | None, holdings: Holdings) -> tuple[Sketch, ...]:
    """Return the sketch of an array's mesh on the torus of the system `on`; () if that is None."""
    if on is None:
        return ()
    if not holdings.degrees:
        raise MeshwrightError(f"on={on!r} needs an array on a mesh; this one is on none")
    numbers = {tuple(holder.coordinates.values()): holder.device for holder in holdings.holders}
    return (torus_sketch(parse_system(on), holdings.degrees, numbers),)
