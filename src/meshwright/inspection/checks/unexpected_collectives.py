"""Collectives that nobody asked for: what the partitioner moves because two shardings do not fit together."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.hlo import Instruction, scope_of, split_op_name
from meshwright.inspection.finding import Finding
from meshwright.inspection.subject import Move, Subject
from meshwright.record import Collective
from meshwright.units import show_bytes

_ASKED_FOR = frozenset(
    {"all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "ragged_all_to_all", "reduce_scatter"}
    | {"psum", "psum_invariant", "psum_scatter", "unreduced_psum", "unreduced_reduce_scatter", "pmax", "pmin", "pmean"}
    | {"ppermute", "pshuffle", "pbroadcast", "pvary", "pcast"}
    | {"reshard", "sharding_constraint", "sharding_cast", "mesh_cast", "device_put"}
)
"""The primitives with which a program asks for a collective or for another sharding."""

_REARRANGE = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "concatenate", "split", "pad", "rev", "roll"}
    | {"slice", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "scatter-add", "scatter_add", "take"}
    | {"sort", "argsort", "cumsum"}
)
"""The primitives that change which element stands where: the split dim ends up elsewhere, and data must follow."""

_ONE_OPERAND = frozenset(
    {
        "convert_element_type",
        "copy",
        "neg",
        "abs",
        "sign",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "sqrt",
        "rsqrt",
        "cbrt",
    }
    | {"sin", "cos", "tan", "tanh", "logistic", "erf", "integer_pow", "square", "floor", "ceil", "round", "name"}
)
"""Primitives that work element by element on one operand: a move there is what constraints on both sides ask for."""

_SHARE = 0.01
"""A share of all bytes that are sent below which a move is left alone where nothing is said of what was meant."""


def unplanned_collectives(subject: Subject) -> Iterator[Finding]:
    """Collectives that are not expected; where nothing is, those that give away two shardings that do not fit."""
    if subject.expected is not None:
        for move in subject.moves:
            if not _is_expected(subject.expected, move.collective):
                yield _finding(subject, move, "no plan has it", "compare the shardings of its operands with the plan's")
        return
    floor = _SHARE * sum(move.collective.bytes for move in subject.moves)
    for move in subject.moves:
        if move.collective.bytes >= floor and (reason := _reason(subject, move)):
            yield _finding(subject, move, *reason)


def _is_expected(expected: tuple[Collective, ...], found: Collective) -> bool:
    """Whether a collective is one of the expected ones, or an all-reduce over the axes of several of them at once."""
    alike = [one for one in expected if one.kind == found.kind and one.phase == found.phase]
    axes = set(found.axes)
    covered = {axis for one in alike if set(one.axes) <= axes for axis in one.axes}
    return any(set(one.axes) == axes for one in alike) or (found.kind == "all-reduce" and covered == axes)


def _reason(subject: Subject, move: Move) -> tuple[str, str] | None:
    """Why a collective cannot have been meant, and what to do; None where it can."""
    primitive = _primitive(move.instruction)
    if not primitive or primitive in _ASKED_FOR or primitive in _ONE_OPERAND:
        return None
    kind, batch = move.collective.kind, subject.batch_axes
    if kind == "all-to-all":
        return (
            f"the partitioner moves a split from one dim to another to make {primitive}",
            "give the operands of this op shardings that fit each other, or reshard on purpose where it is cheapest",
        )
    follows = kind == "collective-permute" or (kind == "all-gather" and not _is_stored(subject, move))
    if primitive in _REARRANGE and follows:
        return (
            f"{primitive} changes the dim that is split, so the data must follow",
            f"keep the split dim out of this {primitive}: split another dim before it, or do it in shard_map",
        )
    if kind == "all-gather" and batch.intersection(move.collective.axes) and not _is_stored(subject, move):
        return (
            "it gathers a computed value over an axis that splits the batch, so every device along it does the rest"
            " for the whole batch",
            f"constrain the operand of {primitive} to stay split over {'*'.join(move.collective.axes)}",
        )
    return None


def _finding(subject: Subject, move: Move, reason: str, fix: str) -> Finding:
    """What a collective that was not meant costs."""
    one = move.collective
    times = f", {one.count} times" if one.count > 1 else ""
    return Finding(
        kind="unplanned collective",
        evidence=f"{one.kind} of {one.array} over {'*'.join(one.axes)} in {one.phase}{times},"
        f" {show_bytes(one.bytes)} a device and step: {reason}",
        bytes=one.bytes,
        seconds=one.seconds,
        source=one.source,
        fix=fix,
    )


def _primitive(instruction: Instruction) -> str:
    """The JAX primitive that a collective is made for; '' where the compiler kept none, as of many for constraints."""
    return scope_of(split_op_name(instruction.op_name)[0]).rpartition("/")[2]


def _is_stored(subject: Subject, move: Move) -> bool:
    """Whether a collective moves an argument of the program, as FSDP gathers its weights."""
    return subject.source_of(move).opcode == "parameter" or _comes_from_loop(subject, move)


def _comes_from_loop(subject: Subject, move: Move) -> bool:
    """Whether the value is one layer of a stack that a loop goes through: an argument of the loop's body."""
    source = subject.source_of(move)
    if source.opcode != "get-tuple-element":
        return False
    return subject.module.operand(source).opcode == "parameter"
