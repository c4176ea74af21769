"""`meshwright.apply`: the same function, with its arrays laid out by a table from classes of dims to mesh axes.

Shardings of arguments alone are not enough: the compiler often shards activations like the weights they are multiplied
by, then gathers them again. So the result of every matmul and convolution is constrained by the table, in loops and
under `jax.checkpoint` too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Traced

from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.carry import mesh_of
from meshwright.options.values import MeshLike, read_mesh
from meshwright.proof.programs.arrays import is_array
from meshwright.proof.programs.classes import DimClass, classes_of, find_classes
from meshwright.proof.programs.flat import Atoms, Value
from meshwright.proof.programs.layout import Axis, Layout, Sizes, dims_at_rest, of_any_order
from meshwright.proof.programs.products import moves, product_of
from meshwright.proof.programs.rules import MATMULS, Shape, uses
from meshwright.proof.programs.trace import PLAIN_CALLS, Body, Program, called_program, closed, scan_counts, trace

Table = Mapping[str, str | Sequence[str]]
"""Mesh axes by class of dims: `{"batch": "fsdp", "mlp": ("tp",)}`."""


def apply(
    function: Callable[..., Any],
    table: Table,
    mesh: Mesh | MeshLike,
    *args: Any,
    store: str | Sequence[str] = (),
    **kwargs: Any,
) -> Applied:
    """Return a function with its arrays laid out on a mesh by a table. Nothing is compiled or run.

    Args:
        function: a train step, a loss or any other function that JAX traces; jitted or not.
        table: the mesh axes of classes of dims. A class is named as `Applied.classes` prints it, or by one of its
            members: `"params.mlp.kernel:1"`, also with `*`. Classes missing from the table are not split. Of classes
            with the same axis, an array is split along the one that comes first in the table: `{"mlp": "tp", "batch":
            ("dp", "tp")}` makes the MLP tensor parallel and all else data parallel.
        mesh: a `jax.sharding.Mesh` with auto axes, or `fsdp=2,tp=4`, a mapping or a `MeshShape` for all devices.
        args: the function's arguments, arrays or abstract values; only their shapes and dtypes are read.
        store: mesh axes that further split the state at rest (FSDP, ZeRO-3), each leaf along its largest dim that they
            divide. State: the arguments that the function returns updated, i.e. parameters and moments.
        kwargs: the function's arguments by name.

    Returns:
        A function with the same arguments. State is returned with its input sharding, so that a second call does not
        recompile.

    Raises:
        MeshwrightError: a key of the table names no class of dims, an axis is not in the mesh, or its degree does not
            divide a dim.
    """
    if not isinstance(mesh, Mesh):
        mesh = mesh_of(read_mesh(mesh, jax.device_count()), None, "auto")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise MeshwrightError("the mesh has explicit axes; a table is applied on auto axes: plan.mesh(types='auto')")
    program = trace(function, *args, **kwargs)
    classes = classes_of(program)
    chosen: dict[int, tuple[str, ...]] = {}
    for key, one in find_classes(classes, table).items():
        axes = _axes(table[key], mesh, key)
        if one.size % (degree := math.prod(mesh.shape[axis] for axis in axes)):
            raise MeshwrightError(
                f"{key!r} has {one.size} elements, which {','.join(axes)} of degree {degree} does not divide"
            )
        chosen[one.atom] = axes
    layout = layout_of(program, classes, chosen, mesh.shape, _axes(store, mesh, "store"))
    return Applied(program, classes, layout, mesh)


def layout_of(
    program: Program,
    classes: tuple[DimClass, ...],
    split: Mapping[int, tuple[str, ...]],
    degrees: Mapping[str, int],
    store: Sequence[str],
) -> Layout:
    """Return the layout of a program on mesh axes of these degrees.

    split: {`DimClass.atom`: the axes that split the class}. store: axes that split the state at rest.
    """
    axes = tuple(
        Axis(name, degree, tuple(atom for atom, names in split.items() if name in names), name in store)
        for name, degree in degrees.items()
    )
    return Layout(axes, Sizes(program), frozenset(one.atom for one in classes if one.barred))


def _axes(given: str | Sequence[str], mesh: Mesh, what: str) -> tuple[str, ...]:
    """Return mesh axes as a tuple, from text with commas or a sequence. what: names the option in errors."""
    axes = tuple(axis.strip() for axis in given.split(",") if axis.strip()) if isinstance(given, str) else tuple(given)
    for axis in axes:
        if axis not in mesh.shape:
            raise MeshwrightError(f"{what!r} is for mesh axis {axis!r}; the mesh has {', '.join(mesh.shape)}")
    return axes


Gathered = dict[tuple[Any, tuple[str, ...]], Any]
"""{(variable, mesh axes): the variable's value, constrained to be whole along these axes}."""


@dataclass
class Applied:
    """A function whose arrays are laid out by a table. It is called like the function itself."""

    program: Program
    classes: tuple[DimClass, ...]
    layout: Layout
    mesh: Mesh | AbstractMesh

    def __post_init__(self) -> None:
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            raise MeshwrightError(
                "the function was traced in jax.set_mesh of a mesh with explicit axes, and its ops are of that mesh:"
                " plan or apply it outside of jax.set_mesh, or in a mesh with auto axes"
            )

    def __str__(self) -> str:
        """The classes of dims, each with its mesh axes."""
        lines = [f"{','.join(self.layout.table.get(one.atom, ())) or '-':<10}{one}" for one in self.classes]
        return "\n".join(lines)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; arguments with other shardings are resharded first."""
        leaves = jax.tree.leaves((args, kwargs))
        if len(leaves) > len(self._jaxpr.invars):
            leaves = [leaf for leaf in leaves if is_array(leaf)]
        if [jnp.shape(leaf) for leaf in leaves] != [var.aval.shape for var in self._jaxpr.invars]:
            raise MeshwrightError(
                "the arguments have other shapes than those that the table was applied for, or some are static; apply"
                " it anew for other shapes, and bind static arguments with functools.partial"
            )
        return self.program.returned.whole(self.jitted(*leaves))

    @cached_property
    def jitted(self) -> Any:
        """The jitted function. It takes the leaves of all arguments, positional arguments first."""
        body, traced = self.program.body, self.program.traced
        return self.jit(traced, lambda *leaves: self._evaluate(body, traced.jaxpr.consts, leaves))

    def jit(self, traced: Traced, flat: Callable[..., list[Any]]) -> Any:
        """Jit `flat`, which takes the leaves of `traced`'s arguments, with `traced`'s name and donation.

        The shardings are `in_shardings` and `out_shardings`.
        """
        flat.__name__ = traced.fun_name
        donated = [one.donated for one in jax.tree.leaves(traced.args_info)]
        return jax.jit(
            flat,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=tuple(number for number, is_donated in enumerate(donated) if is_donated),
        )

    def lower(self, platform: str | None = None) -> Any:
        """Lower the function (`jax.stages.Lowered`) for the mesh's devices, or for a platform that is not present."""
        return lower_leaves(self.jitted, self.program.traced, platform)

    @property
    def shardings(self) -> Any:
        """The sharding of each argument, as a pair of trees `(args, kwargs)`."""
        structure = jax.tree.structure(self.program.traced.args_info)
        return jax.tree.unflatten(structure, self.in_shardings)

    @property
    def _jaxpr(self) -> Any:
        return self.program.body.jaxpr

    @cached_property
    def in_shardings(self) -> list[NamedSharding]:
        """The sharding of each leaf of the arguments, positional arguments first."""
        return [
            NamedSharding(
                self.mesh, self._stored(shape, self._dims(shape)) if number in self.program.state else self.spec(shape)
            )
            for number, (_, shape) in enumerate(self.program.arguments)
        ]

    @cached_property
    def out_shardings(self) -> list[NamedSharding | None]:
        """The sharding of each leaf of the results; None for results that are not state: the compiler decides."""
        found: list[NamedSharding | None] = [None] * len(self.program.results)
        for argument, result in self.program.state.items():
            found[result] = self.in_shardings[argument]
        return found

    def _dims(self, shape: Any) -> Atoms:
        return tuple(self.program.dims.atoms(dim) for dim in shape)

    def spec(self, shape: Any) -> PartitionSpec:
        """Return the partition spec of an array's dims by the table."""
        dims = self._dims(shape)
        entries = zip(dims, self.layout.split(dims), strict=True)
        return PartitionSpec(
            *(PartitionSpec.UNCONSTRAINED if self.layout.is_open(dim) else axes or None for dim, axes in entries)
        )

    def _stored(self, shape: Any, leaf: Atoms) -> PartitionSpec:
        """Return the spec of a state leaf between steps: that of the table, with `store` on the largest unsplit dim.

        shape: the dims of the leaf or its gradient, which may be transposed or reshaped. leaf: the leaf's own dims.
        """
        dims = self._dims(shape)
        entries = [axes or None for axes in self.layout.split(dims)]
        if stored := self.layout.stored(leaf):
            first = leaf[stored[0]][0]
            for place in [place for place, dim in enumerate(dims) if dim[:1] == (first,)][:1]:
                entries[place] = stored[1]
        return PartitionSpec(*entries)

    def _evaluate(self, body: Body, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Evaluate a program, with a constraint on the result of each matmul and convolution."""
        values: dict[Any, Any] = dict(zip(body.jaxpr.constvars, consts, strict=True))
        values.update(zip(body.jaxpr.invars, operands, strict=True))
        gathered: Gathered = {}
        for number, equation in enumerate(body.jaxpr.eqns):
            given = [var.val if isinstance(var, Literal) else values[var] for var in equation.invars]
            results = self._equation(equation, body, body.called[number], given, gathered)
            values.update(zip(equation.outvars, results, strict=True))
        return [var.val if isinstance(var, Literal) else values[var] for var in body.jaxpr.outvars]

    def _equation(
        self, equation: Any, body: Body, called: tuple[Body, ...], given: list[Any], gathered: Gathered
    ) -> list[Any]:
        """Evaluate an equation, with constraints on its operands and its result; return its results.

        called: the programs that it calls. given: its operands. gathered: values that earlier equations constrained.
        """
        used = uses(equation)
        if equation.primitive.name == "scan":
            # Loop-invariant values are gathered once, before the loop.
            used = [place < scan_counts(equation.params)[0] for place in range(len(given))]
        given = [
            self._gathered(equation, body.shape(var), value) if is_used else value
            for var, value, is_used in zip(equation.invars, given, used, strict=True)
        ]
        if equation.primitive.name in MATMULS:
            given[:2] = self._with_whole_dims(equation, body, given[:2], gathered)
        results = self._run(equation, called, given)
        if equation.primitive.name in MATMULS or equation.primitive.name == "gather":
            # The gradient of a parameter that `store` splits is a partial sum: in the stored layout the compiler
            # reduce-scatters it.
            shape = body.shapes[equation.outvars[0]]
            leaf = self._of_state.get(of_any_order(self._dims(shape)))
            is_gradient = self._is_partial(equation, body)
            spec = self._stored(shape, leaf) if leaf is not None and is_gradient else self.spec(shape)
            return [constrain(results[0], NamedSharding(self.mesh, spec), equation)]
        return results

    def _run(self, equation: Any, called: tuple[Body, ...], given: list[Any]) -> list[Any]:
        """Evaluate an equation on operands (`given`), after adding constraints to the programs that it calls."""
        name, parameters = equation.primitive.name, dict(equation.params)
        if name in (*PLAIN_CALLS, "shard_map") and (inner := called_program(equation)):
            return self._evaluate(called[0], inner.consts, given)
        if name == "scan":
            parameters["jaxpr"] = self._rewritten(called[0], parameters["jaxpr"])
        elif name == "while":
            for key, body in zip(("cond_jaxpr", "body_jaxpr"), called, strict=True):
                parameters[key] = self._rewritten(body, parameters[key])
        elif name == "cond":
            branches = zip(called, parameters["branches"], strict=True)
            parameters["branches"] = tuple(self._rewritten(body, branch) for body, branch in branches)
        elif name in ("remat2", "checkpoint"):
            parameters["jaxpr"] = self._rewritten(called[0], closed(parameters["jaxpr"])).jaxpr
        # As a program of this equation alone, so that it keeps its source line and its scope.
        values = [
            (var, value) for var, value in zip(equation.invars, given, strict=True) if not isinstance(var, Literal)
        ]
        single = Jaxpr(
            (),
            [var for var, _ in values],
            equation.outvars,
            [equation.replace(params=parameters)],
            equation.effects,
            self._jaxpr.debug_info,
        )
        return jaxpr_as_fun(closed(single))(*(value for _, value in values))

    def _rewritten(self, body: Body, program: ClosedJaxpr) -> ClosedJaxpr:
        """Return a called program with constraints on its matmuls added."""
        avals = [
            jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type)
            for var in program.jaxpr.invars
        ]
        return jax.make_jaxpr(lambda *given: self._evaluate(body, program.consts, given))(*avals)

    @cached_property
    def _of_state(self) -> dict[tuple[int, ...], Atoms]:
        """The dims of the state's leaves, and of their slices in a loop over layers, as from `layout.dims_at_rest`."""
        return dims_at_rest(self.program, self.layout.barred)

    def _gathered(self, equation: Any, shape: Shape, value: Any) -> Any:
        """Return an operand; a parameter that `store` splits is constrained to the table's layout (all-gathered).

        Without this, the compiler may split the matmul like the stored parameter and communicate activations instead.
        """
        dims = self._dims(shape)
        if not self.layout.stored_over(dims) or of_any_order(dims) not in self._of_state:
            return value
        return constrain(value, NamedSharding(self.mesh, self.spec(shape)), equation)

    def _with_whole_dims(self, equation: Any, body: Body, operands: list[Any], gathered: Gathered) -> list[Any]:
        """Return a matmul's operands, constrained to be whole along axes that split another dim of the result.

        Without this, the compiler may gather the operand over all axes instead of only these. It does not notice that
        two constraints of a value are equal, so one constraint serves all matmuls that read the value (`gathered`).
        """
        variables = equation.invars[:2]
        *values, result = (Value(self._dims(body.shape(var)), 0.0) for var in (*variables, equation.outvars[0]))
        lost = moves(product_of(equation, "forward", values, result), self.layout).gathered
        found = []
        for var, value, axes in zip(variables, operands, lost, strict=True):
            if axes and (var, axes) not in gathered:
                entries = (
                    tuple(axis for axis in entry if axis not in axes) or None if isinstance(entry, tuple) else entry
                    for entry in self.spec(body.shape(var))
                )
                sharding = NamedSharding(self.mesh, PartitionSpec(*entries))
                gathered[(var, axes)] = constrain(value, sharding, equation)
            found.append(gathered[(var, axes)] if axes else value)
        return found

    def _is_partial(self, equation: Any, body: Body) -> bool:
        """Whether a mesh axis splits a dim that the equation sums over."""
        kept = {atom for dim in body.shapes[equation.outvars[0]] for atom in self.program.dims.atoms(dim)}
        operands = {atom for var in equation.invars for dim in body.shape(var) for atom in self.program.dims.atoms(dim)}
        return any(self.layout.table.get(atom) for atom in operands - kept)


def lower_leaves(jitted: Any, traced: Traced, platform: str | None) -> Any:
    """Lower `jitted`, which takes the leaves of `traced`'s arguments. platform: None for that of its mesh."""
    abstract = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.jaxpr.in_avals)
    return jitted.trace(*abstract).lower(lowering_platforms=None if platform is None else (platform,))


def constrain(value: Any, sharding: NamedSharding, equation: Any) -> Any:
    """Constrain a value. The constraint gets the source line and name scope of an equation, for HLO metadata."""
    closed = jax.make_jaxpr(lambda one: jax.lax.with_sharding_constraint(one, sharding))(value)
    (constraint,) = closed.jaxpr.eqns
    there = closed.jaxpr.replace(eqns=[constraint.replace(source_info=equation.source_info)])
    return jaxpr_as_fun(ClosedJaxpr(there, closed.consts))(value)[0]
