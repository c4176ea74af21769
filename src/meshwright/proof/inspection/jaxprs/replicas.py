"""Find values in `shard_map` that are equal on all devices along a mesh axis, and needless or wrong collectives.

Random numbers that are equal where the data differ are found too.

For each value, the axes along which it differs between devices are tracked. After point-to-point sends a value may be
equal (a ring that sums or gathers) or not, so nothing is reported about such values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from meshwright.proof.compiler.program import TracedMistake
from meshwright.proof.inspection.jaxprs.blocks import VIEWS, Op, OpBlock, Value, through_views
from meshwright.proof.programs.trace import scan_counts

SUMS = {"psum", "psum_invariant", "reduce_scatter", "psum_scatter"}
REDUCTIONS = SUMS | {"pmax", "pmin"}
GATHERS = {"all_gather", "all_gather_invariant", "all_gather_reduced"}
SENDS = {"ppermute", "all_to_all", "ragged_all_to_all"}
COLLECTIVES = REDUCTIONS | GATHERS | SENDS

_NONLINEAR = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "sin", "cos", "tan", "pow"}
    | {"square", "integer_pow", "sqrt", "rsqrt", "cbrt"}
)
"""Primitives after which an earlier division no longer counts: it does not turn a later sum into a mean."""

_PRODUCTS = ("dot_general", "conv_general_dilated")

_COMBINES = frozenset(
    {"add", "sub", "mul", "div", "max", "min", "and", "or", "xor", "lt", "le", "gt", "ge", "select_n"}
)
"""Elementwise primitives of several operands."""

_KEEPS_BITS = (
    _NONLINEAR
    | _COMBINES
    | (VIEWS - {"transpose"})
    | {"broadcast_in_dim", "shift_right_logical", "bitcast_convert_type", "erf_inv", "not", "neg", "clamp", "eq", "ne"}
)
"""Primitives that may be between random bits and the values that they are combined with."""

_LEAST_BITS = 16
"""The fewest random numbers that are reported if all devices have the same: fewer may be an offset or a choice."""

_LEAST_DIVISOR = 1.5
"""Divisors below the fewest devices of a mean, 2, are not tracked: their products in a loop would not end."""

_Axes = frozenset[str]
_NONE: _Axes = frozenset()


@dataclass(frozen=True)
class _State:
    """The tracked properties of a value.

    differs: axes along which it differs between devices. own: the axes of `differs` along which it differs because data
    do, not only because it depends on `axis_index`. may_differ: axes along which it is not known whether it differs.
    divided: the numbers by which it, or a value that it is computed from, was divided, without those that a sum over as
    many devices has cancelled. summed: the numbers of devices over which it was summed and by which it was not divided
    afterwards. sums: the sums of equal values (keys of `_Reader.sums`) that it is computed from. drawn: random numbers
    (keys of `_Reader.bits`) that are equal on some devices and of which it has one for each of its elements.
    is_constant: whether it depends on no argument.
    """

    differs: _Axes = _NONE
    own: _Axes = _NONE
    may_differ: _Axes = _NONE
    divided: frozenset[float] = frozenset()
    summed: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()
    drawn: frozenset[int] = frozenset()
    is_constant: bool = True


_ARGUMENT = _State(is_constant=False)


def replica_mistakes(block: OpBlock) -> Iterator[TracedMistake]:
    """Yield collectives whose devices all have the same value, and results that should be equal on them but differ."""
    reader = _Reader()
    reader.run(block, [_ARGUMENT] * len(block.inputs))
    for number in reader.certain:
        one, is_sum = reader.sums[number], number not in reader.divided
        if is_sum or one.figures["is_useless"]:
            yield one._replace(figures={**one.figures, "is_sum": is_sum})
    yield from reader.others.values()


def axes_of(op: Op) -> tuple[str, ...]:
    """Return the mesh axes of a collective; () if it runs over an axis of `vmap`."""
    named = op.params.get("axes", op.params.get("axis_name", ()))
    return tuple(axis for axis in ((named,) if isinstance(named, str) else named) if isinstance(axis, str))


class _Reader:
    """One pass over a function, which computes the `_State` of each value.

    A loop's body is read until the states of its carry are stable; mistakes are recorded in the last reading only.
    sums: the sums of equal values, by the `id` of the op, or of the equal term of a sum. others: all other mistakes.
    count: executions per step of the ops that are being read.
    """

    def __init__(self) -> None:
        self.sums: dict[int, TracedMistake] = {}
        self.certain: set[int] = set()
        """The keys in `sums` of the sums that were seen in a last reading: mistakes, unless also in `divided`."""
        self.divided: set[int] = set()
        """The keys in `sums` of the sums that are divided by their number of devices: means, no mistakes."""
        self.others: dict[tuple[str, int, int], TracedMistake] = {}
        self.bits: dict[int, tuple[Op, _Axes]] = {}
        """Random numbers by the `id` of their op, and the axes along which all devices have the same."""
        self.degrees: Mapping[str, int] = {}
        self.manual: _Axes = _NONE
        self.taken: _Axes = _NONE
        """Axes along which devices may take different branches or numbers of iterations around the op being read.

        A predicate that was sent point to point counts as different: code that needs it equal takes a maximum or sum.
        """
        self.states: dict[int, _State] = {}
        """The state of each value, by its id."""
        self.count = 1
        self.is_last = True

    def run(self, block: OpBlock, inputs: Sequence[_State]) -> list[_State]:
        """Return the states of a block's outputs."""
        known = {id(value): state for value, state in zip(block.inputs, inputs, strict=False)}
        self.states |= known

        def read(value: Value) -> _State:
            return known.get(id(value), _State())

        for op in block.ops:
            states = self._op(op, [read(one) for one in op.operands])
            made = {id(result): state for result, state in zip(op.results, states, strict=False)}
            known |= made
            self.states |= made
        return [read(value) for value in block.outputs]

    def _op(self, op: Op, states: list[_State]) -> list[_State]:
        if op.name == "shard_map":
            return self._mapped(op, states)
        if op.name == "scan":
            return self._scan(op, states)
        if op.name == "while":
            return self._while(op, states)
        if op.name == "cond":
            return self._branches(op, states)
        if op.name in COLLECTIVES and (axes := axes_of(op)):
            return self._collective(op, axes, states)
        if op.name == "axis_index":
            return [_State(differs=frozenset(axes_of(op)))]
        return [replace(self._divide(op, _computed(op, states)), drawn=self._drawn(op, states))] * len(op.results)

    def _drawn(self, op: Op, states: list[_State]) -> frozenset[int]:
        """Return `_State.drawn` of an op's result. Report random numbers that the data of several devices share."""
        size = math.prod(op.results[0].dims) if op.results else 0
        if op.name == "random_bits":
            equal = self.manual - states[0].differs - states[0].may_differ
            self.bits[id(op)] = op, frozenset(axis for axis in equal if self.degrees[axis] > 1)
            return frozenset({id(op)} if size >= _LEAST_BITS and self.bits[id(op)][1] else ())
        if op.name not in _KEEPS_BITS:
            return frozenset()
        if op.name == "broadcast_in_dim" and op.params["broadcast_dimensions"][:1] == (0,):
            # What each row has of its own; what all rows share may be the same on all devices.
            return states[0].drawn if op.operands[0].dims[0] == op.results[0].dims[0] else frozenset()
        alike = [one for value, one in zip(op.operands, states, strict=True) if math.prod(value.dims) == size]
        drawn = frozenset[int]().union(*(one.drawn for one in alike))
        others = _NONE.union(*(one.own for one in alike if not one.drawn))
        return drawn - self._shared(drawn, others if op.name in _COMBINES else _NONE)

    def _shared(self, drawn: frozenset[int], differs: _Axes) -> set[int]:
        """Report and return the random numbers in `drawn` that are equal along an axis along which data differ."""
        shared = {number for number in drawn if self.bits[number][1] & differs}
        for number in shared:
            op, equal = self.bits[number]
            is_folded = bool(self.states[id(op.operands[0])].differs)
            self._report("same-random-bits", op, op.results[0], equal & differs, is_folded=is_folded)
        return shared

    def _divide(self, op: Op, state: _State) -> _State:
        """Return the state of an op's result. If the op divides by a number, the state records it (`_State.divided`).

        A sum over n devices that the op divides by n is a mean: `self.divided`, the means found so far, gets it. What
        the backward pass divides is a gradient (the transpose of `shard_map` divides those of copies), not a sum of the
        forward pass. state: the result's state without this division.
        """
        if op.name not in ("div", "mul") or len(op.operands) != 2:
            return state
        left, right = (value.number for value in op.operands)
        number = right if op.name == "div" else next((one for one in (left, right) if one is not None), None)
        if not number:
            return state
        by = number if op.name == "div" else 1 / number
        is_transposed = "transpose(" in op.scope
        for one in state.sums:
            figures = self.sums[one].figures
            is_before = is_transposed and "transpose(" not in figures["scope"]
            if not is_before and _is_near(by, figures["degree"], figures["all_devices"]):
                self.divided.add(one)
        means = {one for one in state.summed if _is_near(by, one)}
        if means and not is_transposed:
            return replace(state, summed=state.summed - means)
        if by < _LEAST_DIVISOR:
            return state
        both = {one * by for one in state.divided if one * by <= self._degree(tuple(self.degrees))}
        return replace(state, divided=state.divided | both | {by})

    def _mapped(self, op: Op, states: list[_State]) -> list[_State]:
        outer, outer_manual = self.degrees, self.manual
        manual = frozenset(op.params.get("newly_manual_axes", op.params.get("manual_axes", ())))
        self.degrees, self.manual = {**outer, **dict(op.params["mesh"].shape)}, outer_manual | manual
        specs = op.params["in_specs"]
        inside = [
            replace(one, differs=one.differs | _named(spec), own=one.own | _named(spec))
            for one, spec in zip(states, specs, strict=True)
        ]
        made = self.run(op.bodies[0], inside)
        for state, spec in zip(made, op.params["out_specs"], strict=True):
            self._shared(state.drawn, _named(spec) - state.differs - state.may_differ)
        if not op.params.get("check_vma", True):
            for number, (state, spec) in enumerate(zip(made, op.params["out_specs"], strict=True)):
                axes = (state.differs & manual) - _named(spec)
                if axes and not op.results[number].dtype.startswith("key"):
                    value = op.bodies[0].outputs[number]
                    self._report("missing-sum", value.op or op, value, axes, number=number)
        self.degrees, self.manual = outer, outer_manual
        return [
            replace(
                one,
                differs=one.differs - manual,
                own=one.own - manual,
                may_differ=one.may_differ - manual,
                drawn=frozenset(),
            )
            for one in made
        ]

    def _scan(self, op: Op, states: list[_State]) -> list[_State]:
        consts, carried = scan_counts(op.params)
        body = op.bodies[0]
        fixed, carry, stepped = states[:consts], states[consts : consts + carried], states[consts + carried :]

        def step(carry: list[_State]) -> list[_State]:
            return self.run(body, [*fixed, *carry, *stepped])

        made = self._until_stable(carry, lambda carry: step(carry)[:carried])
        times, self.count = self.count, self.count * op.iterations
        out = step(made)
        self.count = times
        return [*made, *out[carried:]]

    def _while(self, op: Op, states: list[_State]) -> list[_State]:
        condition, body = op.while_blocks
        first, second = op.params["cond_nconsts"], op.params["body_nconsts"]
        asked, fixed, carry = states[:first], states[first : first + second], states[first + second :]
        asks = _State()

        def step(carry: list[_State]) -> list[_State]:
            nonlocal asks
            asks = self.run(condition, [*asked, *carry])[0]
            made = self.run(body, [*fixed, *carry])
            return [replace(one, differs=one.differs | (asks.differs - one.may_differ)) for one in made]

        made = self._until_stable(carry, step)
        outer, self.taken = self.taken, self.taken | asks.differs | asks.may_differ
        step(made)
        self.taken = outer
        return made

    def _until_stable(self, carry: list[_State], step: Any) -> list[_State]:
        """Return the states of a loop's carry, joined with those after an iteration (`step`) until nothing changes."""
        is_last, self.is_last = self.is_last, False
        while (joined := [_join(one, new) for one, new in zip(carry, step(carry), strict=True)]) != carry:
            carry = joined
        self.is_last = is_last
        return carry

    def _branches(self, op: Op, states: list[_State]) -> list[_State]:
        chosen, *operands = states
        outer, self.taken = self.taken, self.taken | chosen.differs | chosen.may_differ
        made = [self.run(body, operands) for body in op.bodies]
        self.taken = outer
        joined = [reduce(_join, alike) for alike in zip(*made, strict=True)]
        return [
            _join(one, replace(chosen, divided=frozenset(), summed=frozenset(), sums=frozenset())) for one in joined
        ]

    def _collective(self, op: Op, axes: tuple[str, ...], states: list[_State]) -> list[_State]:
        if self.taken.intersection(axes):
            value = op.operands[0]
            self._report("branched-collective", op, value, axes, taken=sorted(self.taken.intersection(axes)))
        over = frozenset(axes)
        is_grouped = op.params.get("axis_index_groups") is not None
        made = []
        for value, state in zip(op.operands, states, strict=True):
            equal = () if is_grouped else tuple(axis for axis in axes if axis not in state.differs | state.may_differ)
            sums = state.sums
            if not equal and not is_grouped and op.name in ("psum", "psum_invariant"):
                sums |= self._equal_terms(op, value, axes)
            if equal and self._degree(equal) > 1:
                sums |= self._equal(op, value, state, axes, equal)
            state = replace(state, sums=sums, own=state.own - over)
            if op.name in GATHERS | {"pmax", "pmin", "psum", "psum_invariant"}:
                gone = _NONE if is_grouped else over
                if op.name in SUMS:
                    degree = self._degree(axes)
                    state = replace(state, summed=state.summed | {degree}, divided=_made_up(state.divided, degree))
                state = replace(state, differs=state.differs - gone, may_differ=state.may_differ - gone)
            elif op.name == "ppermute":
                state = replace(state, differs=state.differs - over, may_differ=state.may_differ | over)
                if equal and set(equal) == over and _is_ring(op, self._degree(axes)):
                    state = replace(state, may_differ=state.may_differ - over)
            elif op.name in ("all_to_all", "ragged_all_to_all"):
                state = replace(state, differs=state.differs - over, may_differ=state.may_differ | over)
            else:  # a reduce-scatter
                state = replace(
                    state,
                    differs=state.differs | over,
                    own=state.own | over,
                    may_differ=state.may_differ - over,
                    divided=_made_up(state.divided, self._degree(axes)),
                )
            made.append(state)
        return made if len(made) == len(op.results) else [reduce(_join, made)] * len(op.results)

    def _equal(self, op: Op, value: Value, state: _State, axes: Sequence[str], equal: Sequence[str]) -> set[int]:
        """Report a collective of equal values. Return {its key in `sums`} if a later op may divide it, else set().

        axes: those of the collective. equal: those of `axes` along which the devices hold the same value.
        """
        degree, all_devices = self._degree(equal), self._degree(axes)
        if state.is_constant and "transpose(" not in op.scope:
            return set()  # counts devices, or moves zeros
        figures = {"equal_axes": list(equal), "degree": degree, "all_devices": all_devices}
        if op.name in SUMS:
            is_transposed = "transpose(" in op.scope
            figures |= {"is_transposed": is_transposed, "is_useless": degree == all_devices and not is_transposed}
            self.sums[id(op)] = self._mistake("reduced-twice", op, value, axes, figures)
            self.certain |= {id(op)} if self.is_last else set()
            if any(_is_near(by, degree, all_devices) for by in state.divided):
                self.divided.add(id(op))
                return set()
            return {id(op)}
        if op.name in SENDS and not (op.name == "ppermute" and not _is_ring(op, all_devices)):
            self._report("sent-copies", op, value, axes, **figures)
        if op.name in GATHERS:
            self._report("sent-copies", op, value, axes, **figures)
        return set()

    def _equal_terms(self, op: Op, total: Value, axes: Sequence[str]) -> set[int]:
        """Report a sum over devices of `a + b` where b, such as a bias, is equal on all. Return the key of b in `sums`.

        total: the summed value.
        """
        over, degree, found = frozenset(axes), self._degree(axes), set[int]()
        if "transpose(" in op.scope or degree < 2:
            return found
        waiting, differs = [total], False
        terms: list[Value] = []
        while waiting:
            value = through_views(waiting.pop())
            if value.op is not None and value.op.name in ("add", "sub"):
                waiting += value.op.operands
            elif not self.states.get(id(value), _State()).is_constant:
                terms.append(value)
                differs |= over <= self.states[id(value)].differs
        for value in terms if differs else ():
            state = self.states[id(value)]
            is_divided = any(_is_near(by, degree) for by in state.divided)
            if not over & (state.differs | state.may_differ) and not is_divided and not state.sums:
                figures = {"equal_axes": list(axes), "degree": degree, "all_devices": degree}
                figures |= {"is_transposed": False, "is_useless": False}
                self.sums[id(value)] = self._mistake("reduced-twice", op, value, axes, figures)
                self.certain |= {id(value)} if self.is_last else set()
                found.add(id(value))
        return found

    def _degree(self, axes: Sequence[str]) -> int:
        return math.prod(self.degrees.get(axis, 1) for axis in axes)

    def _report(self, finding: str, op: Op, value: Value, axes: Any, number: int = 0, **figures: Any) -> None:
        if self.is_last:
            ordered = tuple(axis for axis in self.degrees if axis in axes)
            self.others[finding, id(op), number] = self._mistake(finding, op, value, ordered, figures)

    def _mistake(
        self, finding: str, op: Op, value: Value, axes: Sequence[str], figures: Mapping[str, Any]
    ) -> TracedMistake:
        known = {"op": op.name, "scope": op.scope, **figures}
        return TracedMistake(finding, *value.text, op.place, tuple(axes), self.count, known)


def _computed(op: Op, states: Sequence[_State]) -> _State:
    """Return the state of an op's results, without regard to constants that it divides by."""
    made = reduce(_join, states, _State())
    if op.name in _PRODUCTS:
        # What differs because the data differ stays different, whatever it is multiplied by.
        own = states[0].own | states[1].own
        return replace(made, differs=made.differs | own, own=own, may_differ=made.may_differ - own)
    if op.name in _NONLINEAR or (op.name == "mul" and op.operands[0] is op.operands[1]):
        return replace(made, divided=frozenset(), sums=frozenset())
    return replace(made, divided=states[0].divided) if op.name == "div" else made


def _made_up(divided: frozenset[float], degree: int) -> frozenset[float]:
    """Return the divisors of a value (`_State.divided`) after a sum over `degree` devices cancelled that factor."""
    return frozenset(one / degree if one > degree else one for one in divided if not _is_near(one, degree))


def _join(left: _State, right: _State) -> _State:
    """Return the state of a value that depends on two others, or is one of them."""
    may_differ = left.may_differ | right.may_differ
    return _State(
        differs=(left.differs | right.differs) - may_differ,
        own=(left.own | right.own) - may_differ,
        may_differ=may_differ,
        divided=left.divided | right.divided,
        summed=left.summed | right.summed,
        sums=left.sums | right.sums,
        drawn=left.drawn | right.drawn,
        is_constant=left.is_constant and right.is_constant,
    )


def _named(spec: Any) -> _Axes:
    """Return the mesh axes in a PartitionSpec."""
    dims = [(dim,) if isinstance(dim, str) else dim or () for dim in spec if dim is not None]
    return frozenset(axis for dim in dims for axis in dim if isinstance(axis, str))


def _is_near(number: float, *others: float) -> bool:
    return any(math.isclose(number, other, rel_tol=1e-3) for other in others)


def _is_ring(op: Op, degree: int) -> bool:
    """Whether a permute is over all `degree` devices, and each sends to another one."""
    pairs = op.params["perm"]
    return len(pairs) == degree and all(source != target for source, target in pairs)
