"""What an instruction of a schedule does with what moves beside it: start it, await it, or both at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.hlo import Instruction, Module
from meshwright.hlo.collectives import collective_kind
from meshwright.simulate.fabric import Fabric, Move, touches_host
from meshwright.simulate.op_seconds import op_seconds

Part = Literal["start", "done", "whole"]

_COPIES = frozenset({"copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"})
_HOST_COPIES = frozenset({"copy", "dynamic-slice", "dynamic-update-slice"})
"""What moves data where an operand or the result lies in the host's memory."""


@dataclass(frozen=True)
class Step:
    """One part of a move. key: what its parts have in common; move: None of `done`, which knows it by its key."""

    part: Part
    key: str
    move: Move | None = None


def read_steps(fabric: Fabric, instruction: Instruction) -> tuple[Step, ...]:
    """What an instruction starts, awaits or makes whole, in the order it does; () of one that only computes."""
    opcode, name = instruction.opcode, instruction.name
    if opcode == "fusion":
        return tuple(_fused(fabric, instruction))
    if opcode.endswith("-done"):
        return (Step("done", _started(fabric.module, instruction)),)
    if opcode in ("send", "recv"):
        return tuple(_transferred(fabric, instruction))
    if opcode in _COPIES:
        return (Step("start", name, fabric.copy(instruction)),)
    if _copies_to_host(fabric, instruction):
        return (Step("whole", name, fabric.copy(instruction)),)
    if collective_kind(instruction) is None:
        calls = opcode.endswith("-start") and instruction.called("calls")
        return (Step("start", name, _called(fabric, instruction)),) if calls else ()
    if (move := fabric.collective(instruction)) is None:
        return ()
    # XLA:GPU writes a pair also where it runs the collective in the stream of the ops.
    is_sync = not opcode.endswith("-start") or '"is_sync":true' in instruction.attributes.get("backend_config", "")
    return (Step("whole" if is_sync else "start", name, move),)


def _transferred(fabric: Fabric, instruction: Instruction) -> Iterator[Step]:
    """A send or a receive; between slices the send stands for both, as what is received is made of what is sent."""
    if "megascale" not in instruction.attributes.get("frontend_attributes", ""):
        yield Step("start", instruction.name, fabric.to_host(instruction))
    elif instruction.opcode == "send" and (move := fabric.between_slices(instruction)):
        yield Step("start", instruction.name, move)


def _fused(fabric: Fabric, fusion: Instruction) -> Iterator[Step]:
    """What the collectives in a fusion are there for.

    The TPU compiler spreads one over several fusions, by its channel: a custom call says where it starts and where it
    is done, those between take a step of it while they compute. A fusion may also be one whole collective.
    """
    for inner in _inside(fabric.module, fusion):
        kind = collective_kind(inner)
        if _copies_to_host(fabric, inner):
            yield Step("whole", inner.name, fabric.copy(inner))
        if kind is None:
            continue
        targets = {user.attributes.get("custom_call_target", "") for user in fabric.module.users(inner)}
        key = f"{kind} of channel {inner.attributes.get('channel_id', inner.name)}"
        if '"AsyncCollectiveDone"' in targets:
            yield Step("done", key)
        elif "async_collective_fusion_config" not in inner.attributes.get("backend_config", ""):
            yield Step("whole", key, fabric.collective(inner))
        elif '"AsyncCollectiveStart"' in targets:
            yield Step("start", key, fabric.collective(inner))


def _called(fabric: Fabric, start: Instruction) -> Move:
    """What an asynchronous call runs beside the ops: a collective, a copy from or to the host, or other work."""
    inside = list(_inside(fabric.module, start))
    made = [move for inner in inside if collective_kind(inner) and (move := fabric.collective(inner))]
    made += [fabric.copy(inner) for inner in inside if _copies_to_host(fabric, inner)]
    if made:
        return made[0]
    ops = [fabric.module.computations[name].instructions.values() for name in start.called("calls")]
    work = [op for instructions in ops for op in instructions]
    if start.opcode == "fusion-start":  # ((operands), result, context)
        work = [replace(start, opcode="fusion", shape=start.shape.elements[1])]
    return fabric.called(start, sum(op_seconds(fabric.module, op, fabric.system).seconds for op in work))


def _copies_to_host(fabric: Fabric, instruction: Instruction) -> bool:
    """Whether an instruction moves data from or to the host's memory."""
    return instruction.opcode in _HOST_COPIES and touches_host(fabric.module, instruction)


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions of the computations that one calls, and of those that they call."""
    for name in instruction.called("calls", "to_apply", "called_computations"):
        for inner in module.computations[name].instructions.values():
            yield inner
            if inner.opcode in ("fusion", "call"):
                yield from _inside(module, inner)


def _started(module: Module, done: Instruction) -> str:
    """The name of the instruction whose end a `-done` awaits."""
    found = module.operand(done)
    while found.operands and found.opcode not in ("send", "recv") and not found.opcode.endswith("-start"):
        found = module.operand(found)
    return found.name
