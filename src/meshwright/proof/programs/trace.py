"""Trace a function, and unify the dims of all its values, also in the programs that it calls.

A called program is walked once per call, so that two calls of one function do not unite unrelated dims.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.stages import Traced

from meshwright.proof.programs.arrays import Tree, trace_arrays
from meshwright.proof.programs.dims import Dims
from meshwright.proof.programs.rules import RULES, Shape, fresh, new_results

TRIP = "layers and steps of a loop run one after the other"
"""The reason shown where a table splits the leading dim of an array that `scan` iterates over."""

PLAIN_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # JAX 0.12 names closed_call so.
    "core_call": "call_jaxpr",
}
"""The calls of `CALLS` that mean no more than the program that they call, so that it may stand in their place."""

CALLS = PLAIN_CALLS | {
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
}
"""Primitives that call one program with their own operands, and the name of the parameter with that program."""


def called_program(equation: Any) -> ClosedJaxpr | None:
    """Return the program that an equation calls with its own operands; None for no call, loops and branches.

    A `shard_map` over one device counts as a call: code written for any mesh runs so on a mesh of one device.
    """
    name, parameters = equation.primitive.name, equation.params
    if name == "shard_map" and parameters["mesh"].size == 1 and not parameters["jaxpr"].effects:
        return closed(parameters["jaxpr"])
    return closed(parameters[CALLS[name]]) if name in CALLS else None


def scan_counts(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `scan` are constants, and how many are carried between iterations.

    JAX 0.10 stores the numbers, JAX 0.12 (checked with 0.12.0.1) a tree of the operands.
    """
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    consts, carried, _ = parameters["ft_in"].unpack()
    return len(consts), len(carried)


def closed(jaxpr: Jaxpr) -> ClosedJaxpr:
    """Return a program without constants as a `ClosedJaxpr`, which it already is from JAX 0.12 on."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


@dataclass
class Body:
    """One program (jaxpr) of a traced function: the dims of its values, and the programs that its equations call."""

    jaxpr: Jaxpr
    shapes: dict[Var, Shape] = field(default_factory=dict)
    called: dict[int, tuple[Body, ...]] = field(default_factory=dict)
    """By the number of the equation that calls them."""

    def shape(self, value: Any) -> Shape:
        """Return the dims of a value; a literal has none."""
        return () if isinstance(value, Literal) else self.shapes[value]


@dataclass
class Program:
    """A traced function with the dims of all its values.

    arguments, results: the path of each leaf, as `params.kernel`, and its dims. state: {index of an argument: index of
    the result that is its new value}, of all arguments that the function updates. returned: the tree that it returns.
    """

    traced: Traced
    body: Body
    dims: Dims
    arguments: tuple[tuple[str, Shape], ...]
    results: tuple[tuple[str, Shape], ...]
    state: Mapping[int, int]
    returned: Tree


def trace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """Trace a function on arrays or abstract values, and unify the dims of its values.

    Args:
        function: any function that JAX traces, jitted or not.
        args: its positional arguments; only shapes and dtypes of arrays are used.
        kwargs: its keyword arguments.
    """
    traced, tree = trace_arrays(function, args, kwargs)
    closed, dims = traced.jaxpr, Dims()
    inputs = [fresh(aval.shape, dims) for aval in closed.in_avals]
    body = _Walk(dims).body(closed, inputs)
    outputs = [body.shape(var) for var in closed.jaxpr.outvars]
    called, _ = jax.tree_util.tree_flatten_with_path(traced.args_info)
    positional = _parameters(function)
    names = [_path(path, positional) for path, _ in called]
    returned, _ = jax.tree_util.tree_flatten_with_path(traced.out_info)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in returned]
    state = _state(zip(names, closed.in_avals, strict=True), zip(paths, closed.out_avals, strict=True))
    arguments, results = (tuple(zip(*pair, strict=True)) for pair in ((names, inputs), (paths, outputs)))
    return Program(traced, body, dims, arguments, results, state, tree)


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters; [] if its signature cannot be read."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _path(path: Sequence[Any], positional: list[str]) -> str:
    """Return the path of a leaf of `(args, kwargs)`, beginning with the parameter's name: `state.params.w`."""
    kind, first, *rest = path
    if kind.idx == 0 and first.idx < len(positional):
        return ".".join([positional[first.idx], *(jax.tree_util.keystr((key,), simple=True) for key in rest)])
    return jax.tree_util.keystr((first, *rest), simple=True, separator=".")


def _state(arguments: Iterable[tuple[str, Any]], results: Iterable[tuple[str, Any]]) -> dict[int, int]:
    """Return {index of an argument: index of the result that is its new value}.

    A result is the new value of an argument if their shapes and dtypes are equal and their paths end alike. For a step
    `(state, batch) -> (state, loss)` these are the leaves of `state`.
    """
    free: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, (path, aval) in enumerate(arguments):
        for end in _ends(path):
            free[(end, aval.shape, aval.dtype)].append(number)
    found: dict[int, int] = {}
    for number, (path, aval) in enumerate(results):
        for end in _ends(path):
            same = [one for one in free.get((end, aval.shape, aval.dtype), ()) if one not in found]
            if same:
                found[same[0]] = number
                break
    return found


def _ends(path: str) -> list[str]:
    """Return the suffixes of a path, longest first: without its first part, then without the first two, …."""
    parts = path.split(".")
    return [".".join(parts[start:]) for start in range(min(1, len(parts) - 1), len(parts))]


class _Walk:
    """Walks the equations of a program and of the programs that it calls."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims

    def body(self, program: ClosedJaxpr | Jaxpr, inputs: Sequence[Shape]) -> Body:
        """Return a program with the dims of its values. inputs: the dims of its arguments."""
        jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
        body = Body(jaxpr)
        for var in jaxpr.constvars:
            aval: Any = var.aval
            body.shapes[var] = fresh(aval.shape, self.dims)
        body.shapes.update(zip(jaxpr.invars, inputs, strict=True))
        for number, equation in enumerate(jaxpr.eqns):
            operands = [body.shape(var) for var in equation.invars]
            body.called[number], results = self._equation(equation, operands)
            body.shapes.update(zip(equation.outvars, results, strict=True))
        return body

    def _equation(self, equation: Any, operands: list[Shape]) -> tuple[tuple[Body, ...], list[Shape]]:
        """Return the programs that an equation calls, and the dims of its results."""
        name, parameters = equation.primitive.name, equation.params
        if (program := called_program(equation)) is not None:
            body = self.body(program, operands)
            return (body,), [body.shape(var) for var in body.jaxpr.outvars]
        if name == "scan":
            return self._scan(parameters, operands)
        if name == "while":
            return self._while(parameters, operands)
        if name == "cond":
            bodies = tuple(self.body(branch, operands[1:]) for branch in parameters["branches"])
            results = [[body.shape(var) for var in body.jaxpr.outvars] for body in bodies]
            for others in results[1:]:
                self._tie(results[0], others)
            return bodies, results[0]
        return (), RULES.get(name, new_results)(equation, operands, self.dims)

    def _scan(self, parameters: Mapping[str, Any], operands: list[Shape]) -> tuple[tuple[Body, ...], list[Shape]]:
        (consts, carried), length = scan_counts(parameters), parameters["length"]
        steps = operands[consts + carried :]
        for one in steps:
            self.dims.bar(one[0], TRIP)
        body = self.body(parameters["jaxpr"], [*operands[: consts + carried], *(one[1:] for one in steps)])
        results = [body.shape(var) for var in body.jaxpr.outvars]
        self._tie(operands[consts : consts + carried], results[:carried])
        count = self.dims.new(length)
        self.dims.bar(count, TRIP)
        return (body,), [*operands[consts : consts + carried], *((count, *one) for one in results[carried:])]

    def _while(self, parameters: Mapping[str, Any], operands: list[Shape]) -> tuple[tuple[Body, ...], list[Shape]]:
        first, second = parameters["cond_nconsts"], parameters["body_nconsts"]
        carried = operands[first + second :]
        cond = self.body(parameters["cond_jaxpr"], [*operands[:first], *carried])
        body = self.body(parameters["body_jaxpr"], operands[first:])
        self._tie(carried, [body.shape(var) for var in body.jaxpr.outvars])
        return (cond, body), carried

    def _tie(self, ones: Sequence[Shape], others: Sequence[Shape]) -> None:
        """Record that each value of one list has the same dims as the value at that index of the other."""
        for one, other in zip(ones, others, strict=True):
            for first, second in zip(one, other, strict=False):
                self.dims.unite(first, second)
