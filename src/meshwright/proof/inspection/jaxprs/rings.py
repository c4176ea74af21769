"""Find rings of point-to-point sends with one send too many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshwright.proof.compiler.program import TracedMistake
from meshwright.proof.inspection.jaxprs.blocks import VIEWS, Loop, Op, OpBlock, Value, through_views
from meshwright.proof.inspection.jaxprs.replicas import axes_of


def ring_mistakes(block: OpBlock, count: int = 1) -> Iterator[TracedMistake]:
    """Yield rings whose last send returns each device's own value, or is not used. count: executions of the block."""
    yield from _unrolled(block, count)
    for op in block.ops:
        if op.loop:
            yield from _looped(block, op, op.loop, count)
        for body in op.bodies:
            yield from ring_mistakes(body, count * op.iterations)


def _unrolled(block: OpBlock, count: int) -> Iterator[TracedMistake]:
    """Yield unrolled rings: a value that returns to its device after n sends and is used there again."""
    for op in block.ops:
        if op.name != "ppermute":
            continue
        start, hops, degree = _origin(op.results[0])
        if not hops or hops % degree or hops != degree or not _is_computed_with(block, op.results[0]):
            continue
        if _is_computed_with(block, start):
            yield _mistake(op, count, degree, hops, is_wrong=True)


def _origin(value: Value) -> tuple[Value, int, int]:
    """Follow sends along one ring back to the first; return (value sent first, sends since, devices in the ring)."""
    hops, degree, ring = 0, 0, None
    while True:
        value = through_views(value)
        op = value.op
        if op is None or op.name != "ppermute" or (shift := _shift(op)) is None:
            return value, hops, degree
        if ring not in (None, op.params["axis_name"]):
            return value, hops, degree
        ring, degree, hops = op.params["axis_name"], len(op.params["perm"]), hops + shift
        value = op.operands[0]


def _shift(op: Op) -> int | None:
    """Return the distance that a permutation moves values along a ring of all devices; None if it is no such ring."""
    pairs = op.params["perm"]
    shifts = {(target - source) % len(pairs) for source, target in pairs}
    if len(shifts) != 1 or len({source for source, _ in pairs}) != len(pairs) or len(pairs) < 2:
        return None
    shift = shifts.pop()
    return (shift if shift <= len(pairs) // 2 else len(pairs) - shift) or None


def _is_computed_with(block: OpBlock, value: Value) -> bool:
    """Whether an op other than a send uses a value or its views."""
    for user in block.users(value):
        if user.name in VIEWS:
            if any(_is_computed_with(block, result) for result in user.results):
                return True
        elif user.name != "ppermute":
            return True
    return False


def _looped(block: OpBlock, op: Op, loop: Loop, count: int) -> Iterator[TracedMistake]:
    """Yield rings in a loop that sends a carry on in every iteration: too many iterations, or one unused send."""
    body, turns = loop.body, loop.turns
    for number in range(len(loop.starts)):
        start, hops, degree = _origin(body.outputs[number])
        if not hops or start is not body.inputs[loop.consts + number]:
            continue
        period = degree // math.gcd(hops, degree)
        sent = [op.results[0] for op in body.ops if op.name == "ppermute" and _origin(op.results[0])[0] is start]
        before, after = _is_computed_with(body, start), any(_is_computed_with(body, value) for value in sent)
        last = next(op for op in reversed(body.ops) if op.name == "ppermute" and _origin(op.results[0])[0] is start)
        begins_with_own = after and not before and _is_in_another(loop.starts, number)
        if (turns > period and (before or after)) or (turns == period and begins_with_own):
            yield _mistake(last, count * turns, degree, period, is_wrong=True)
        elif turns == period and before and not after and not block.num_uses[id(op.results[number])]:
            yield _mistake(last, count * turns, degree, turns, is_wrong=False)


def _is_in_another(starts: Sequence[Value], number: int) -> bool:
    """Whether the initial value of carry `number` is part of another carry's, e.g. of a sum that begins with it."""
    first = through_views(starts[number])
    return any(place != number and _is_made_of(other, first) for place, other in enumerate(starts))


def _is_made_of(value: Value, part: Value) -> bool:
    waiting, seen = [value], set()
    while waiting:
        held = waiting.pop()
        if held is part:
            return True
        if id(held) not in seen and held.op is not None:
            seen.add(id(held))
            waiting += held.op.operands
    return False


def _mistake(op: Op, count: int, degree: int, hops: int, *, is_wrong: bool) -> TracedMistake:
    figures = {"degree": degree, "sends": hops, "is_wrong": is_wrong}
    value = op.operands[0]
    return TracedMistake("ring-too-long", *value.text, op.place, axes_of(op), count, figures)
