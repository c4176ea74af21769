"""Dataflow of a program: trace a value back to its origin and forward to its uses."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.description.hlo.module import Instruction, Module

VIEWS = frozenset({"bitcast", "copy", "reshape", "transpose", "copy-start", "copy-done", "opt-barrier"})
"""Opcodes whose result has the operand's elements in another layout, memory or shape."""

VIEWS_AND_CASTS = frozenset(VIEWS | {"convert"})
"""`VIEWS`, and the opcode whose result has the operand's elements in another dtype."""

INLINE = ("fusion", "call")
"""Opcodes that only call a computation: their operands are its parameters, their result is its root."""

_STARTS_CALL = "call-start"
"""Opcode of a call whose result its `call-done` has. On TPU7x, collectives on SparseCores run in such calls."""

_LONGEST_CHAIN = 400
"""Maximum number of instructions through which a value is followed; real programs need far fewer."""


def origin(module: Module, instruction: Instruction, through: frozenset[str] = VIEWS) -> Instruction:
    """Return the instruction that computed a value, followed back through views, fusions, tuples and loops.

    through: the opcodes that count as views.
    """
    for _ in range(_LONGEST_CHAIN):
        before = forwarded_from(module, instruction, through)
        if before is None:
            break
        instruction = before
    return instruction


def uses(
    module: Module, value: Instruction, through: frozenset[str] = VIEWS
) -> Iterator[tuple[Instruction, Instruction]]:
    """Yield the first uses of a value that are not views, as (user, the view of the value that it reads).

    The value is followed into and out of fusions, and through the `-done` of an asynchronous pair. If it leaves its
    computation in another way (to the next loop iteration, as a program result), the instruction that carries it out is
    a user.
    """
    waiting, seen = [value], set()
    while waiting:
        held = waiting.pop()
        if (held.computation, held.name) in seen:
            continue
        seen.add((held.computation, held.name))
        for user in module.users(held):
            forward = _forwarded_to(module, held, user, through)
            waiting += forward
            if not forward:
                yield user, held
        if module.computations[held.computation].root == held.name:
            callers = [caller for caller in module.callers[held.computation] if caller.opcode in INLINE]
            waiting += callers
            if not callers:
                yield held, held


def element(module: Module, instruction: Instruction, index: int) -> Instruction | None:
    """Return the instruction that computes one element of a tuple; None if that cannot be determined.

    An element of a loop's result is followed if the loop leaves it unchanged.
    """
    for _ in range(_LONGEST_CHAIN):
        if instruction.opcode == "tuple":
            return module.operands(instruction)[index] if index < len(instruction.operands) else None
        if instruction.opcode == "opt-barrier":
            instruction = module.operand(instruction)
        elif instruction.opcode in INLINE:
            instruction = module.root(_inside(instruction))
        elif instruction.opcode == "while" and _is_loop_invariant(module, instruction, index):
            instruction = module.operand(instruction)
        elif instruction.opcode == "parameter" and (caller := only_caller(module, instruction)) is not None:
            hands_on = caller.opcode == "while" and _is_loop_invariant(module, caller, index)
            if not hands_on and caller.opcode not in INLINE:
                return None
            instruction = module.operand(caller, instruction.index)
        else:
            return None
    return None


def forwarded_from(module: Module, instruction: Instruction, through: frozenset[str]) -> Instruction | None:
    """Return the instruction whose value `instruction` forwards, one step back; None if it computes a new value."""
    if instruction.opcode in through or instruction.opcode.endswith("-done"):
        return module.operand(instruction) if instruction.operands else None
    if instruction.opcode == "get-tuple-element":
        return element(module, module.operand(instruction), instruction.index)
    if instruction.opcode in INLINE and instruction.shape.dtype != "tuple":
        return module.root(_inside(instruction))
    if instruction.opcode == "parameter":
        caller = only_caller(module, instruction)
        calls = (*INLINE, _STARTS_CALL)
        if caller is not None and caller.opcode in calls and instruction.index < len(caller.operands):
            return module.operand(caller, instruction.index)
    # The TPU compiler copies an array in slices, and joins them again here.
    if instruction.custom_call_target != "ConcatBitcast":
        return None
    starts = [module.operand(piece) for piece in module.operands(instruction) if piece.opcode == "slice-done"]
    arrays = {start.operands[0] for start in starts}
    is_whole = len(starts) == len(instruction.operands) and len(arrays) == 1
    return module.operand(starts[0]) if is_whole else None


def _forwarded_to(module: Module, held: Instruction, user: Instruction, through: frozenset[str]) -> list[Instruction]:
    """Return the instructions that have the same value as `held`, which `user` reads; none if `user` computes with it.

    They are `user` itself if it is a view, the parameters of a computation that it calls, or the elements that callers
    extract if it is the root tuple.
    """
    if user.opcode in through or user.opcode.endswith("-done"):
        return [user]
    if user.opcode in INLINE:
        parameters = module.computations[_inside(user)].parameters
        return [parameters[i] for i, name in enumerate(user.operands) if name == held.name and i in parameters]
    if user.opcode == "tuple" and module.computations[user.computation].root == user.name:
        callers = [caller for caller in module.callers[user.computation] if caller.opcode in INLINE]
        places = {i for i, name in enumerate(user.operands) if name == held.name}
        taken = [take for caller in callers for take in module.users(caller)]
        leaves = any(module.computations[caller.computation].root == caller.name for caller in callers)
        if not leaves and all(take.opcode == "get-tuple-element" for take in taken):
            return [take for take in taken if take.index in places]
    return []


def _inside(instruction: Instruction) -> str:
    """Return the computation that an inline instruction calls."""
    return instruction.called("calls", "to_apply")[0]


def _is_loop_invariant(module: Module, loop: Instruction, index: int) -> bool:
    """Whether a loop's body returns element `index` of the loop's tuple unchanged."""
    root = module.root(loop.called("body")[0])
    if root.opcode != "tuple" or index >= len(root.operands):
        return False
    result = module.operands(root)[index]
    while result.opcode == "copy":
        result = module.operand(result)
    return (
        result.opcode == "get-tuple-element" and result.index == index and module.operand(result).opcode == "parameter"
    )


def only_caller(module: Module, parameter: Instruction) -> Instruction | None:
    """Return the only instruction that calls a parameter's computation; None if there are several or none."""
    callers = module.callers[parameter.computation]
    return callers[0] if len(callers) == 1 else None
