"""A jaxpr with called functions inlined and unused ops removed.

The bodies of loops, branches and `shard_map` are separate blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from meshwright.proof.inspection.jaxprs.places import JAX, place
from meshwright.proof.programs.trace import CALLS, scan_counts

VIEWS = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "convert_element_type", "copy", "copy_p", "name"}
    | {"pvary", "pcast", "optimization_barrier", "sharding_constraint", "reshard", "reduce_precision"}
)
"""Primitives whose result has the elements of their operand."""


@dataclass(eq=False)
class Value:
    """A value of a traced function.

    number: its value if it is a scalar constant. op: the op that computes it; None for inputs and constants.
    """

    dtype: str
    dims: tuple[int, ...]
    is_weak: bool = False
    number: float | None = None
    array: Any = None  # Of a constant.
    op: Op | None = None

    @property
    def num_bytes(self) -> int:
        """Its bytes on a device that runs the block: per-shard inside `shard_map`."""
        size = 4 if self.dtype.startswith("key") else max(1, np.dtype(self.dtype).itemsize)
        return math.prod(self.dims) * size

    @property
    def text(self) -> tuple[str, tuple[int, ...]]:
        """(HLO's name of the dtype, dims)."""
        return hlo_dtype(self.dtype), self.dims


class Outside(NamedTuple):
    """What equations inside a loop, `shard_map` or call do not repeat of it.

    scope: its name scopes. call: the equation that calls a function of JAX that is jitted, as `jax.random.normal`. JAX
    traces those once, so equations inside have the line of their first call.
    """

    scope: str = ""
    call: Any = None

    def scope_of(self, equation: Any) -> str:
        """Return the scope of an equation inside."""
        own = str(equation.source_info.name_stack)
        return f"{self.scope}/{own}" if self.scope and own else self.scope or own

    def inside(self, equation: Any, called: Any = None) -> Outside:
        """Return this for the body of an equation, or for a jaxpr that it calls."""
        file = str(getattr(getattr(called, "debug_info", None), "func_filename", None) or "")
        call = self.call or (equation if file.startswith(JAX) else None)
        return Outside(self.scope_of(equation), call)


NOWHERE = Outside()
"""Where the equations of the whole function are."""


@dataclass(eq=False)
class Op:
    """An equation.

    bodies: the blocks of a loop, a `cond`'s branches or a `shard_map`. outside: where its block is.
    """

    name: str
    operands: list[Value]
    results: list[Value]
    params: Mapping[str, Any]
    equation: Any
    bodies: tuple[OpBlock, ...] = ()
    outside: Outside = NOWHERE

    @property
    def iterations(self) -> int:
        """The trip count of a loop; 1 for other ops, and if the jaxpr does not determine it."""
        return max(1, self.loop.turns) if self.loop else 1

    @cached_property
    def loop(self) -> Loop | None:
        """The loop of a scan, or of a while that counts its iterations up to a constant; None for other ops."""
        if self.name == "scan":
            consts, carried = scan_counts(self.params)
            return Loop(self.bodies[0], consts, self.operands[consts : consts + carried], self.params["length"])
        if self.name != "while":
            return None
        condition, body = self.while_blocks
        asked, consts = self.params["cond_nconsts"], self.params["body_nconsts"]
        starts = self.operands[asked + consts :]
        turns = _turns(condition, body, self.operands[:asked], starts)
        return Loop(body, consts, starts, turns) if turns > 0 else None

    @property
    def while_blocks(self) -> tuple[OpBlock, OpBlock]:
        """The condition of a while loop, and its body."""
        condition = next(one for one in self.bodies if len(one.outputs) == 1 and one.outputs[0].dtype == "bool")
        return condition, next(one for one in self.bodies if one is not condition)

    @property
    def scope(self) -> str:
        """The equation's name scopes with JAX's transformations, as `transpose(jvp(mlp))`."""
        return self.outside.scope_of(self.equation)

    @property
    def place(self) -> str:
        """The user's line, file:line."""
        return place(self.outside.call or self.equation)


@dataclass(frozen=True)
class Loop:
    """A loop with a known number of iterations (`turns`).

    consts: how many of the body's inputs are loop-invariant; they come before the carry. starts: the carry's initial
    values.
    """

    body: OpBlock
    consts: int
    starts: Sequence[Value]
    turns: int


@dataclass(eq=False)
class OpBlock:
    """Ops in order, with their inputs and outputs."""

    inputs: list[Value]
    outputs: list[Value]
    ops: list[Op]
    constants: list[Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        live = {id(value) for value in self.outputs}
        kept = []
        for op in reversed(self.ops):
            if op.equation.effects or any(id(result) in live for result in op.results):
                kept.append(op)
                live |= {id(value) for value in op.operands}
        self.ops = kept[::-1]
        counts = [value for op in self.ops for value in op.operands] + self.outputs
        self.num_uses = Counter(id(value) for value in counts)

    def users(self, value: Value) -> list[Op]:
        """The ops with a value as operand."""
        return [op for op in self.ops if any(one is value for one in op.operands)]

    def everything(self) -> Iterator[tuple[OpBlock, Op]]:
        """Yield (block, op) for every op of this block and of the blocks inside it."""
        for op in self.ops:
            yield self, op
            for body in op.bodies:
                yield from body.everything()


def read_block(program: ClosedJaxpr, operands: Sequence[Value] | None = None, outside: Outside = NOWHERE) -> OpBlock:
    """Return a traced function as a block.

    operands: values to use as its inputs; by default new ones. outside: where the op is whose body it is.
    """
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    arrays = program.consts if isinstance(program, ClosedJaxpr) else ()
    block_inputs = list(operands) if operands is not None else [_value(var.aval) for var in jaxpr.invars]
    ops: list[Op] = []
    constants: list[Value] = []
    outputs = _inline(jaxpr, arrays, block_inputs, ops, constants, outside)
    return OpBlock(block_inputs, outputs, ops, constants)


def _turns(condition: OpBlock, body: OpBlock, asked: Sequence[Value], starts: Sequence[Value]) -> int:
    """Return the trip count of a while loop that adds 1 to a number while it is less than a constant; 0 for others.

    asked: the loop-invariant operands of the condition. starts: the initial values of the carry.
    """
    asks = condition.outputs[0].op
    if asks is None or asks.name != "lt":
        return 0
    given = dict(zip(map(id, condition.inputs), [*asked, *starts], strict=True))
    count, end = asks.operands
    place = next((place for place, one in enumerate(condition.inputs[len(asked) :]) if one is count), None)
    bound = given.get(id(end), end).number
    if place is None or bound is None or (start := starts[place].number) is None:
        return 0
    held, adds = body.inputs[len(body.inputs) - len(starts) + place], body.outputs[place].op
    if adds is None or adds.name != "add" or not any(one is held for one in adds.operands):
        return 0
    return math.ceil(bound - start) if any(one.number == 1 for one in adds.operands) else 0


def hlo_dtype(name: str) -> str:
    """Return HLO's name of a JAX dtype; for a random key, that of its data."""
    if name == "bool":
        return "pred"
    for kind, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "s")):
        if name.startswith(kind):
            return short + name.removeprefix(kind).replace("_", "")
    return "u32"


def through_views(value: Value) -> Value:
    """Follow views, casts and constrained copies back to the original value."""
    while value.op is not None and value.op.name in VIEWS and len(value.op.results) == 1:
        value = value.op.operands[0]
    return value


def _inline(
    jaxpr: Any, arrays: Sequence[Any], inputs: Sequence[Value], ops: list[Op], held: list[Value], outside: Outside
) -> list[Value]:
    """Append the ops of a jaxpr and of the jaxprs it calls to `ops`, their constants to `held`; return its outputs.

    arrays: the values of the jaxpr's constants. outside: where its equations are.
    """
    known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, array in zip(jaxpr.constvars, arrays, strict=False):
        known[var] = _constant(var.aval, array)
        held.append(known[var])

    def read(var: Any) -> Value:
        if not isinstance(var, Literal):
            return known[var]
        value = _constant(var.aval, var.val)
        if value.dims:
            held.append(value)
        return value

    for equation in jaxpr.eqns:
        operands = [read(var) for var in equation.invars]
        name = equation.primitive.name
        called = equation.params.get(CALLS[name]) if name in CALLS else None
        if called is not None:
            inner = called.jaxpr if isinstance(called, ClosedJaxpr) else called
            consts = called.consts if isinstance(called, ClosedJaxpr) else ()
            results = _inline(inner, consts, operands, ops, held, outside.inside(equation, inner))
        else:
            results = [_value(var.aval) for var in equation.outvars]
            bodies = tuple(_bodies(equation, held, outside.inside(equation)))
            op = Op(name, operands, results, equation.params, equation, bodies, outside)
            ops.append(op)
            for result in results:
                result.op = op
            if len(results) == 1:
                results[0].number = _fold(name, operands, results[0])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _bodies(equation: Any, held: list[Value], outside: Outside) -> Iterator[OpBlock]:
    """Yield the blocks of a loop, of branches or of a `shard_map`; add their constants to `held`. Kernels have none."""
    if equation.primitive.name not in ("scan", "while", "cond", "shard_map"):
        return
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda one: hasattr(one, "eqns")):
        if hasattr(inner, "eqns"):
            block = read_block(inner, outside=outside)
            held += block.constants
            yield block


def _value(aval: Any) -> Value:
    dtype = getattr(aval, "dtype", None)
    name = str(getattr(dtype, "name", dtype))
    return Value(name, tuple(getattr(aval, "shape", ())), bool(getattr(aval, "weak_type", False)))


def _constant(aval: Any, array: Any) -> Value:
    value = _value(aval)
    value.array = array
    if not value.dims and not value.dtype.startswith("key"):
        value.number = float(np.real(np.asarray(array)))
    return value


def _fold(name: str, operands: Sequence[Value], result: Value) -> float | None:
    """Return the number that a cast, reshape, quotient or product of scalar constants gives; None for other ops."""
    numbers = [one.number for one in operands if one.number is not None]
    if not numbers or len(numbers) < len(operands):
        return None
    if name in ("broadcast_in_dim", *VIEWS):
        return numbers[0]
    if name in ("div", "mul") and result.dtype.startswith(("f", "bf")):
        left, right = numbers
        return left * right if name == "mul" else (left / right if right else None)
    return None
