"""Thresholds near a plan: the chips and the batch at which its bound changes, and the longest sequences that fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from meshwright.description.step.legality import check_mesh, learned_positions
from meshwright.description.step.rules import RULES, stream_rules
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.plan import Plan, make_plan
from meshwright.planning.search import find_best
from meshwright.planning.why.fact import Fact
from meshwright.planning.why.gap import dearest_axes
from meshwright.planning.why.step import data_axes, local_tokens, wanted_tokens
from meshwright.record import Bound
from meshwright.units import show_bytes, show_percent

FACTORS = (2, 4, 8, 16, 32, 64)
"""The factors by which chips, batch and sequence length are changed."""


@dataclass(frozen=True)
class Exposure(Fact):
    """The exposed communication of a plan."""

    axes: tuple[str, ...]
    """The mesh axes with the longest exposed communication.

    If `wanted` is not 0, the axes over which weights are gathered or gradients reduced.
    """
    share: float
    """Exposed communication over all axes, as a fraction of the step."""
    tokens: int = 0
    """Tokens that a device of the plan processes between two collectives over `axes`; 0 if `wanted` is 0."""
    wanted: int = 0
    """Tokens per device that would hide the communication over `axes`; 0 if too few tokens are not the reason."""

    def __str__(self) -> str:
        over, exposed = "*".join(self.axes), f"{show_percent(self.share)} of the step exposed"
        if self.wanted:
            return f"on {over}: {self.tokens:,} tokens per device < {self.wanted:,}, {exposed}"
        return f"on {over}: {exposed}"


class BoundChange(StrEnum):
    """Whether the bound of a plan changes with more chips or another batch."""

    ALREADY = "already communication bound"
    CHANGES = "changes"
    STAYS = "stays"
    NOT_LEGAL = "stays until it is no longer legal"


@dataclass(frozen=True)
class MoreChips(Fact):
    """The number of chips at which a plan becomes communication bound with the same batch, if there is one."""

    change: BoundChange
    bound: Bound | None
    """The resource that limits the plan with these chips."""
    factor: int = 1
    """The chips at which the bound changes, or the last ones tried, divided by the plan's chips."""
    chips: int = 0
    exposure: Exposure | None = None
    by_rule: bool = False
    """Whether the plan is communication bound only by the rule of thumb for tokens per device, not in its step."""
    reason: str = ""
    """Why more chips are not possible."""

    def __str__(self) -> str:
        match self.change:
            case BoundChange.ALREADY:
                by_rule = "by the rule of thumb " if self.by_rule else ""
                return f"{by_rule}communication bound already {self.exposure}"
            case BoundChange.CHANGES:
                return f"at {self.factor}x the chips ({self.chips:,}) this becomes communication bound {self.exposure}"
            case BoundChange.NOT_LEGAL:
                return f"up to {self.chips:,} chips it stays {self.bound} bound; beyond: {self.reason}"
            case BoundChange.STAYS:
                return f"at {self.factor}x the chips ({self.chips:,}) it is {self.bound} bound still"


@dataclass(frozen=True)
class OtherBatch(Fact):
    """The batch at which a plan on the same chips becomes communication bound, or is no longer so.

    A communication-bound plan is tried with larger batches, any other with smaller ones.
    """

    change: BoundChange
    batch: int
    """The batch, in sequences, at which the bound changes, or the last one tried."""
    is_larger: bool
    """Whether larger batches than the plan's are tried."""
    bound: Bound | None
    """The resource that limits the plan at `batch`."""
    tokens: int = 0
    """Tokens per device at `batch`."""
    exposure: Exposure | None = None
    """The exposed communication at `batch`, if the plan becomes communication bound."""

    def __str__(self) -> str:
        if self.change is BoundChange.CHANGES:
            becomes = f"{self.bound} bound there too, with {self.tokens:,} tokens per device"
            if self.exposure:
                becomes = f"communication bound {self.exposure}"
            return f"at a batch of {self.batch:,} this becomes {becomes}"
        if self.change is BoundChange.NOT_LEGAL:
            return f"no smaller batch than {self.batch:,} can be split on this mesh"
        way = "up" if self.is_larger else "down"
        return f"{way} to a batch of {self.batch:,} it stays {self.bound} bound on this mesh"


class SequenceLimit(StrEnum):
    """What prevents longer sequences."""

    NONE = "fits still"
    MEMORY = "memory"
    POSITIONS = "positions"
    MESH = "mesh"
    ALREADY = "does not fit as it is"


@dataclass(frozen=True)
class LongerSequences(Fact):
    """The longest sequences with which a plan fits in memory, and what prevents longer ones."""

    limit: SequenceLimit
    seq_len: int = 0
    """The first length tried that does not fit, if memory is the limit; else the longest that fits."""
    peak_bytes: int = 0
    """Peak memory on one device at `seq_len`, if memory is the limit."""
    usable_bytes: float = 0.0
    model: str = ""
    positions: int = 0
    """Learned positions of the model."""
    reason: str = ""
    """Why the mesh cannot split longer sequences."""

    def __str__(self) -> str:
        match self.limit:
            case SequenceLimit.ALREADY:
                return "it does not fit as it is"
            case SequenceLimit.POSITIONS:
                return f"sequences of {self.seq_len:,} tokens fit; {self.model} has {self.positions:,} positions"
            case SequenceLimit.MESH:
                return f"sequences up to {self.seq_len:,} tokens fit; beyond: {self.reason}"
            case SequenceLimit.MEMORY:
                amount = f"{show_bytes(self.peak_bytes)} of {show_bytes(self.usable_bytes)}"
                return f"at {self.seq_len:,} tokens a sequence it no longer fits: {amount}"
            case SequenceLimit.NONE:
                return f"sequences of {self.seq_len:,} tokens fit still"


NearbyFact = MoreChips | OtherBatch | LongerSequences


def nearby(plan: Plan) -> tuple[NearbyFact, ...]:
    """Return the thresholds near a plan: of chips, batch and sequence length.

    The strategy stays the same. More chips go to fsdp, or to dp if fsdp is 1. With longer sequences there are more
    microbatches, so that tokens per microbatch stay the same.
    """
    return (_more_chips(plan), _batch(plan), _longer(plan))


def chips_that_fit(plan: Plan) -> Plan | None:
    """Return the best plan that fits, on the fewest chips: the plan's times one of `FACTORS`. None if none fits."""
    choices = {"attention": plan.strategy.attention, "optimizer": plan.strategy.optimizer}
    is_run = not plan.planned_only
    for factor in FACTORS:
        try:
            system = plan.system.resized(factor * plan.system.num_chips)
            found = find_best(plan.workload, system, remats=(plan.workload.remat,), is_runnable=is_run, **choices)
        except MeshwrightError:
            continue
        if found.predicted.fits:
            return found
    return None


def is_communication_bound(plan: Plan) -> bool:
    """Whether a plan is communication bound, by its predicted step or by the rule of thumb for tokens per device."""
    axes = data_axes(plan)
    by_rule = bool(axes) and local_tokens(plan) < wanted_tokens(plan, axes)
    return by_rule or plan.predicted.bound == "communication"


def _more_chips(plan: Plan) -> MoreChips:
    bound = plan.predicted.bound
    if is_communication_bound(plan):
        return MoreChips(BoundChange.ALREADY, bound, exposure=_exposure(plan), by_rule=bound != "communication")
    axis = "fsdp" if plan.mesh.fsdp > 1 else "dp"
    last, factor = plan, 1
    for factor in FACTORS:
        try:
            last = _plan(plan, mesh=replace(plan.mesh, **{axis: factor * plan.mesh.degree(axis)}), factor=factor)
        except MeshwrightError as error:
            return MoreChips(
                BoundChange.NOT_LEGAL, last.predicted.bound, factor, last.system.num_chips, reason=str(error)
            )
        if is_communication_bound(last):
            return MoreChips(BoundChange.CHANGES, last.predicted.bound, factor, last.system.num_chips, _exposure(last))
    return MoreChips(BoundChange.STAYS, last.predicted.bound, factor, last.system.num_chips)


def _batch(plan: Plan) -> OtherBatch:
    is_bound = is_communication_bound(plan)
    last = plan
    for factor in FACTORS:
        batch = plan.workload.batch * factor if is_bound else plan.workload.batch // factor
        try:
            last = _plan(plan, workload=replace(plan.workload, batch=max(1, batch)))
        except MeshwrightError:
            break
        if is_communication_bound(last) != is_bound:
            exposure = None if is_bound else _exposure(last)
            return OtherBatch(BoundChange.CHANGES, batch, is_bound, last.predicted.bound, local_tokens(last), exposure)
    change = BoundChange.NOT_LEGAL if last is plan else BoundChange.STAYS
    return OtherBatch(change, last.workload.batch, is_bound, "communication" if is_bound else plan.predicted.bound)


def _longer(plan: Plan) -> LongerSequences:
    if not plan.predicted.fits:
        return LongerSequences(SequenceLimit.ALREADY)
    model, last = plan.workload.model, plan
    most = learned_positions(model)
    for factor in FACTORS:
        seq_len = factor * plan.workload.seq_len
        if most is not None and seq_len > most:
            return LongerSequences(SequenceLimit.POSITIONS, last.workload.seq_len, model=model.name, positions=most)
        try:
            last = _plan(plan, workload=replace(plan.workload, seq_len=seq_len), parts=factor)
        except MeshwrightError as error:
            return LongerSequences(SequenceLimit.MESH, seq_len // 2, reason=str(error))
        if not last.predicted.fits:
            peak = last.predicted.memory_bytes["peak"]
            return LongerSequences(SequenceLimit.MEMORY, seq_len, peak, plan.system.plannable_bytes)
    return LongerSequences(SequenceLimit.NONE, last.workload.seq_len)


def _plan(
    plan: Plan, *, workload: Workload | None = None, mesh: MeshShape | None = None, factor: int = 1, parts: int = 1
) -> Plan:
    """Return a variant of a plan, with the same strategy. Raises if it is not legal.

    Args:
        plan: the plan.
        workload: another workload.
        mesh: another mesh.
        factor: by how much to multiply the chips.
        parts: by how much to multiply the number of microbatches, as far as the batch allows.
    """
    system = plan.system if factor == 1 else plan.system.resized(factor * plan.system.num_chips)
    read, shape = workload or plan.workload, mesh or plan.mesh
    shards = shape.degree(RULES["batch"])
    if read.batch % shards:
        raise MeshwrightError(f"a batch of {read.batch:,} sequences cannot be split over {shards:,} devices")
    check_mesh(read, shape, stream_rules(plan.strategy.tp_stream))
    each = read.batch // shards
    strategy = plan.strategy
    fewer = replace(strategy, num_microbatches=math.gcd(each, parts * strategy.num_microbatches))
    if fewer.reference_mesh is not None and factor > 1:
        # More chips have more copies of the reference.
        own = fewer.reference_mesh
        fewer = replace(fewer, reference_mesh=replace(own, dp=factor * own.dp))
    if fewer.num_microbatches % shape.pp:
        fewer = replace(fewer, virtual_stages=1)
    return make_plan(read, shape, system, fewer)


def _exposure(plan: Plan) -> Exposure:
    share = plan.predicted.breakdown_seconds["exposed communication"] / (plan.predicted.step_seconds or 1.0)
    axes = data_axes(plan)
    if axes and (tokens := local_tokens(plan)) < (wanted := wanted_tokens(plan, axes)):
        return Exposure(axes, share, tokens, wanted)
    return Exposure(dearest_axes(plan.predicted), share)
