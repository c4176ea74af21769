"""Collectives that were not requested: the partitioner inserts them because shardings do not match."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from meshwright.description.hlo.dataflow import VIEWS, origin, uses
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.phases import scope_of, split_op_name
from meshwright.proof.inspection.checks.random_bits import RANDOM
from meshwright.proof.inspection.checks.redundant_compute import RedundantCompute
from meshwright.proof.inspection.context import STORED, CompiledCollective, ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.proof.inspection.slices import ELEMENTWISE, gathered_dims
from meshwright.record import Collective, Kind, Phase
from meshwright.units import show_bytes

CONSTRAINS = frozenset({"reshard", "sharding_constraint", "sharding_cast", "mesh_cast", "device_put"})
"""Primitives that request another sharding."""

ASKED_FOR = frozenset(
    {"all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "ragged_all_to_all", "reduce_scatter"}
    | {"psum", "psum_invariant", "psum_scatter", "unreduced_psum", "unreduced_reduce_scatter", "pmax", "pmin", "pmean"}
    | {"ppermute", "pshuffle", "pbroadcast", "pvary", "pcast"}
    | CONSTRAINS
)
"""Primitives that request a collective or another sharding."""

_REARRANGE = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "concatenate", "split", "pad", "rev", "roll"}
    | {"slice", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "scatter-add", "scatter_add", "take"}
)
"""Primitives that move elements along dims: if the dim is sharded, data must follow."""

_NEEDS_WHOLE = frozenset(
    {"fft", "sort", "argsort", "top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
    | {"reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"}
)
"""Primitives that need an unsharded dim, so that the partitioner gathers it; cumulative sums run in windows."""

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
"""Elementwise primitives of one operand: a collective there is due to constraints on both sides."""

_LEAST_SORTED = 1 << 14
"""In bytes. Fewer keys of a sort, as a router's, cost nothing to gather, and are not reported."""

_UNARY = frozenset({"convert", "negate", "abs", "exponential", "log", "tanh", "logistic", "sqrt", "rsqrt"})
"""Opcodes of one operand that may be between a gather and what combines its rows with others."""

_SHARE = 0.01
"""If the expected collectives are unknown: the smallest one reported, as a fraction of all communicated bytes."""


class UnexpectedBecause(StrEnum):
    """The reason why a collective cannot be intended."""

    NOT_EXPECTED = "not expected"
    """The collective is not among the expected ones."""
    MOVES_SPLIT = "moves a split"
    """The partitioner moves a mesh axis from one dim to another."""
    NEEDS_WHOLE = "needs a whole dim"
    """The primitive needs a whole dim of its array, which the partitioner gathers."""
    REARRANGES = "rearranges"
    """The primitive rearranges the sharded dim, so data must follow."""
    GATHERS_BATCH = "gathers the batch"
    """The collective gathers a computed value over an axis that shards the batch."""


@dataclass(frozen=True, kw_only=True)
class UnexpectedCollective(Finding):
    """A collective that was not requested.

    primitive: the JAX primitive that needs it.
    """

    kind = FindingKind.UNPLANNED_COLLECTIVE
    merged_by = ("conflict",)

    collective: Kind
    array: str
    axes: tuple[str, ...]
    phase: Phase
    count: int
    because: UnexpectedBecause
    primitive: str

    @property
    def conflict(self) -> tuple[str, ...]:
        """The key by which findings at one source line are merged: equal if one mistake causes them.

        It is the reason, the primitive and, for a gathered batch, the axes. All moves of data because shardings do not
        fit an op have one key, in the forward and the backward pass.
        """
        if self.is_at_one_line:
            return ("shardings",)
        batch = self.axes if self.because == UnexpectedBecause.GATHERS_BATCH else ()
        return (self.because, "" if self.because == UnexpectedBecause.NOT_EXPECTED else self.primitive, *batch)

    @property
    def is_at_one_line(self) -> bool:
        """Whether shardings do not fit an op: then findings at its line are merged even if their scopes differ."""
        return self.because in (UnexpectedBecause.MOVES_SPLIT, UnexpectedBecause.REARRANGES)

    @property
    def is_of_shardings(self) -> bool:
        """Whether mismatched shardings cause the collective."""
        return self.because not in (UnexpectedBecause.NOT_EXPECTED, UnexpectedBecause.NEEDS_WHOLE)

    def explains(self, other: Finding) -> bool:
        """Whether `other` is redundant compute, by all devices, on a batch that this collective gathers."""
        is_of_batch = self.because == UnexpectedBecause.GATHERS_BATCH
        return is_of_batch and isinstance(other, RedundantCompute) and other.axis in self.axes

    def _sentences(self) -> tuple[str, str]:
        primitive, axes = self.primitive, joined(self.axes)
        because, fix = {
            UnexpectedBecause.NOT_EXPECTED: (
                "no plan has it",
                "compare the shardings of its operands with the plan's",
            ),
            UnexpectedBecause.MOVES_SPLIT: (
                f"the partitioner moves a split from one dim to another to make {primitive}",
                "give the operands of this op shardings that fit each other, or reshard it where that is cheapest",
            ),
            UnexpectedBecause.NEEDS_WHOLE: (
                f"the partitioner does not split {primitive} here, so it gathers what is split",
                f"split a dim along which {primitive} does not run, and call it in shard_map",
            ),
            UnexpectedBecause.REARRANGES: (
                f"{primitive} changes the dim that is split, so the data must follow",
                f"constrain the table to a sharding without {axes} before the lookup, as FSDP gathers weights; or look"
                " up in shard_map"
                if primitive in ("gather", "take", "scatter-add", "scatter_add")
                else f"keep the split dim out of this {primitive}: split another dim before it, or do it in shard_map",
            ),
            UnexpectedBecause.GATHERS_BATCH: (
                "it gathers a computed value over an axis that splits the batch, so every device along it does the rest"
                " for the whole batch",
                f"constrain the operand of {primitive} to stay split over {axes}",
            ),
        }[self.because]
        times = f", {self.count} times" if self.count > 1 else ""
        return (
            f"{self.collective} of {self.array} over {axes} in {self.phase}{times},"
            f" {show_bytes(self.bytes)} a device and step: {because}",
            fix,
        )


def unexpected_collectives(context: ProgramContext) -> Iterator[Finding]:
    """Yield the collectives not in `context.expected`; if that is None, those that are due to mismatched shardings.

    If a computed value is gathered over an axis that splits the batch, later collectives over this axis are merged with
    it: one missing constraint causes them all.
    """
    found = list(_each(context))
    first: dict[tuple[str, ...], int] = {}
    for number, one in enumerate(found):
        if one.because == UnexpectedBecause.GATHERS_BATCH and one.source[:1] not in ("", "("):
            earliest = first.setdefault(one.axes, number)
            if found[earliest].phase != "forward" and one.phase == "forward":
                first[one.axes] = number
    for number, one in enumerate(found):
        if number == first.get(one.axes):
            rest = [other for other in found if other is not one and _follows(other, one)]
            places = dict.fromkeys(other.source for other in rest if other.source and other.source != one.source)
            yield replace(
                one,
                bytes=one.bytes + sum(other.bytes for other in rest),
                cost_seconds=None if one.cost_seconds is None else sum(x.cost_seconds or 0.0 for x in (one, *rest)),
                elsewhere=tuple(places),
            )
        elif one.axes not in first or not _follows(one, found[first[one.axes]]):
            yield one


def _follows(other: UnexpectedCollective, first: UnexpectedCollective) -> bool:
    """Whether a collective follows from `first`, the gather of a batch over the same axes."""
    own = (UnexpectedBecause.NOT_EXPECTED, UnexpectedBecause.NEEDS_WHOLE)
    return other.axes == first.axes and other.because not in own


def _each(context: ProgramContext) -> Iterator[UnexpectedCollective]:
    floor = _SHARE * sum(found.collective.bytes for found in context.collectives)
    for found in context.collectives:
        one, because = found.collective, None
        if context.expected is not None:
            because = None if _is_expected(context.expected, one) else UnexpectedBecause.NOT_EXPECTED
        else:
            because = _because(context, found)
            # What follows from a sort (its rows fetched, the same work on all devices) may cost more than its keys.
            if one.bytes < (_LEAST_SORTED if because == UnexpectedBecause.NEEDS_WHOLE else floor):
                because = None
        if because is not None:
            yield UnexpectedCollective(
                collective=one.kind,
                array=one.array,
                axes=one.axes,
                phase=one.phase,
                count=one.count,
                because=because,
                primitive=primitive_of(found.instruction),
                bytes=one.bytes,
                cost_seconds=one.seconds,
                source=one.source,
            )


def _is_expected(expected: tuple[Collective, ...], found: Collective) -> bool:
    """Whether a collective is among the expected, or is an all-reduce over the joined axes of several of them."""
    alike = [one for one in expected if one.kind == found.kind and one.phase == found.phase]
    axes = set(found.axes)
    covered = {axis for one in alike if set(one.axes) <= axes for axis in one.axes}
    return any(set(one.axes) == axes for one in alike) or (found.kind == "all-reduce" and covered == axes)


def _because(context: ProgramContext, found: CompiledCollective) -> UnexpectedBecause | None:
    """Return the reason why a collective cannot be intended; None if it can be."""
    primitive = primitive_of(found.instruction)
    if not primitive or RANDOM.search(found.instruction.op_name) or primitive in ASKED_FOR or primitive in _ONE_OPERAND:
        return None
    kind = found.collective.kind
    if primitive in _NEEDS_WHOLE:
        is_simulated = primitive == "top_k" and not context.has_reduce_scatter
        dims = gathered_dims(context, found.instruction) if kind == "all-gather" else set[int]()
        last = len(found.instruction.shape.dims) - 1
        # TPUs split a top_k over its rows; CPUs and GPUs do not.
        return None if is_simulated and dims and last not in dims else UnexpectedBecause.NEEDS_WHOLE
    if kind == "all-to-all":
        return UnexpectedBecause.MOVES_SPLIT
    gathers_computed = kind == "all-gather" and not _is_stored(context.source_of(found), context.module)
    if kind == "collective-permute" and primitive in ("slice", "pad") and _is_of_one_sender(context, found):
        return None
    if gathers_computed and _is_of_own_rows(context, found):
        return None
    if primitive in _REARRANGE and (kind == "collective-permute" or gathers_computed):
        return UnexpectedBecause.REARRANGES
    over_batch = bool(context.batch_axes.intersection(found.collective.axes))
    if not gathers_computed or not over_batch:
        return None
    is_meant = _is_added_to_state(context, found.instruction) or _is_compared(context, found)
    return None if is_meant else UnexpectedBecause.GATHERS_BATCH


def _is_of_one_sender(context: ProgramContext, found: CompiledCollective) -> bool:
    """Whether one device along the axes sends its part to another: what the last stage of a pipeline returns, say."""
    pairs = found.instruction.attributes.get("source_target_pairs", "").count("},{") + 1
    return pairs * context.degree(found.collective.axes) <= math.prod(context.mesh.values())


def _is_of_own_rows(context: ProgramContext, found: CompiledCollective) -> bool:
    """Whether indices are gathered that take from each row of the batch an element of its own, as `x[arange(n), y]`.

    TPUs do not gather them, and elsewhere they are small.
    """
    indices = context.source_of(found)
    if indices.opcode != "concatenate" or indices.shape.dtype[:1] not in ("s", "u"):
        return False
    through = frozenset(VIEWS | ELEMENTWISE)
    return origin(context.module, context.module.operand(indices), through).opcode == "iota"


def _is_compared(context: ProgramContext, found: CompiledCollective) -> bool:
    """Whether each device combines rows of its own with all gathered ones, as in a contrastive loss.

    The rows of both are computed from the batch, so the result cannot be split along both of its dims.
    """
    if found.collective.phase != "forward":
        return False  # The backward pass gathers features too, whose products look the same.
    said, before = (found.instruction.op_name, found.collective.axes), context.partitioned
    gathers = (
        [found]
        if before is context
        else [move for move in before.collectives if (move.instruction.op_name, move.collective.axes) == said]
    )
    return bool(gathers) and all(_meets_own_rows(before, move.instruction, set(said[1])) for move in gathers)


def _meets_own_rows(context: ProgramContext, gather: Instruction, axes: set[str]) -> bool:
    """Whether a gathered value is an operand together with one that differs along the axes, in other dims."""
    module, whole = context.module, next(gather.shape.arrays())
    sizes = {whole.dims[dim] for dim in gathered_dims(context, gather)}
    for user, held in uses(module, gather, VIEWS | _UNARY | {"broadcast"}):
        is_larger = math.prod(held.shape.dims) > math.prod(whole.dims)
        if len(user.operands) != 2 or not (user.opcode == "dot" or (is_larger and user.opcode in ELEMENTWISE)):
            continue
        place = user.operands.index(held.name)
        other = module.operand(user, 1 - place)
        summed = re.findall(r"\d+", user.attributes.get(f"{'rl'[place == 0]}hs_contracting_dims", ""))
        is_stored = _is_stored(origin(module, other, STORED), module)
        is_contracted = bool(sizes & {held.shape.dims[int(dim)] for dim in summed})
        if axes <= context.variance.axes(other) and not is_stored and not is_contracted:
            return True
    return False


def _is_added_to_state(context: ProgramContext, gather: Instruction) -> bool:
    """Whether a gathered value only becomes new state, e.g. updates that ZeRO stage 1 computes in shards."""
    root = context.module.root(context.module.entry)
    changes = ((number, context.updates(one).values()) for number, one in enumerate(context.results))
    updated = {number for number, shares in changes if any(share.is_changed for share in shares)}
    used = list(uses(context.module, gather, VIEWS | ELEMENTWISE))
    places = {number for _, held in used for number, name in enumerate(root.operands) if name == held.name}
    return bool(places) and all(user is root for user, _ in used) and places <= updated


def primitive_of(instruction: Instruction) -> str:
    """Return the JAX primitive that needs a collective; '' if the compiler kept no name."""
    return scope_of(split_op_name(instruction.op_name)[0]).rpartition("/")[2]


def _is_stored(source: Instruction, module: Module) -> bool:
    """Whether the origin of a value is an argument of the program (FSDP's weights, say), or a layer of a stack."""
    if source.opcode == "get-tuple-element":  # of the state of a loop over layers
        source = module.operand(source)
    return source.opcode == "parameter"
