"""The transfers that an instruction starts, waits for, or runs synchronously."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.description.hlo.collectives import collective_kind
from meshwright.description.hlo.module import Instruction, Module
from meshwright.proof.simulate.fabric import Fabric, Transfer, touches_host
from meshwright.proof.simulate.op_seconds import op_seconds

Part = Literal["start", "done", "whole"]

_COPIES = frozenset({"copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"})
_HOST_COPIES = frozenset({"copy", "dynamic-slice", "dynamic-update-slice"})
"""Ops that are transfers if an operand or the result is in the host's memory."""

_ASYNC_CALLS = ("calls", "to_apply")
"""Attributes that name the computation of an asynchronous call; `call-start` has the second."""


@dataclass(frozen=True)
class TransferPart:
    """What an instruction does with a transfer: start it, await its end (`done`), or run all of it (`whole`).

    key: equal for the start and the end of a transfer. transfer: None for `done`.
    """

    part: Part
    key: str
    transfer: Transfer | None = None


def transfer_parts(fabric: Fabric, instruction: Instruction) -> tuple[TransferPart, ...]:
    """Return what an instruction does with transfers: start, await or run them; () if it only computes."""
    opcode, name = instruction.opcode, instruction.name
    if opcode == "fusion":
        return tuple(_parts_in_fusion(fabric, instruction))
    if opcode.endswith("-done"):
        found = fabric.module.operand(instruction)
        while found.operands and found.opcode not in ("send", "recv") and not found.opcode.endswith("-start"):
            found = fabric.module.operand(found)
        return (TransferPart("done", found.name),)
    if opcode in ("send", "recv"):
        return tuple(_send_or_receive(fabric, instruction))
    if opcode in _COPIES:
        return (TransferPart("start", name, fabric.copy(instruction)),)
    if _copies_to_host(fabric, instruction):
        return (TransferPart("whole", name, fabric.copy(instruction)),)
    if collective_kind(instruction) is None:
        calls = opcode.endswith("-start") and instruction.called(*_ASYNC_CALLS)
        return (TransferPart("start", name, _async_call(fabric, instruction)),) if calls else ()
    if (transfer := fabric.collective(instruction)) is None:
        return ()
    # XLA:GPU writes a pair also where it runs the collective in the stream of the ops.
    is_sync = not opcode.endswith("-start") or '"is_sync":true' in instruction.attributes.get("backend_config", "")
    return (TransferPart("whole" if is_sync else "start", name, transfer),)


def _send_or_receive(fabric: Fabric, instruction: Instruction) -> Iterator[TransferPart]:
    """Yield the start of the transfer of a send or a receive; between slices, only the send has one."""
    if "megascale" not in instruction.attributes.get("frontend_attributes", ""):
        yield TransferPart("start", instruction.name, fabric.host_transfer(instruction))
    elif instruction.opcode == "send" and (transfer := fabric.dcn_collective(instruction)):
        yield TransferPart("start", instruction.name, transfer)


def _parts_in_fusion(fabric: Fabric, fusion: Instruction) -> Iterator[TransferPart]:
    """Yield what a fusion does with the transfers of the collectives and host copies inside it.

    The TPU compiler spreads a collective over several fusions, identified by channel: custom calls mark its start and
    its end, and fusions between them advance it while they compute. A fusion may also be a whole collective.
    """
    for inner in _inside(fabric.module, fusion):
        kind = collective_kind(inner)
        if _copies_to_host(fabric, inner):
            yield TransferPart("whole", inner.name, fabric.copy(inner))
        if kind is None:
            continue
        targets = {user.custom_call_target for user in fabric.module.users(inner)}
        key = f"{kind} of channel {inner.attributes.get('channel_id', inner.name)}"
        if "AsyncCollectiveDone" in targets:
            yield TransferPart("done", key)
        elif "async_collective_fusion_config" not in inner.attributes.get("backend_config", ""):
            yield TransferPart("whole", key, fabric.collective(inner))
        elif "AsyncCollectiveStart" in targets:
            yield TransferPart("start", key, fabric.collective(inner))


def _async_call(fabric: Fabric, start: Instruction) -> Transfer:
    """Return the transfer of an asynchronous call.

    It is that of the collective or host copy inside the call; without one, it takes the time of the call's ops.
    """
    inside = list(_inside(fabric.module, start))
    made = [transfer for inner in inside if collective_kind(inner) and (transfer := fabric.collective(inner))]
    made += [fabric.copy(inner) for inner in inside if _copies_to_host(fabric, inner)]
    if made:
        return made[0]
    ops = [fabric.module.computations[name].instructions.values() for name in start.called(*_ASYNC_CALLS)]
    work = [op for instructions in ops for op in instructions]
    if start.opcode == "fusion-start":  # ((operands), result, context)
        work = [replace(start, opcode="fusion", shape=start.shape.elements[1])]
    return fabric.async_call(start, sum(op_seconds(fabric.module, op, fabric.system).seconds for op in work))


def _copies_to_host(fabric: Fabric, instruction: Instruction) -> bool:
    """Whether an instruction transfers data from or to the host's memory."""
    return instruction.opcode in _HOST_COPIES and touches_host(fabric.module, instruction)


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yield the instructions of the computations that an instruction calls, recursively."""
    for name in instruction.called("calls", "to_apply", "called_computations"):
        for inner in module.computations[name].instructions.values():
            yield inner
            if inner.opcode in ("fusion", "call"):
                yield from _inside(module, inner)
