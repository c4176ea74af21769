"""Plan any JAX function: search its layouts, compile the best, and keep the one whose compiled program is fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from meshwright.description.hardware.system import System
from meshwright.errors import DoesNotFitError, MeshwrightError
from meshwright.mesh import MeshShape, parse_axes
from meshwright.options.values import MeshLike, SystemLike, read_system
from meshwright.planning.cost.rates.borrowed import borrowed_notes
from meshwright.proof.compiler.targets import device_kind, platform_of
from meshwright.proof.inspection.functions import inspect
from meshwright.proof.inspection.inspection import Inspection
from meshwright.proof.programs.apply import Applied
from meshwright.proof.programs.classes import DimClass, classes_of, table_by_name
from meshwright.proof.programs.layout import Layout
from meshwright.proof.programs.price import Priced
from meshwright.proof.programs.search import Found, axes_by_part, find_layouts
from meshwright.proof.programs.trace import Program, trace
from meshwright.proof.programs.work import work_of
from meshwright.record import Record
from meshwright.units import show_degrees

COMPILED = 3
"""How many layouts are compiled by default."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout of a program, with its predicted record, and the record of its compiled program if it was compiled.

    layout: None for the unchanged function, with the shardings of its arguments. wrong: why it does not compile; '' if
    it does or was not compiled.
    """

    layout: Layout | None
    predicted: Record | None = None
    compiled: Record | None = None
    wrong: str = ""

    @property
    def seconds(self) -> float | None:
        """The simulated step time of the compiled program on its hardware; None if there is no simulation."""
        return self.compiled.step_seconds if self.compiled else None

    @property
    def fits(self) -> bool:
        """Whether the compiled program fits a device's memory; if none was compiled, whether the prediction does."""
        known = self.compiled or self.predicted
        return not self.wrong and known is not None and known.fits is not False


@dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """A plan of a JAX function: a mesh, and the classes of equal dims (`DimClass`) that each of its axes splits.
    candidates: the compared layouts, the chosen one first. num_layouts: how many layouts were predicted. notes: limits
    of the plan.
    """

    name: str
    program: Program
    classes: tuple[DimClass, ...]
    system: System
    candidates: tuple[Candidate, ...]
    num_layouts: int
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[0]

    @property
    def layout(self) -> Layout:
        """The chosen layout."""
        assert self.best.layout is not None
        return self.best.layout

    @property
    def mesh(self) -> Mapping[str, int]:
        """The axes of the mesh and their degrees, outermost first."""
        return self.layout.degrees

    @cached_property
    def table(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes of each split class by name: the table argument of `meshwright.apply`."""
        return table_by_name(self.classes, self.layout.table)

    @property
    def store(self) -> tuple[str, ...]:
        """The mesh axes that split the state between steps: the `store` argument of `meshwright.apply`."""
        return self.layout.store

    @property
    def predicted(self) -> Record:
        """The predicted record of the chosen layout."""
        assert self.best.predicted is not None
        return self.best.predicted

    @property
    def compiled(self) -> Record | None:
        """The record of its compiled program, with a simulated step on TPUs and GPUs; None if it was not compiled."""
        return self.best.compiled

    def apply(self, devices: Sequence[Any] | None = None) -> Applied:
        """Return the function in the planned layout, on devices of this process (default: all)."""
        degrees = self.mesh
        mesh = jax.make_mesh(
            tuple(degrees.values()), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees), devices=devices
        )
        return Applied(self.program, self.classes, self.layout, mesh)

    def abstract(self) -> Applied:
        """Return the function in the planned layout on an abstract mesh, to lower it without its hardware."""
        return Applied(self.program, self.classes, self.layout, mesh_for(self.system, self.layout))

    def shardings(self, devices: Sequence[Any] | None = None) -> Any:
        """Return the sharding of each argument, as a pair of trees `(args, kwargs)`."""
        return self.apply(devices).shardings

    def __str__(self) -> str:
        """The screen of `meshwright plan module:function`, as plain text."""
        from meshwright.pictures.screens.programs import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        return f"<Plan of {self.name} on {self.system}: {show_degrees(self.mesh)}, {self.predicted}>"

    def to_json(self) -> dict[str, Any]:
        """Return this plan as plain data."""
        return {
            "name": self.name,
            "hardware": str(self.system),
            "mesh": dict(self.mesh),
            "table": {name: list(axes) for name, axes in self.table.items()},
            "store": list(self.store),
            "classes": [
                {"name": one.name, "size": one.size, "members": list(one.members), "barred": one.barred}
                for one in self.classes
            ],
            "predicted": self.predicted.to_json(),
            "compiled": self.compiled.to_json() if self.compiled else None,
            "notes": list(self.notes),
        }


def plan_program(
    function: Callable[..., Any],
    *args: Any,
    on: SystemLike,
    mesh: MeshLike | Mapping[str, int] | None = None,
    num_compiled: int = COMPILED,
    **kwargs: Any,
) -> ProgramPlan:
    """Plan a JAX function: find the mesh, and the dims that each axis splits, with the fastest compiled program.

    Args:
        function: a train step or any other function that JAX traces; jitted or not.
        args: its arguments, arrays or abstract values; shapes and dtypes are read. If they have shardings over several
            devices, the unchanged function is compiled and compared too.
        on: the hardware, as `v5e:4x4`, which need not be present.
        mesh: axes and degrees, as `data=4,model=4`; default: every mesh of all devices is tried.
        num_compiled: number of strategies whose best layout is compiled; 0 for none. Layouts that mix strategies in
            other ways are compiled too if they are predicted to be faster. Data parallelism is always compiled, with a
            replicated and with a split state, so that the chosen layout is never slower.
        kwargs: its arguments by name.

    Raises:
        MeshwrightError: the function does not trace, or none of its dims can be split over all devices.
    """
    system = read_system(on)
    if isinstance(num_compiled, bool) or not isinstance(num_compiled, int) or num_compiled < 0:
        raise MeshwrightError(f"num_compiled is {num_compiled!r}; it is a whole number, 0 to compile none")
    program = trace(function, *args, **kwargs)
    classes = classes_of(program)
    priced = Priced(program, work_of(program, is_tpu=system.chip.kind == "tpu"), system)
    degrees = None if mesh is None else _degrees(mesh, system)
    found = find_layouts(priced, classes, degrees)
    name = getattr(function, "__name__", "") or program.traced.fun_name
    candidates = [Candidate(layout=one.layout, predicted=one.record) for one in found]
    if num_compiled:
        chosen = _to_compile(found, candidates, num_compiled)
        tried = [compiled_candidate(candidate, program, classes, system) for candidate in chosen]
        own = _as_given(function, args, kwargs, system)
        candidates = _ranked([*tried, *own], candidates)
    best = candidates[0]
    if best.layout is None or not best.fits:
        # The unchanged function was fastest: it is listed next to the best layout, for comparison.
        chosen = next(one for one in candidates if one.layout is not None)
        candidates = [chosen, *(one for one in candidates if one is not chosen)]
    return ProgramPlan(
        name=name,
        program=program,
        classes=classes,
        system=system,
        candidates=tuple(candidates),
        num_layouts=len(found),
        notes=(
            *_notes(priced, candidates[0]),
            *_part_notes(priced, classes, candidates[0].layout),
            *_whole_notes(program, candidates[0].layout),
        ),
    )


def _degrees(mesh: MeshLike | Mapping[str, int], system: System) -> dict[str, int]:
    if isinstance(mesh, MeshShape):
        degrees = {axis: degree for axis, degree in mesh.layout.items() if degree > 1}
    else:
        degrees = parse_axes(mesh) if isinstance(mesh, str) else dict(mesh)
    if (count := math.prod(degrees.values())) != system.num_devices:
        raise MeshwrightError(f"mesh {mesh} has {count} devices, {system} {system.num_devices}")
    return degrees


def _to_compile(found: list[Found], candidates: list[Candidate], count: int) -> list[Candidate]:
    """Return the candidates to compile: the best of each of `count` strategies, and data parallelism.

    Layouts that split the same dims are one strategy, on whatever mesh. Data parallelism is compiled with a replicated
    and with a split state. Varied layouts (`Found.is_varied`) are compiled only if they are predicted to be faster than
    all others, as their price is less certain: the best with a split state, the best without, and those equally fast.

    found: all layouts, best first. candidates: the same layouts, as candidates.
    """
    chosen: dict[int, Candidate] = {}
    strategies: set[frozenset[tuple[tuple[int, ...], bool]]] = set()
    varied: dict[bool, float] = {}
    for place, one in enumerate(found):
        strategy = frozenset((axis.atoms, axis.is_stored) for axis in one.layout.axes if axis.degree > 1)
        names = [axis.name for axis in one.layout.axes if axis.degree > 1]
        is_data_parallel = names in (["dp"], ["fsdp"])
        if not one.record.fits and place:
            continue
        if one.is_varied:
            is_stored = any(axis.is_stored for axis in one.layout.axes)
            seconds = round(one.record.step_seconds or 0.0, 9)
            if not strategies and varied.setdefault(is_stored, seconds) == seconds:
                chosen[place] = candidates[place]
            continue
        if (len(strategies) < count and strategy not in strategies) or is_data_parallel:
            strategies.add(strategy)
            chosen[place] = candidates[place]
    return list(chosen.values())


def mesh_for(system: System, layout: Layout) -> AbstractMesh:
    """Return the mesh of a layout on hardware that need not be present."""
    kind, cores = device_kind(system)
    return AbstractMesh(
        tuple(layout.degrees.values()),
        tuple(layout.degrees),
        axis_types=(AxisType.Auto,) * len(layout.degrees),
        abstract_device=AbstractDevice(device_kind=kind, num_cores=cores, platform=platform_of(system)),
    )


def compiled_candidate(
    candidate: Candidate, program: Program, classes: tuple[DimClass, ...], system: System
) -> Candidate:
    """Return a candidate with the record of its compiled program, or the reason why it does not compile."""
    assert candidate.layout is not None
    mesh = mesh_for(system, candidate.layout)
    lowered = Applied(program, classes, candidate.layout, mesh).lower(platform_of(system))
    return _with_program(candidate, lambda: inspect(lowered, mesh=dict(mesh.shape), on=system))


def _with_program(candidate: Candidate, inspected: Callable[[], Inspection]) -> Candidate:
    try:
        return replace(candidate, compiled=inspected().record)
    except DoesNotFitError:
        return replace(candidate, wrong="does not fit, says its compiler")


def _as_given(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], system: System) -> list[Candidate]:
    """Return the function with its arguments' shardings as a candidate; [] if they are on one device."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((args, kwargs))]
    meshes = [one.mesh for one in shardings if isinstance(one, NamedSharding) and one.mesh.size == system.num_devices]
    if not meshes or system.num_devices == 1:
        return []
    step = function if hasattr(function, "lower") else jax.jit(function)
    return [_with_program(Candidate(layout=None), lambda: inspect(step, *args, on=system, **kwargs))]


def _ranked(tried: list[Candidate], candidates: list[Candidate]) -> list[Candidate]:
    """Return the compiled candidates (`tried`), fitting ones first, then fastest first; after them all others."""
    tried.sort(key=lambda one: (not one.fits, one.seconds is None, one.seconds or 0.0))
    layouts = {id(one.layout) for one in tried if one.layout is not None}
    return [*tried, *(one for one in candidates if id(one.layout) not in layouts)]


def _part_notes(priced: Priced, classes: tuple[DimClass, ...], layout: Layout | None) -> Iterator[str]:
    """Yield a note on each axis that splits one dim in a part of the program and another dim elsewhere."""
    names = {one.atom: one.name for one in classes}
    for axis in axes_by_part(priced.work, layout) if layout else ():
        order = ", ".join(names[atom] for atom in axis.atoms if atom in names)
        yield f"{axis.name} splits an array along the first dim that it has of {order}"


def _whole_notes(program: Program, layout: Layout | None) -> Iterator[str]:
    """Yield a note on arguments that stay whole because the table splits a part of a dim, but not its leading part."""
    if layout is None:
        return
    whole = [
        f"{path}:{place}"
        for path, shape in program.arguments
        for place, dim in enumerate(shape)
        if layout.is_open(program.dims.atoms(dim))
    ]
    if whole:
        more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
        yield (
            f"{whole[0]}{more} is whole on each device in use: what is split is not the leading part of the dim, as"
            " heads in [3, heads, head_dim]; with that part first, as [heads, 3, head_dim], it would be split"
        )


def _notes(priced: Priced, best: Candidate) -> tuple[str, ...]:
    """Return notes on a plan: that nothing fits, and the parts of the program that are not priced exactly."""
    work, notes = priced.work, [*borrowed_notes(priced.system)]
    if not best.fits:
        notes.append("no layout fits; the first takes the least memory")
    notes.extend(
        f"{name} is called {times} times; what it does inside is not priced" for name, times in work.opaque.items()
    )
    if work.ragged and priced.system.chip.kind != "tpu":
        notes.append(
            "matmuls of rows sorted by group (ragged_dot) are priced for these rows; XLA multiplies more on GPUs"
            " and CPUs: twice the step and three times the memory on an H200 (benchmarks/foreign_steps.py)"
        )
    if work.whiles:
        notes.append("a while loop is priced as one turn: how many it takes depends on data")
    return tuple(notes)
