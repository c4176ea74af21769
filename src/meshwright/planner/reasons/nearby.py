"""The thresholds near a plan: at how many more chips, at what batch and sequence length something else binds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planner.plan import Plan, make_plan
from meshwright.planner.reasons.fact import Fact
from meshwright.planner.reasons.gap import dearest_axes
from meshwright.planner.reasons.step import data_axes, local_tokens, wanted_tokens
from meshwright.planner.search import find_best
from meshwright.record import Bound
from meshwright.step import RULES, Workload, check_mesh, learned_positions, stream_rules
from meshwright.units import show_bytes, show_percent

MAX_FACTOR = 64
"""The largest factor that is looked at."""


@dataclass(frozen=True)
class Exposure(Fact):
    """Where communication is exposed, for what share of the step; tokens beside wanted ones where too few are why."""

    axes: tuple[str, ...]
    share: float
    tokens: int = 0
    wanted: int = 0

    def __str__(self) -> str:
        over, exposed = "*".join(self.axes), f"{show_percent(self.share)} of the step exposed"
        if self.wanted:
            return f"on {over}: {self.tokens:,} tokens a device < {self.wanted:,}, {exposed}"
        return f"on {over}: {exposed}"


class BoundChange(StrEnum):
    """What happens to what binds a plan on the way to more chips, another batch or longer sequences."""

    ALREADY = "already communication bound"
    CHANGES = "changes"
    STAYS = "stays"
    NOT_LEGAL = "stays until it is no longer legal"


@dataclass(frozen=True)
class MoreChips(Fact):
    """At how many chips, for the same batch, a plan becomes communication bound.

    by_rule: whether by the rule of thumb alone. reason: why more chips are not legal.
    """

    change: BoundChange
    bound: Bound | None
    factor: int = 1
    chips: int = 0
    exposure: Exposure | None = None
    by_rule: bool = False
    reason: str = ""

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
    """At which batch, on the same chips, a plan turns from compute to communication bound or back.

    batch: the one at which it turns, or the last that was tried. tokens: of a device there.
    """

    change: BoundChange
    batch: int
    is_larger: bool
    bound: Bound | None
    tokens: int = 0
    exposure: Exposure | None = None

    def __str__(self) -> str:
        if self.change is BoundChange.CHANGES:
            becomes = f"{self.bound} bound by that too, with {self.tokens:,} tokens a device"
            if self.exposure:
                becomes = f"communication bound {self.exposure}"
            return f"at a batch of {self.batch:,} this becomes {becomes}"
        if self.change is BoundChange.NOT_LEGAL:
            return f"no smaller batch than {self.batch:,} can be shared out on this mesh"
        way = "up" if self.is_larger else "down"
        return f"{way} to a batch of {self.batch:,} it stays {self.bound} bound on this mesh"


class SequenceLimit(StrEnum):
    """What ends longer sequences."""

    NONE = "fits still"
    MEMORY = "memory"
    POSITIONS = "positions"
    MESH = "mesh"
    ALREADY = "does not fit as it is"


@dataclass(frozen=True)
class LongerSequences(Fact):
    """Up to which sequence length a plan fits, and what ends it.

    seq_len: the first that does not fit where memory ends it, else the last that does. positions: learned ones.
    """

    limit: SequenceLimit
    seq_len: int = 0
    peak_bytes: int = 0
    usable_bytes: float = 0.0
    model: str = ""
    positions: int = 0
    reason: str = ""

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
    """What changes the answer: at how many chips and at what batch something else binds, and the length from which it
    does not fit.

    The way a plan runs is kept; but fsdp, or else dp, takes more chips, and microbatches are as many as keep their
    tokens, where a device has the sequences for it.
    """
    return (_more_chips(plan), _batch(plan), _longer(plan))


def chips_that_fit(plan: Plan) -> Plan | None:
    """The best plan on the fewest chips, by factors of 2, on which a plan fits; None up to `MAX_FACTOR`."""
    choices = {"attention": plan.strategy.attention, "optimizer": plan.strategy.optimizer}
    is_run = not plan.planned_only
    for factor in _factors():
        try:
            system = plan.system.resized(factor * plan.system.num_chips)
            found = find_best(plan.workload, system, remats=(plan.workload.remat,), is_runnable=is_run, **choices)
        except MeshwrightError:
            continue
        if found.predicted.fits:
            return found
    return None


def is_communication_bound(plan: Plan) -> bool:
    """Whether collectives take longer than what hides them: those of weights and gradients by the rule, or the step."""
    axes = data_axes(plan)
    by_rule = bool(axes) and local_tokens(plan) < wanted_tokens(plan, axes)
    return by_rule or plan.predicted.bound == "communication"


def _more_chips(plan: Plan) -> MoreChips:
    """The first factor of chips, for the same batch, at which a plan is communication bound."""
    bound = plan.predicted.bound
    if is_communication_bound(plan):
        return MoreChips(BoundChange.ALREADY, bound, exposure=_exposure(plan), by_rule=bound != "communication")
    axis = "fsdp" if plan.mesh.fsdp > 1 else "dp"
    last, factor = plan, 1
    for factor in _factors():
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
    """The batch on the same chips at which a plan changes sides between compute and communication."""
    is_bound = is_communication_bound(plan)
    last = plan
    for factor in _factors():
        batch = plan.workload.batch * factor if is_bound else plan.workload.batch // factor
        try:
            last = _plan(plan, workload=replace(plan.workload, batch=max(1, batch)))
        except MeshwrightError:
            break
        if is_communication_bound(last) != is_bound:
            exposure = None if is_bound else _exposure(last)
            return OtherBatch(BoundChange.CHANGES, batch, is_bound, last.predicted.bound, local_tokens(last), exposure)
    turn = BoundChange.NOT_LEGAL if last is plan else BoundChange.STAYS
    return OtherBatch(turn, last.workload.batch, is_bound, "communication" if is_bound else plan.predicted.bound)


def _longer(plan: Plan) -> LongerSequences:
    """The sequence length from which a plan does not fit."""
    if not plan.predicted.fits:
        return LongerSequences(SequenceLimit.ALREADY)
    model, last = plan.workload.model, plan
    most = learned_positions(model)
    for factor in _factors():
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
    """A plan with another workload, or another mesh on `factor` times the chips; of `parts` times the microbatches."""
    system = plan.system if factor == 1 else plan.system.resized(factor * plan.system.num_chips)
    read, shape = workload or plan.workload, mesh or plan.mesh
    shards = shape.degree(RULES["batch"])
    if read.batch % shards:
        raise MeshwrightError(f"a batch of {read.batch:,} sequences cannot be shared out over {shards:,} devices")
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
    """Over which axes communication is exposed, why, and for how much of the step."""
    share = plan.predicted.breakdown_seconds["exposed communication"] / (plan.predicted.step_seconds or 1.0)
    axes = data_axes(plan)
    if axes and (tokens := local_tokens(plan)) < (wanted := wanted_tokens(plan, axes)):
        return Exposure(axes, share, tokens, wanted)
    return Exposure(dearest_axes(plan.predicted), share)


def _factors() -> Iterator[int]:
    """The factors that are looked at: 2, 4, 8, …"""
    factor = 2
    while factor <= MAX_FACTOR:
        yield factor
        factor *= 2
