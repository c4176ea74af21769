"""Find an instruction's phase of the step and its named scopes from its op_name.

JAX 0.10.2 writes `jit(step)/jvp(layers)/while/body/closed_call/mlp/dot_general` for a forward op under
`named_scope("layers")` and `named_scope("mlp")`. Its backward op is under `transpose(jvp(layers))`, and an op
recomputed by `jax.checkpoint` has `rematted_computation` after that. JAX 0.11 writes `eval_jaxpr` for `closed_call`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS
from meshwright.description.hlo.module import Instruction, Module
from meshwright.record import Phase

UPDATE_SCOPE = "update"
"""The named scope of the optimizer. Ops in it that JAX does not differentiate are in the update phase."""

GRADIENTS_SCOPE = "gradients"
"""The named scope of gradients computed without JAX's transposition: its ops are in the backward phase."""

_PLUMBING = frozenset(
    {"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "remat2", "pjit", "shard_map"}
    | {"custom_jvp_call", "custom_vjp_call", "core_call", "xla_call", "call", "eval_jaxpr", "jit"}
)
_TRANSFORM = re.compile(r"\w+\((.*)\)", re.DOTALL)
_XLA_REMAT = re.compile(r"\.remat\d*\b")
_FURTHEST = 6


def phase_of(op_name: str) -> Phase:
    """Return the phase of an op from its op_name; forward by default."""
    if "transpose(" in op_name:
        return "recompute" if "rematted_computation" in op_name else "backward"
    parts = _components(op_name)
    last = max((place for place, part in enumerate(parts) if "jvp(" in part), default=-1)
    # 1F1B computes gradients inside a function that JAX differentiates, as in `jvp(gradients)/while`. So only scopes in
    # and after the last `jvp` decide.
    within = parts[last].rpartition("(")[2].rstrip(")").split("/") if last >= 0 else []
    if GRADIENTS_SCOPE in (*within, *parts[last + 1 :]):
        return "backward"
    return "update" if UPDATE_SCOPE in parts and last < 0 else "forward"


def scope_of(op_name: str) -> str:
    """Return the named scopes and the primitive in an op_name, such as `layers/mlp/dot_general`.

    Transformations and loops are left out.
    """
    words = []
    for part in _components(op_name):
        if part.startswith("jit("):
            continue
        while found := _TRANSFORM.fullmatch(part):
            part = found[1]
        words += [word for word in part.split("/") if word and word not in _PLUMBING]
    return "/".join(words)


def source_and_scope(source: str, scope: str) -> str:
    """Return text such as `train/step.py:88 (layers/mlp/dot_general)`; an empty part is left out."""
    return " ".join(filter(None, (source, f"({scope})" if scope else "")))


def split_op_name(op_name: str) -> tuple[str, ...]:
    """Return the op_names that XLA joined in one when it combined instructions.

    XLA writes `a/(b/x:c/y)/d` for `a/b/x/d` and `a/c/y/d`, or `a/b;a/c`.
    """
    found = []
    for name in op_name.split(";"):
        parts = _components(name)
        place = next((i for i, part in enumerate(parts) if part.startswith("(") and part.endswith(")")), None)
        if place is None:
            found.append(name)
        else:
            inner = _split(parts[place][1:-1], ":")
            found += ["/".join([*parts[:place], option, *parts[place + 1 :]]) for option in inner]
    return tuple(found)


def describing_instruction(module: Module, instruction: Instruction, *, moves: bool = False) -> Instruction:
    """Return the instruction whose op_name and source describe this one: itself, or a neighbour if it has no op_name.

    Neighbours are users and operands, then the callers of its computation. If the instruction only moves data
    (`moves`), users come first, because a gather exists for its user; otherwise operands do.
    """
    if moves and is_partitioner_generated(instruction) and _components(instruction.op_name)[-1] in _PLUMBING:
        return consumer_of_move(module, instruction) or instruction
    while not instruction.op_name:
        for forward in (moves, not moves):
            if (found := _nearest(module, instruction, forward=forward)) is not None:
                return found
        callers = module.callers[instruction.computation]
        if not callers:
            return instruction
        instruction = callers[0]
    return instruction


@dataclass(frozen=True)
class Description:
    """The op_name and the source (file:line) of one array of an instruction.

    is_recomputed: whether XLA's own rematerialization recomputes it.
    """

    op_name: str
    source: str
    is_recomputed: bool

    @property
    def phase(self) -> Phase:
        """The phase in which the array is computed; `recompute` also if XLA's own rematerialization does it."""
        phase = phase_of(self.op_name)
        return "recompute" if self.is_recomputed and phase == "forward" else phase

    @property
    def scope(self) -> str:
        """The named scopes and the primitive: `layers/mlp/dot_general`."""
        return scope_of(self.op_name)

    @property
    def place(self) -> str:
        """Source and scope: `train/step.py:88 (layers/mlp/dot_general)`."""
        return source_and_scope(self.source, self.scope)


def describe(
    module: Module, instruction: Instruction, *, number: int = 1, moves: bool = False
) -> tuple[Description, ...]:
    """Return a description of each of the `number` arrays of an instruction.

    When XLA combines instructions, it joins their op_names in the order of their arrays, one for each array. If the
    number of names differs from `number` (the TPU compiler keeps only the last name), each array is described by its
    operand or, if the instruction only moves data (`moves`), by the first name.
    """
    is_recomputed = bool(_XLA_REMAT.search(instruction.name))  # Its name is like `fusion.7.remat`.
    joined = len(split_op_name(instruction.op_name)) == number
    if not joined and not moves and number == len(instruction.operands) > 1:
        speakers = [
            _maker_in_loop(module, describing_instruction(module, operand)) for operand in module.operands(instruction)
        ]
        return tuple(Description(split_op_name(one.op_name)[0], one.source, is_recomputed) for one in speakers)
    speaker = describing_instruction(module, instruction, moves=moves)
    names = split_op_name(speaker.op_name)
    if len(names) != number or not instruction.op_name:
        names = names[:1] * number
    sources = [speaker.source] * number
    if number == len(instruction.operands) > 1:
        # XLA keeps the source of only one of the instructions that it combines.
        makers = [describing_instruction(module, operand) for operand in module.operands(instruction)]
        sources = [
            maker.source if name in split_op_name(maker.op_name) else speaker.source
            for name, maker in zip(names, makers, strict=True)
        ]
    return tuple(Description(name, source, is_recomputed) for name, source in zip(names, sources, strict=True))


def _maker_in_loop(module: Module, instruction: Instruction) -> Instruction:
    """Return the instruction in a loop's body that computes `instruction`, an element of the loop's result.

    Any other instruction is returned itself, and so is an element whose computing instruction has no op_name. 1F1B's
    loop is labelled forward but also computes gradients. A gradient that its last iteration completes has only the
    loop's op_name, and would count as forward.
    """
    if phase_of(instruction.op_name) != "forward" or _components(instruction.op_name)[-1] != "while":
        return instruction
    result = instruction
    while result.opcode in VIEWS:
        result = module.operand(result)
    if result.opcode != "get-tuple-element" or module.operand(result).opcode != "while":
        return instruction
    root = module.root(module.operand(result).called("body")[0])
    if root.opcode != "tuple" or result.index >= len(root.operands):
        return instruction
    made = describing_instruction(module, module.operands(root)[result.index])
    return made if made.op_name else instruction


def is_partitioner_generated(instruction: Instruction) -> bool:
    """Whether XLA's partitioner inserted an instruction to move or sum data; jaxlib 0.11 marks these.

    Their op_name is that of the moved value, whose phase may differ from its user's. For an argument or a result of a
    call, it is the op_name of the call, such as `.../while/body/jit` or `.../remat2`.
    """
    return 'is_spmd_generated="true"' in instruction.attributes.get("frontend_attributes", "")


def consumer_of_move(module: Module, instruction: Instruction) -> Instruction | None:
    """Return the nearest direct or indirect user of an instruction's result that tells what the result is for.

    Such a user has an op_name and was not inserted by the partitioner; it may be inside a fusion. None without one.
    """
    layer, seen = [instruction], {(instruction.computation, instruction.name)}
    for _ in range(_FURTHEST):
        uses = [use for one in layer if one.opcode != "while" for use in _users_through_fusions(module, one)]
        layer = [use for use in uses if (use.computation, use.name) not in seen]
        seen.update((use.computation, use.name) for use in layer)
        for use in layer:
            if use.op_name and use.opcode not in ("while", "parameter") and not is_partitioner_generated(use):
                return use
    return None


def _users_through_fusions(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yield the users of a result, looking into fusions and out of them.

    If a user is a fusion, the users inside it are yielded instead. If the result is the root of a fusion's computation,
    the fusion itself is yielded.
    """
    if instruction.name == module.computations[instruction.computation].root:
        yield from (caller for caller in module.callers[instruction.computation] if caller.opcode == "fusion")
    for user in module.users(instruction):
        if user.opcode != "fusion":
            yield user
            continue
        parameters = module.computations[user.called("calls")[0]].parameters
        for number, operand in enumerate(user.operands):
            if operand == instruction.name:
                yield from module.users(parameters[number])


def _nearest(module: Module, instruction: Instruction, *, forward: bool) -> Instruction | None:
    """Return the nearest instruction with an op_name among direct and indirect users or operands.

    forward: whether users are searched instead of operands. None if there is no such instruction.
    """
    layer, seen = [instruction], {instruction.name}
    for _ in range(_FURTHEST):
        step = [other for one in layer for other in (module.users(one) if forward else module.operands(one))]
        layer = [other for other in dict.fromkeys(o.name for o in step) if other not in seen]
        seen.update(layer)
        layer = [module.computations[instruction.computation].instructions[name] for name in layer]
        for other in layer:
            if other.op_name and other.opcode not in ("while", "parameter"):
                return other
    return None


def _components(op_name: str) -> list[str]:
    """Split an op_name at the slashes that are not in parentheses."""
    return _split(op_name, "/")


def _split(text: str, separator: str) -> list[str]:
    """Split a text at each separator that is not in parentheses."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == separator and depth <= 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]
