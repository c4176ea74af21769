"""Find the fewest sharding constraints in a user's files that make the function compile to a planned layout.

One constraint often suffices, because the compiler propagates it. The assignments that need one are found by trial: a
program is lowered with every assigned array constrained as planned, and then propagated with subsets of these
constraints, until each matmul is split as in the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

from meshwright.errors import MeshwrightError
from meshwright.proof.compiler.shardy import Matmul, matmul_shardings
from meshwright.proof.compiler.targets import platform_of
from meshwright.proof.inspection.meshes import Call, only_mesh
from meshwright.proof.program_plans.plan import ProgramPlan, mesh_for
from meshwright.proof.program_plans.sources import Assignment, mark_in, marking
from meshwright.proof.programs.apply import Applied, Gathered, constrain, layout_of, lower_leaves
from meshwright.proof.programs.classes import classes_of, find_classes
from meshwright.proof.programs.trace import Body, trace

MOST = 8
"""The maximum number of constraints of a fix."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """The constraints that make a function compile to its plan, or come closest.

    Attributes:
        plan: the plan.
        constraints: {assignment that needs a constraint: the spec to constrain its value to}.
        planned: the program's matmuls, with the shardings that they have in the plan.
        before: how many of `planned` are split as planned if only arguments and results are sharded as planned.
        after: the program's matmuls with `constraints`, with the shardings that they then have.
        skipped: assignments that run several times in the program, for arrays whose planned specs agree in no dim.
    """

    plan: ProgramPlan
    constraints: Mapping[Assignment, PartitionSpec]
    planned: tuple[Matmul, ...]
    before: int
    after: tuple[Matmul, ...]
    skipped: tuple[Assignment, ...]

    def is_proved(self, matmuls: Sequence[Matmul]) -> bool:
        """Whether the matmuls of a program, the one with the constraints, are all split as planned."""
        return count_equal(self.planned, matmuls) == len(self.planned)


def fewest_constraints(plan: ProgramPlan, call: Call, assignments: Sequence[Assignment]) -> Fix:
    """Return the fewest constraints, found greedily, with which each matmul is split as in the plan, or most are.

    Args:
        plan: a plan of the call's function.
        call: the function and its arguments; its modules must have been imported from marked `sources`.
        assignments: the marked assignments; the index of each is the number that `mark` gets.
    """
    marked = _Marked.of(plan, call)
    specs = marked.specs()
    marked.chosen = {number: spec for number, spec in specs.items() if spec is not None}
    lowered = marked.lower(platform_of(plan.system))
    planned = matmul_shardings(plan.abstract().lower(platform_of(plan.system)))

    def with_only(numbers: Iterable[int]) -> tuple[Matmul, ...]:
        kept = frozenset(numbers)

        def is_kept(scope: str) -> bool:
            found = mark_in(scope)
            return found is None or found[0] in kept

        return matmul_shardings(lowered, is_kept)

    def count(numbers: Iterable[int]) -> int:
        return count_equal(planned, with_only(numbers))

    before = count(())
    chosen, equal = list[int](), before
    while equal < len(planned) and len(chosen) < MOST:
        best = None
        for number in marked.chosen:
            if number not in chosen and (found := count((*chosen, number))) > equal:
                best, equal = number, found
            if equal == len(planned):
                break
        if best is None:
            break
        chosen.append(best)
    for number in tuple(chosen):
        if count(rest := [one for one in chosen if one != number]) >= equal:
            chosen = rest
    return Fix(
        plan=plan,
        constraints={assignments[number]: marked.chosen[number] for number in chosen},
        planned=planned,
        before=before,
        after=with_only(chosen),
        skipped=tuple(assignments[number] for number, spec in specs.items() if spec is None),
    )


def lower_call(plan: ProgramPlan, call: Call) -> Lowered:
    """Lower a function as it is, on the plan's mesh, with the plan's shardings of arguments and state."""
    applied = plan.abstract()
    with only_mesh(applied.mesh.abstract_mesh):
        traced = trace(call.function, *call.args, **call.kwargs).traced
        jitted = applied.jit(traced, lambda *leaves: jaxpr_as_fun(traced.jaxpr)(*leaves))
        return lower_leaves(jitted, traced, platform_of(plan.system))


def use_mesh(plan: ProgramPlan) -> AbstractContextManager[Any]:
    """Context in which a plan's mesh is in use, to run a file in which `edits` wrote sharding constraints.

    These constraints are specs without a mesh. The mesh is over devices of this process if there are enough, else
    abstract.
    """
    devices = jax.devices()[: plan.system.num_devices]
    if len(devices) < plan.system.num_devices:
        return only_mesh(plan.abstract().mesh.abstract_mesh)
    mesh = plan.apply(devices).mesh
    assert isinstance(mesh, Mesh)
    return jax.set_mesh(mesh)


def count_equal(planned: Sequence[Matmul], found: Sequence[Matmul]) -> int:
    """Return how many of `found` are split as in `planned`, in order. Raises if their numbers of matmuls differ."""
    if len(planned) != len(found):
        raise MeshwrightError(
            f"the function has {len(found)} matmuls on the plan's mesh, and {len(planned)} without a mesh"
        )
    return sum(one.result == other.result for one, other in zip(planned, found, strict=True))


@dataclass
class _Marked(Applied):
    """A function in its planned layout, in which only marked values (`sources`) are constrained.

    chosen: the spec of each value that is constrained, by the number of its mark.
    """

    chosen: dict[int, PartitionSpec]

    @classmethod
    def of(cls, plan: ProgramPlan, call: Call) -> _Marked:
        """Trace a function with its marks, in the layout of its plan."""
        mesh = mesh_for(plan.system, plan.layout)
        with marking(mesh):
            program = trace(call.function, *call.args, **call.kwargs)
        classes = classes_of(program)
        split = {one.atom: plan.table[name] for name, one in find_classes(classes, plan.table).items()}
        return cls(program, classes, layout_of(program, classes, split, plan.mesh, plan.store), mesh, {})

    def specs(self) -> dict[int, PartitionSpec | None]:
        """Return the planned spec of each marked value of the forward pass, by number, in order.

        If an assignment runs for several arrays, the spec has the entries that are equal for all; None if none is.
        """
        found: dict[int, list[PartitionSpec]] = defaultdict(list)
        self._add_specs(self.program.body, "", found)
        return {number: _common(specs) for number, specs in found.items()}

    def _add_specs(self, body: Body, scope: str, found: dict[int, list[PartitionSpec]]) -> None:
        for number, equation in enumerate(body.jaxpr.eqns):
            inner = f"{scope}/{equation.source_info.name_stack}"
            mark = _mark_of(equation)
            if mark is not None and "transpose(" not in inner:
                found[mark].append(self.spec(body.shapes[equation.outvars[0]]))
            for called in body.called[number]:
                self._add_specs(called, inner, found)

    def _equation(
        self, equation: Any, body: Body, called: tuple[Body, ...], given: list[Any], gathered: Gathered
    ) -> list[Any]:
        mark = _mark_of(equation)
        if mark is None:
            return self._run(equation, called, given)
        spec = self.chosen.get(mark)
        return given if spec is None else [constrain(given[0], NamedSharding(self.mesh, spec), equation)]


def _mark_of(equation: Any) -> int | None:
    """Return the number of the assignment that an equation marks; None for any other equation, and under `vmap`.

    Under `vmap`, the constrained array has more dims than the value that was marked.
    """
    if equation.primitive.name != "sharding_constraint":
        return None
    found = mark_in(str(equation.source_info.name_stack))
    return found[0] if found and found[1] == equation.outvars[0].aval.ndim else None


def _common(specs: Sequence[PartitionSpec]) -> PartitionSpec | None:
    """Return the spec of the entries that are equal in all specs, other dims unconstrained; None if no entry is."""
    if len({len(spec) for spec in specs}) > 1:
        return None
    entries = [each[0] if len(set(each)) == 1 else PartitionSpec.UNCONSTRAINED for each in zip(*specs, strict=True)]
    return None if all(entry is PartitionSpec.UNCONSTRAINED for entry in entries) else PartitionSpec(*entries)
