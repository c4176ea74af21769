"""A traced function as a list of ops over numbered values; called functions are inlined, as XLA inlines them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Literal

from meshwright.proof.programs.dims import Dims
from meshwright.proof.programs.trace import Body, Program

Atoms = tuple[tuple[int, ...], ...]
"""The dims of an array, each as the numbers of its atoms."""

APART = frozenset(("scan", "while", "cond", "remat2", "checkpoint"))
"""Primitives whose programs are not inlined: loops, branches and rematerialized parts. XLA inlines all others."""

SAME = frozenset(("optimization_barrier", "reshard", "sharding_constraint", "name"))
"""Primitives whose results are their operands: they only tell the compiler something."""


@dataclass(frozen=True)
class Value:
    """An array: its dims, and bytes per element."""

    dims: Atoms
    width: float


@dataclass(frozen=True)
class Op:
    """One equation. inputs: the numbers of its operands, None for constants. called: the programs that it calls."""

    equation: Any
    scope: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    called: tuple[Flat, ...] = ()

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name


@dataclass
class Flat:
    """A program: its ops in order, and its values, which have numbers.

    given: the numbers of its arguments. results: the numbers of its results; None for a constant.
    """

    values: list[Value] = field(default_factory=list[Value])
    given: tuple[int, ...] = ()
    ops: list[Op] = field(default_factory=list[Op])
    results: tuple[int | None, ...] = ()


def flatten(program: Program) -> Flat:
    """Return a traced function as one list of ops."""
    return _flat(program.body, program.dims, "")


def _flat(body: Body, dims: Dims, scope: str) -> Flat:
    flat = Flat()
    numbers: dict[Any, int | str] = {
        var: _add(flat, var, body, dims) for var in (*body.jaxpr.invars, *body.jaxpr.constvars)
    }
    flat.given = tuple(range(len(body.jaxpr.invars)))
    flat.results = tuple(map(_number, _inline(flat, body, dims, scope, numbers, {})))
    # XLA removes ops whose results are not read and that have no effects.
    read, found = set(flat.results), list[Op]()
    for op in reversed(flat.ops):
        if op.equation.effects or not read.isdisjoint(op.outputs):
            read.update(op.inputs)
            found.append(op)
    flat.ops = found[::-1]
    return flat


def _add(flat: Flat, var: Any, body: Body, dims: Dims) -> int:
    width = float(getattr(getattr(var.aval, "dtype", None), "itemsize", 0) or 0)
    flat.values.append(Value(tuple(dims.atoms(dim) for dim in body.shape(var)), width))
    return len(flat.values) - 1


def _inline(
    flat: Flat, body: Body, dims: Dims, scope: str, numbers: dict[Any, int | str], known: dict[Any, tuple[int, ...]]
) -> Iterator[int | str]:
    """Add a program's equations to the ops of `flat`, and yield the numbers of its results.

    numbers: the number of each of the program's values; for a constant its text. known: the results of the ops so far,
    by primitive, operands and parameters: an equal op is not added, as XLA eliminates common subexpressions.
    """

    def number(var: Any) -> int | str:
        return f"{var.val} {var.aval}" if isinstance(var, Literal) else numbers[var]

    for place, equation in enumerate(body.jaxpr.eqns):
        given, name = tuple(number(var) for var in equation.invars), equation.primitive.name
        called, inner = body.called[place], f"{scope}/{equation.source_info.name_stack}"
        if called and name not in APART:
            own = dict(zip(called[0].jaxpr.invars, given, strict=True))
            own.update((var, _add(flat, var, called[0], dims)) for var in called[0].jaxpr.constvars)
            numbers.update(zip(equation.outvars, _inline(flat, called[0], dims, inner, own, known), strict=True))
            continue
        if name in SAME:
            numbers.update(zip(equation.outvars, given, strict=True))
            if name == "optimization_barrier":
                known.clear()  # XLA does not eliminate common subexpressions across it.
            continue
        types = tuple(str(var.aval) for var in equation.outvars)
        # Equal sums are each reduced over devices separately. Equal loops are rare, and comparing their text takes
        # long.
        is_single = not called and not equation.effects and not name.startswith("reduce_")
        key = (name, given, str(equation.params), types) if is_single else ()
        if (outputs := known.get(key)) is None:
            outputs = tuple(_add(flat, var, body, dims) for var in equation.outvars)
            programs = tuple(_flat(one, dims, inner) for one in _run(name, called))
            flat.ops.append(Op(equation, inner, tuple(map(_number, given)), outputs, programs))
            if key:
                known[key] = outputs
        numbers.update(zip(equation.outvars, outputs, strict=True))
    yield from (number(var) for var in body.jaxpr.outvars)


def _number(value: int | str) -> int | None:
    """Return the number of a value; None for a constant."""
    return value if isinstance(value, int) else None


def _run(name: str, called: Sequence[Body]) -> Sequence[Body]:
    """Return the called programs whose work counts: a loop's body, the longest of several branches."""
    if name == "while":
        return called[1:]
    return (max(called, key=lambda body: len(body.jaxpr.eqns)),) if called else ()


def operands(op: Op) -> tuple[int | None, ...]:
    """Return the numbers of the values passed to an op's called program."""
    if op.name == "while":
        first = op.equation.params["cond_nconsts"]
        return op.inputs[first:]
    return op.inputs[1:] if op.name == "cond" else op.inputs
