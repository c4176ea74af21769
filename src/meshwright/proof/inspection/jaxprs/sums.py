"""Find sums and gathers over devices that run more often, or move more bytes, than necessary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.proof.compiler.program import TracedMistake
from meshwright.proof.inspection.jaxprs.blocks import VIEWS, Op, OpBlock, Value, through_views
from meshwright.proof.inspection.jaxprs.replicas import GATHERS, axes_of
from meshwright.proof.programs.trace import scan_counts

_SUMS = ("psum", "psum_invariant")
_ADDS = ("add", "add_any")
_SCALES = ("mul", "div", "neg")
_ELEMENTWISE = frozenset(
    {"mul", "div", "neg", "add", "sub", "square", "integer_pow", "abs", "exp", "log", "tanh", "sqrt"}
)


def sum_mistakes(block: OpBlock, count: int = 1) -> Iterator[TracedMistake]:
    """Yield sums in every iteration that one sum after the loop could replace, and gathers whose parts are summed.

    count: executions of the block per step.
    """
    yield from _added(block, count)
    for op in block.ops:
        if op.name == "scan" and op.params["length"] > 1:
            yield from _in_iterations(op, count)
        if op.name in GATHERS and (axes := axes_of(op)) and _is_summed(block, op):
            yield TracedMistake("gathered-to-sum", *op.results[0].text, op.place, axes, count)
        if op.iterations > 1:
            yield from _gathered_unchanged(op, count * op.iterations)
        for body in op.bodies:
            yield from sum_mistakes(body, count * op.iterations)


def _gathered_unchanged(op: Op, count: int) -> Iterator[TracedMistake]:
    """Yield gathers in a loop that return the same in each iteration, where the loop has no backward pass inside.

    A loop over microbatches may gather weights anew in each, to hold few of them whole at a time.
    """
    loop = op.loop
    if loop is None or any("transpose(" in one.scope.removeprefix(op.scope) for one in loop.body.ops):
        return
    unchanged = loop.body.inputs[: loop.consts]
    for one in loop.body.ops:
        if one.name in GATHERS and (axes := axes_of(one)) and through_views(one.operands[0]) in unchanged:
            figures = {"scope": one.scope, "iterations": op.iterations}
            yield TracedMistake("gathered-twice", *one.operands[0].text, one.place, axes, count, figures)


def _in_iterations(loop: Op, count: int) -> Iterator[TracedMistake]:
    """Yield sums in a loop whose results are only added to a carry."""
    body, consts, length = loop.bodies[0], scan_counts(loop.params)[0], loop.params["length"]
    for number in range(scan_counts(loop.params)[1]):
        carry = body.inputs[consts + number]
        if body.num_uses[id(carry)] != 1:
            continue
        terms = _terms(body, body.outputs[number])
        if not any(term is carry for term in terms):
            continue
        for summed in terms:
            op = summed.op
            if op is not None and op.name in _SUMS and (axes := axes_of(op)):
                figures = {"iterations": length}
                yield TracedMistake("sum-in-loop", *summed.text, op.place, axes, count * length, figures)


def _added(block: OpBlock, count: int) -> Iterator[TracedMistake]:
    """Yield sums over the same devices whose results are added, e.g. microbatches in an unrolled Python loop."""
    inner = {id(one) for op in block.ops if op.name in _ADDS for one in op.operands}
    for op in block.ops:
        if op.name not in _ADDS or id(op.results[0]) in inner:
            continue
        sums = [one for one in _terms(block, op.results[0]) if one.op is not None and one.op.name == "psum"]
        by_axes: dict[tuple[str, ...], list[Value]] = {}
        for one in sums:
            if one.op is not None and one.dims and "transpose(" not in one.op.scope.rpartition("/")[2]:
                by_axes.setdefault(axes_of(one.op), []).append(one)
        for axes, alike in by_axes.items():
            if axes and len(alike) > 1 and alike[0].op is not None:
                place_ = alike[0].op.place
                figures = {"iterations": len(alike)}
                yield TracedMistake("sum-in-loop", *alike[0].text, place_, axes, count * len(alike), figures)


def _terms(block: OpBlock, total: Value) -> list[Value]:
    """Return the terms that nested additions add up to `total`; scaled terms without their scale.

    A partial sum that is also used elsewhere is left out, with its terms.
    """
    found, waiting = [], [total]
    while waiting:
        value = through_views(waiting.pop())
        op = value.op
        if value is not total and block.num_uses[id(value)] > 1:
            continue
        if op is not None and op.name in _ADDS:
            waiting += op.operands
        elif op is not None and op.name in _SCALES and any(one.number is not None for one in op.operands):
            waiting += [one for one in op.operands if one.number is None]
        else:
            found.append(value)
    return found


def _is_summed(block: OpBlock, gather: Op) -> bool:
    """Whether the parts that an all-gather returns are only added up along the gathered dim."""
    value, dim = gather.results[0], gather.params["all_gather_dimension"]
    if "int" in value.dtype:
        return False  # compressed: a sum of integers would not do
    users = block.users(value)
    if [one.name for one in users] == ["unstack"]:  # By which JAX 0.12 iterates over an array.
        return _are_added(block, users[0].results)
    if len(users) == gather.params["axis_size"] and all(one.name == "slice" for one in users):
        return _are_added(block, [one.results[0] for one in users])
    return _is_reduced(block, value, dim, gather.params["axis_size"])


def _is_reduced(block: OpBlock, value: Value, dim: int, degree: int) -> bool:
    """Whether a value, or a value computed from it element by element, is only added up along a dim.

    If the parts are tiled along the dim, a reshape may first give them a dim of their own, of size `degree`.
    """
    users = block.users(value)
    for user in users:
        made = user.results[0]
        is_same = made.dims[dim : dim + 1] == value.dims[dim : dim + 1]
        if user.name == "reduce_sum":
            goes_on = dim in user.params["axes"]
        elif user.name in _ELEMENTWISE:
            is_alone = all(one is value or one.number is not None for one in user.operands)
            goes_on = is_alone and _is_reduced(block, made, dim, degree)
        else:
            is_view = user.name in VIEWS - {"transpose", "squeeze"}
            are_parts = user.name == "reshape" and made.dims[dim : dim + 1] == (degree,)
            goes_on = is_view and (is_same or are_parts) and _is_reduced(block, made, dim, degree)
        if not goes_on:
            return False
    return bool(users)


def _are_added(block: OpBlock, parts: Sequence[Value]) -> bool:
    """Whether values are the terms of one sum, as where Python adds up the parts of a gather."""
    total = parts[0]
    while len(users := block.users(total)) == 1 and users[0].name in {*_ADDS, *VIEWS}:
        total = users[0].results[0]
    terms = _terms(block, total)
    return all(any(term is part for term in terms) for part in parts)
