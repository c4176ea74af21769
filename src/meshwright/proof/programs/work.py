"""The work of a traced function: matmuls, reads and writes of arrays, reductions, values in memory.

Nothing here depends on a mesh: `price` applies a layout.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jax.lax import Precision

from meshwright.proof.programs.flat import Atoms, Flat, Op, Value, flatten, operands
from meshwright.proof.programs.products import Contraction, product_of
from meshwright.proof.programs.rules import MATMULS, SCATTERS, uses
from meshwright.proof.programs.trace import Program, scan_counts
from meshwright.record import Phase

REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"))
"""Ops that reduce over some dims."""

LINES = frozenset(
    (
        "sort",
        "top_k",
        "approx_top_k",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "cumlogsumexp",
        "fft",
        "argmax",
        "argmin",
    )
)
"""Ops that need all elements along a dim."""

CUTS = frozenset(
    (
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "concatenate",
        "pad",
        "rev",
        "reshape",
        "split",
        "tile",
        "unstack",
    )
)
"""Ops that slice, join or shift arrays along a dim."""

IN_PLACE = SCATTERS | {"dynamic_update_slice"}
"""Ops whose result XLA writes over their first operand if no later op reads it."""

OPAQUE = frozenset(("shard_map", "pallas_call", "custom_call", "pure_callback", "io_callback"))
"""Calls of programs that are not analyzed here."""

_UNFUSED = MATMULS | SCATTERS | frozenset(("gather", "sort", "top_k", "dynamic_update_slice", "fft"))
_COPIES = frozenset(("convert_element_type", "transpose", "reshape", "squeeze", "copy", "mul", "div", "dynamic_slice"))


@dataclass(frozen=True)
class Moved:
    """An op other than a matmul that communicates if an axis splits the dims that it sums, sorts or slices.

    kind: `sum` for a sum over `dims`, `lookup` for an embedding lookup along `dims`, `whole` if the operand must not be
    split along `dims`, `rows` if `dims` index the rows that are added to the result (scatter-add).
    """

    kind: Literal["sum", "lookup", "whole", "rows"]
    phase: Phase
    operand: Value
    result: Value
    dims: Atoms


@dataclass
class Live:
    """The values of one program in memory, as events in the order of its ops.

    events: (values allocated, programs called, values freed after it) for each op with any of these.
    """

    events: list[tuple[list[Value], list[Live], list[Value]]] = field(default_factory=list)


@dataclass
class Work:
    """The work of one step. Each counter has the number of times per step.

    products: matmuls and convolutions. moved: other ops that may communicate. gathered: uses of parameters, once per
    loop body and rematerialized part; the value's bytes per element are those that a gather sends. passes: reads and
    writes of arrays between matmuls. live: the values in memory. kernels: kernel launches. whiles: loops with an
    unknown number of iterations, counted as one. ragged: matmuls of rows sorted by group. opaque: calls of programs
    that are not analyzed, by primitive.
    """

    products: Counter[Contraction] = field(default_factory=Counter[Contraction])
    moved: Counter[Moved] = field(default_factory=Counter[Moved])
    gathered: Counter[tuple[Value, Phase]] = field(default_factory=Counter[tuple[Value, Phase]])
    passes: Counter[Value] = field(default_factory=Counter[Value])
    live: Live = field(default_factory=Live)
    kernels: int = 0
    whiles: int = 0
    ragged: int = 0
    opaque: Counter[str] = field(default_factory=Counter[str])
    is_tpu: bool = False


def work_of(program: Program, *, is_tpu: bool) -> Work:
    """Return the work of a traced function.

    is_tpu: count as the TPU compiler does: it fuses elementwise ops into matmuls, and first rounds float32 operands to
    bfloat16 (JAX's default precision).
    """
    flat, work = flatten(program), Work(is_tpu=is_tpu)
    copies = {number: argument for argument, number in enumerate(flat.given) if argument in program.state}
    work.live = _collect(work, flat, 1, copies, set(), set(), None)
    return work


def _collect(
    work: Work,
    flat: Flat,
    times: int,
    copies: dict[int, int],
    gathered: set[int],
    constants: set[int],
    caller: Op | None,
) -> Live:
    """Add the work of a program that runs `times` times a step to `work`; return its values in memory.

    copies: {number of a value that is a copy of a state argument: the argument's index}. gathered: the arguments
    already gathered. constants: the program's arguments that depend on no array. caller: the op that calls the program.
    """
    reads, made = _reads(flat, constants, is_tpu=work.is_tpu)
    last = _last_uses(flat, reads, made)
    sums = _sums(flat, caller)
    live, readers = Live(), dict[int, list[tuple[Contraction, int]]]()

    by_reductions = _read_by_reductions(flat, reads, is_tpu=work.is_tpu)

    def is_constant(value: int) -> bool:
        return value in constants or (value not in made and not reads[value])

    for place, op in enumerate(flat.ops):
        called: list[Live] = []
        for program in op.called:
            turns = times * (op.equation.params["length"] if op.name == "scan" else 1)
            # Loop-invariant values are gathered once, before the loop.
            same = op.inputs[: scan_counts(op.equation.params)[0]] if op.name == "scan" else ()
            for value in _newly_used(same, copies, gathered):
                work.gathered[(flat.values[value], _phase(op))] += times
            work.whiles += op.name == "while"
            before = {copies[value] for value in same if value in copies}
            given = list(zip(program.given, operands(op), strict=True))
            inner = {ours: copies[theirs] for ours, theirs in given if theirs in copies}
            # XLA moves masks and the like, which JAX computes before a loop, back into it.
            known = {ours for ours, theirs in given[: _unchanged(op)] if theirs in reads and is_constant(theirs)}
            called.append(_collect(work, program, turns, inner, before, known, op))
        if not op.called:
            _follow(op, flat, copies)
            used = [value for value, is_used in zip(op.inputs, uses(op.equation), strict=True) if is_used]
            for value in _newly_used(used, copies, gathered):
                one = flat.values[value]
                sent = Value(one.dims, min(one.width, 2.0)) if work.is_tpu and _rounds(op) else one
                work.gathered[(sent, _phase(op))] += times
            _add(work, op, flat, times, sums, readers)
            if op.name in MATMULS:
                # Values fused into a matmul are not written, but all their inputs are read.
                fused = (
                    reads[value] for value in op.inputs if value is not None and value in reads and value not in made
                )
                for leaves in fused:
                    by_size = sorted(leaves, key=lambda leaf: len(flat.values[leaf].dims))
                    work.passes.update({flat.values[leaf]: times for leaf in by_size[:-1]})
        is_in_place = op.name in IN_PLACE and op.inputs[0] is not None
        for value in op.outputs:
            if value in made and op.name not in MATMULS and not op.called:
                touched = op.inputs[1:] if is_in_place else (*by_reductions.get(value, reads[value]), value)
                for one in touched:
                    if one is not None:
                        work.passes[flat.values[one]] += times * (2 if is_in_place else 1)
                work.kernels += times
        new, gone = [value for value in op.outputs if value in made], last.get(place, [])
        if is_in_place and (op.inputs[0] in gone or _is_last_use(flat, place)):
            # It is written over its operand, whose memory it keeps.
            new, gone = [], [value for value in gone if value != op.inputs[0]]
        if new or called or gone:
            live.events.append(([flat.values[value] for value in new], called, [flat.values[value] for value in gone]))
    return live


def _read_by_reductions(flat: Flat, reads: Mapping[int, tuple[int, ...]], *, is_tpu: bool) -> dict[int, list[int]]:
    """Return {the result of a reduction: the values in memory that it reads}, for every reduction.

    XLA fuses reductions that can begin at the same time, so that each value is read once. XLA:TPU also fuses a
    reduction into the matmul that computes the last of its operands, which is then not read. reads: from `_reads`.
    """
    matmuls = {value for op in flat.ops if is_tpu and op.name in MATMULS for value in op.outputs}
    known, found = set[tuple[int, int]](), dict[int, list[int]]()
    for op in flat.ops:
        if op.name in REDUCTIONS:
            leaves = reads[op.outputs[0]]
            last = max(leaves, default=-1)
            read = [one for one in leaves if (last, one) not in known and not (one == last and one in matmuls)]
            known.update((last, one) for one in read)
            found[op.outputs[0]] = read
    return found


def _unchanged(op: Op) -> int:
    """Return how many leading operands of an op's called program are the same in every iteration."""
    if op.name == "scan":
        return scan_counts(op.equation.params)[0]
    return op.equation.params["body_nconsts"] if op.name == "while" else len(op.inputs)


def _is_last_use(flat: Flat, place: int) -> bool:
    """Whether the first operand of the op at index `place` is an argument that no later op reads."""
    value = flat.ops[place].inputs[0]
    return value in flat.given and not any(value in op.inputs for op in flat.ops[place + 1 :])


def _reads(flat: Flat, constants: set[int], *, is_tpu: bool) -> tuple[dict[int, tuple[int, ...]], set[int]]:
    """Return ({value: the values in memory that it is computed from}, the values written to memory), all by number.

    Elementwise ops are fused into their consumers, so only values that a matmul or a loop reads are written. Compilers
    for other chips than TPUs also write a value whose consumers would otherwise read more bytes. constants: arguments
    that depend on no array; they are recomputed at each use.
    """
    made: set[int] = {value for value in flat.results if value is not None}
    for op in flat.ops:
        if op.called or op.name in _UNFUSED:
            made.update(op.outputs)
            if not (is_tpu and op.name in MATMULS):
                made.update(value for value in op.inputs if value is not None)
        elif op.name in REDUCTIONS or op.name in LINES:
            made.update(op.outputs)
    made -= constants
    uses_of = Counter[int | None]() if is_tpu else Counter(value for op in flat.ops for value in op.inputs)
    consumers = {} if is_tpu else _consumers(flat, made)
    there = set(range(len(flat.values))) - {number for op in flat.ops for number in op.outputs} - constants
    reads: dict[int, tuple[int, ...]] = dict.fromkeys(constants, ())
    for op in flat.ops:
        found: dict[int, None] = {}
        for value in op.inputs:
            if value is not None:
                found.update(dict.fromkeys((value,) if value in made or value in there else reads[value]))
        if not found and not op.called and op.name not in _UNFUSED:
            # Broadcast constants are fused into the ops that read them.
            made.difference_update(op.outputs)
        for value in op.outputs:
            reads[value] = tuple(found)
            is_shared = uses_of[value] > 1 and value not in made
            if is_shared and _is_written(flat, value, reads[value], consumers[value]):
                made.add(value)
    return reads, made - there


def _consumers(flat: Flat, made: set[int]) -> Mapping[int, set[int]]:
    """Return {value: the indexes of the ops that read it}, where an op whose result is not in `made` is its readers."""
    found = defaultdict[int | None, set[int]](set)
    for place, op in reversed(list(enumerate(flat.ops))):
        is_fused = not op.called and op.name not in _UNFUSED and made.isdisjoint(op.outputs)
        own = set[int]().union(*(found[value] for value in op.outputs)) if is_fused else {place}
        for value in op.inputs:
            found[value] |= own
    return found  # type: ignore[return-value]


def _is_written(flat: Flat, value: int, leaves: Sequence[int], consumers: set[int]) -> bool:
    """Whether the compiler writes a value, because its consumers would otherwise read more bytes from its `leaves`."""
    atoms = {atom for dim in flat.values[value].dims for atom in dim}
    large = [flat.values[leaf] for leaf in leaves]
    read = sum(leaf.width for leaf in large if atoms <= {atom for dim in leaf.dims for atom in dim})
    count, width = len(consumers), flat.values[value].width
    return bool(atoms) and count * read > read + (1 + count) * width


def _last_uses(flat: Flat, reads: dict[int, tuple[int, ...]], made: set[int]) -> dict[int, list[int]]:
    """Return {index of an op: the values in memory that it is the last to read}. reads, made: from `_reads`."""
    last: dict[int, int] = {}
    for place, op in enumerate(flat.ops):
        for value in op.outputs:
            last.update((one, place) for one in reads[value])
            if value in made:
                last[value] = place
    kept, found = set(flat.results), dict[int, list[int]]()
    for value, place in last.items():
        if value in made and value not in kept:
            found.setdefault(place, []).append(value)
    return found


def _rounds(op: Op) -> bool:
    """Whether a matmul has JAX's default precision, with which TPUs multiply in bfloat16."""
    precision = op.equation.params.get("precision")
    return op.name in MATMULS and all(one is None or one == Precision.DEFAULT for one in precision or (None,))


def _follow(op: Op, flat: Flat, copies: dict[int, int]) -> None:
    """Add an op's result to `copies` if it is a cast, slice or scaled copy of a parameter."""
    arrays = [value for value in op.inputs if value is not None and flat.values[value].dims]
    if op.name in _COPIES and len(arrays) == 1 and arrays[0] in copies:
        copies[op.outputs[0]] = copies[arrays[0]]


def _newly_used(values: Sequence[int | None], copies: dict[int, int], gathered: set[int]) -> list[int]:
    """Return the values that are copies of parameters not gathered yet, and add these parameters to `gathered`."""
    found = []
    for value in values:
        if value in copies and copies[value] not in gathered:
            gathered.add(copies[value])
            found.append(value)
    return found


@dataclass(frozen=True)
class Summed:
    """How the result of a matmul is added to other results before any other op reads it.

    to: the matmul to whose result it is added; None if there is none. turns: the number of loop iterations whose
    results are added up; 1 outside of such loops.
    """

    to: Op | None = None
    turns: int = 1


def _sums(flat: Flat, caller: Op | None) -> dict[int, Summed]:
    """Return {number of a matmul's result: `Summed`} for results only added to others, or only summed by a loop.

    XLA adds partial sums on each device before one all-reduce: e.g. the gradients of queries, keys and values with
    respect to their common input (AllReduceReassociate). For a loop, the all-reduce comes after it
    (WhileLoopAllReduceCodeMotion).
    """
    carried, turns = dict[int, int | None](), 1
    if caller is not None and caller.name == "scan":
        consts, count = scan_counts(caller.equation.params)
        turns = caller.equation.params["length"]
        carried = dict(zip(flat.given[consts : consts + count], flat.results[:count], strict=True))
    uses_of = Counter(value for op in flat.ops for value in op.inputs)
    uses_of.update(flat.results)
    matmuls: dict[int, list[Op]] = {}
    found: dict[int, Summed] = {}
    for op in flat.ops:
        once = [value if value is not None and uses_of[value] == 1 else -1 for value in op.inputs]
        parts = [matmuls.get(value, []) for value in once]
        if op.name in MATMULS:
            matmuls[op.outputs[0]] = [op]
        elif op.name in ("add", "add_any") and all(parts):
            matmuls[op.outputs[0]] = [one for part in parts for one in part]
            *others, last = matmuls[op.outputs[0]]
            found.update((one.outputs[0], Summed(to=last)) for one in others)
        elif op.name in ("add", "add_any") and any(carried.get(value) == op.outputs[0] for value in once):
            for one in [one for part in parts for one in part][-1:]:
                found[one.outputs[0]] = Summed(turns=turns)
        elif op.name in ("convert_element_type", "transpose", "reshape"):
            matmuls[op.outputs[0]] = parts[0]
    return found


def _add(
    work: Work,
    op: Op,
    flat: Flat,
    times: int,
    sums: dict[int, Summed],
    readers: dict[int, list[tuple[Contraction, int]]],
) -> None:
    """Add the work of an op that calls no program and runs `times` times a step.

    sums: from `_sums`. readers: the earlier matmuls that read each value.
    """
    name, phase = op.name, _phase(op)
    if name in OPAQUE:
        work.opaque[name] += times
    if name not in MATMULS | REDUCTIONS | LINES | CUTS | SCATTERS | {"gather"}:
        return
    inputs = [flat.values[value] if value is not None else Value((), 0.0) for value in op.inputs]
    results = [flat.values[value] for value in op.outputs]
    first, result = inputs[0], results[0]
    moved: list[tuple[Any, Value, Atoms]] = []
    if name in MATMULS:
        product = replace(product_of(op.equation, phase, inputs, result), rounds=work.is_tpu and _rounds(op))
        if (summed := sums.get(op.outputs[0])) is not None:
            product = replace(product, turns=summed.turns)
            if (other := summed.to) is not None:
                there = [flat.values[value] if value is not None else Value((), 0.0) for value in other.inputs]
                joins = product_of(other.equation, phase, there, flat.values[other.outputs[0]]).inner
                product = replace(product, joins=joins)
        product = replace(product, earlier=_readers(op, product, readers))
        work.products[product] += times
        work.kernels += times
        work.ragged += times * (name == "ragged_dot_general")
    elif name in REDUCTIONS:
        axes = op.equation.params["axes"]
        moved.append(("sum", first, tuple(dim for place, dim in enumerate(first.dims) if place in axes)))
    elif name in LINES:
        moved.append(("whole", first, _lost(first, results)))
    elif name in SCATTERS:
        kept = set(first.dims)
        moved.append(("rows", inputs[2], tuple(dim for dim in inputs[2].dims if dim not in kept)))
    elif name == "gather":
        # A table that is split along the dim that is looked up gives each device a part of the rows: their sum.
        moved.append(("lookup", first, _lost(first, results)))
    else:
        moved.extend(("whole", value, _lost(value, results)) for value in inputs)
    for kind, operand, dims in moved:
        if dims := tuple(dim for dim in dims if dim):
            work.moved[Moved(kind, phase, operand, result, dims)] += times


def _readers(
    op: Op, product: Contraction, readers: dict[int, list[tuple[Contraction, int]]]
) -> tuple[tuple[tuple[Contraction, int], ...], ...]:
    """Return, per operand, the earlier matmuls that read it, each with its operand number; add this matmul to them."""
    found = tuple(tuple(readers.get(value, ())) if value is not None else () for value in op.inputs[:2])
    for number, value in enumerate(op.inputs[:2]):
        if value is not None and (product, number) not in readers.setdefault(value, []):
            readers[value].append((product, number))
    return found


def _lost(operand: Value, results: Sequence[Value]) -> Atoms:
    """Return the dims of an operand that are in no result."""
    kept = {atom for result in results for dim in result.dims for atom in dim}
    return tuple(dim for dim in operand.dims if dim and dim[0] not in kept)


def _phase(op: Op) -> Phase:
    """Return the phase of an op, from the name scopes that JAX adds in differentiation and rematerialization."""
    if "rematted" in op.scope:
        return "recompute"
    return "backward" if "transpose(" in op.scope else "forward"
