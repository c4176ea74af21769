"""Which phase of a step an instruction belongs to, and under which named scopes, from the path in its op_name.

JAX 0.10.2 writes `jit(step)/jvp(layers)/while/body/closed_call/mlp/dot_general` for a forward op under
`named_scope("layers")` and `named_scope("mlp")`; its backward op stands under `transpose(jvp(layers))`, and one that
`jax.checkpoint` runs again has `rematted_computation` behind that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.compiled.hlo import Instruction, Module
from meshwright.record import Phase

UPDATE_SCOPE = "update"
"""The named scope of the optimizer: what stands under it, outside of any differentiation, is the update phase."""

GRADIENTS_SCOPE = "gradients"
"""The named scope of gradients that are summed where no transposition says so: the backward phase."""

_PLUMBING = frozenset(
    {"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "remat2", "pjit", "shard_map"}
    | {"custom_jvp_call", "custom_vjp_call", "core_call", "xla_call", "call"}
)
_TRANSFORM = re.compile(r"\w+\((.*)\)", re.DOTALL)
_XLA_REMAT = re.compile(r"\.remat\d*\b")
_FURTHEST = 6


def phase_of(op_name: str) -> Phase:
    """The phase that an op_name says; forward where it says none."""
    if "transpose(" in op_name:
        return "recompute" if "rematted_computation" in op_name else "backward"
    parts = _components(op_name)
    last = max((place for place, part in enumerate(parts) if "jvp(" in part), default=-1)
    # 1F1B goes backward inside of what JAX differentiates: what stands innermost says, as in `jvp(gradients)/while`.
    within = parts[last].rpartition("(")[2].rstrip(")").split("/") if last >= 0 else []
    if GRADIENTS_SCOPE in (*within, *parts[last + 1 :]):
        return "backward"
    return "update" if UPDATE_SCOPE in parts and last < 0 else "forward"


def scope_of(op_name: str) -> str:
    """The named scopes and the primitive in an op_name: `layers/mlp/dot_general`, with no transformation or loop."""
    words = []
    for part in _components(op_name):
        if part.startswith("jit("):
            continue
        while found := _TRANSFORM.fullmatch(part):
            part = found[1]
        words += [word for word in part.split("/") if word and word not in _PLUMBING]
    return "/".join(words)


def split_op_name(op_name: str) -> tuple[str, ...]:
    """The op_names that XLA joined in one when it combined their instructions.

    It writes `a/(b/x:c/y)/d` for `a/b/x/d` and `a/c/y/d`, or `a/b;a/c`.
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


def described_by(module: Module, instruction: Instruction, *, moves: bool = False) -> Instruction:
    """The instruction whose op_name and source speak for one: itself, or where the compiler left them out, a neighbour.

    The neighbours of an instruction that only `moves` data are its users, then what its operands are made of; of one
    that computes, the other way round: a gather is made for what uses it, a sum by what it adds. After those come the
    instructions that call its computation.
    """
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
    """What is said of one array of an instruction: the path it was made under, and the place in the source."""

    op_name: str
    source: str
    again: bool

    @property
    def phase(self) -> Phase:
        """The phase it is made in; recompute also for what XLA's own rematerialization runs again."""
        phase = phase_of(self.op_name)
        if self.again and phase == "forward":
            return "recompute"
        return phase

    @property
    def place(self) -> str:
        """Source and scopes: `train/step.py:88 (layers/mlp/dot_general)`."""
        scope = scope_of(self.op_name)
        return " ".join(filter(None, (self.source, f"({scope})" if scope else "")))


def describe(
    module: Module, instruction: Instruction, *, number: int = 1, moves: bool = False
) -> tuple[Description, ...]:
    """What is said of each of a number of arrays that an instruction makes.

    XLA joins the op_names of what it combines in the order of their arrays. Where there are not as many, as where the
    TPU compiler keeps that of the last alone, each operand of one that computes speaks for its array; for those of one
    that moves data the first speaks.
    """
    again = bool(_XLA_REMAT.search(instruction.name))  # `fusion.7.remat`
    joined = len(split_op_name(instruction.op_name)) == number
    if not joined and not moves and number == len(instruction.operands) > 1:
        speakers = [described_by(module, operand) for operand in module.operands(instruction)]
        return tuple(Description(split_op_name(one.op_name)[0], one.source, again) for one in speakers)
    speaker = described_by(module, instruction, moves=moves)
    names = split_op_name(speaker.op_name)
    if len(names) != number or not instruction.op_name:
        names = names[:1] * number
    return tuple(Description(name, speaker.source, again) for name in names)


def _nearest(module: Module, instruction: Instruction, *, forward: bool) -> Instruction | None:
    """The nearest instruction with an op_name among the users, or among what the operands are made of."""
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
    """The parts of a path between slashes that no parenthesis encloses."""
    return _split(op_name, "/")


def _split(text: str, separator: str) -> list[str]:
    """A text cut at a separator, where no parenthesis encloses it."""
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
