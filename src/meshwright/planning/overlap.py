"""Overlap of communication and compute: which collectives can overlap with ops, and the seconds that stay exposed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.description.hardware.fabric import MeshPlacement, lay_mesh
from meshwright.description.hardware.system import System
from meshwright.description.step.layer_inputs import LAYER_COLUMNS
from meshwright.description.step.parameter_tree import IN_USE
from meshwright.description.step.passes.pipeline import KEPT_INPUTS
from meshwright.description.step.rules import RULES
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import Workload, with_remat
from meshwright.mesh import MeshShape, divisors
from meshwright.planning.cost.comm_volume import (
    activation_moves,
    is_of_weights,
    sized_collectives,
    weight_moves,
)
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.cost.rates.collective_time import planned_seconds, stops_ops
from meshwright.planning.cost.rates.ring import is_round_ring, ring_work
from meshwright.planning.cost.seconds import WEIGHT_AXES
from meshwright.record import Collective, Phase

_ELSEWHERE = ("batch", LAYER_COLUMNS, *IN_USE)
CRITICAL = frozenset(axis for name, axes in RULES.items() if name not in _ELSEWHERE for axis in axes) | {"pp"}
"""Mesh axes whose collectives are between two dependent matmuls, so that no op can overlap with them."""

WINDOWS: Mapping[Phase, str] = {"forward": "forward", "recompute": "backward", "backward": "backward"}
"""By phase: the pass whose ops can overlap with the phase's collectives. Recompute is a part of the backward pass.

The update has no such ops.
"""


@dataclass(frozen=True)
class CommunicationTime:
    """Seconds per step that collectives take on the links, grouped by the ops that can overlap with ("hide") them.

    Attributes:
        forward, backward: collectives that any op of that pass can hide.
        once_forward, once_backward: collectives that run once per step, and that only the ops of one microbatch of that
            pass can hide.
        critical_forward, critical_backward: the part of `forward` and `backward` that, if exposed, delays every
            microbatch.
        per_microbatch: collectives that are always exposed and delay every microbatch.
        per_step: collectives that are always exposed, once per step.
        hidden_by_attention: sends of ring attention that the attention of their ring step hides.
    """

    forward: float = 0.0
    backward: float = 0.0
    once_forward: float = 0.0
    once_backward: float = 0.0
    critical_forward: float = 0.0
    critical_backward: float = 0.0
    per_microbatch: float = 0.0
    per_step: float = 0.0
    hidden_by_attention: float = 0.0

    def __add__(self, other: CommunicationTime) -> CommunicationTime:
        return CommunicationTime(
            *(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def __mul__(self, times: float) -> CommunicationTime:
        return CommunicationTime(*(times * seconds for seconds in vars(self).values()))

    def shares(self, forward: float, backward: float, num_microbatches: int = 1) -> dict[str, float]:
        """Return the fraction of each field's seconds that stays exposed, for the fields that ops can hide.

        The keys are forward, backward, once_forward and once_backward. The arguments `forward` and `backward` are the
        seconds per step of each pass's ops; once_ fields overlap only with the ops of one of `num_microbatches`
        microbatches.
        """
        return {
            "forward": _exposed(self.forward, forward),
            "backward": _exposed(self.backward, backward),
            "once_forward": _exposed(self.once_forward, forward / num_microbatches),
            "once_backward": _exposed(self.once_backward, backward / num_microbatches),
        }

    def exposed(self, shares: Mapping[str, float]) -> float:
        """Return the exposed seconds per step of all collectives; shares: the result of the method `shares`."""
        late = sum(share * getattr(self, name) for name, share in shares.items())
        return self.per_microbatch + self.per_step + late

    def hidden(self, shares: Mapping[str, float]) -> float:
        """Return the hidden seconds per step of all collectives; shares: the result of the method `shares`."""
        return self.hidden_by_attention + sum((1 - share) * getattr(self, name) for name, share in shares.items())

    def exposed_per_microbatch(self, shares: Mapping[str, float]) -> float:
        """Return the exposed seconds that delay every microbatch, summed over microbatches; shares: as in `exposed`."""
        late = shares["forward"] * self.critical_forward + shares["backward"] * self.critical_backward
        return self.per_microbatch + late


_SHAPE = ("num_microbatches", "virtual_stages", "schedule")
"""Strategy fields that affect only the microbatch schedule."""

NO_COMMUNICATION = CommunicationTime()
"""The communication time of a step without collectives."""

NO_RING: Mapping[Phase, float] = {}
"""The exposed fractions of ring attention's sends, by phase, for a step without such sends."""


def communication_time(
    moves: Iterable[tuple[Collective, bool]],
    layout: MeshPlacement,
    strategy: Strategy,
    ring_shares: Mapping[Phase, float] = NO_RING,
) -> CommunicationTime:
    """Return the communication time of some collectives.

    Args:
        moves: pairs (collective, whether it runs once per step and not once per microbatch).
        layout: the mesh laid over its system.
        strategy: how the step runs.
        ring_shares: the exposed fraction of ring attention's sends, by phase.
    """
    sums = dict.fromkeys(vars(CommunicationTime()), 0.0)
    for move, is_once in moves:
        seconds, critical = _sent_seconds(move, layout, strategy), is_critical(move)
        if is_round_ring(move):
            sums["per_microbatch"] += ring_shares[move.phase] * seconds
            sums["hidden_by_attention"] += (1 - ring_shares[move.phase]) * seconds
        elif can_hide(move, layout, strategy, is_once=is_once):
            sums[_field_name(move, strategy, is_once=is_once)] += seconds
            if critical:
                sums[f"critical_{WINDOWS[move.phase]}"] += seconds
        else:
            sums["per_microbatch" if critical and move.phase != "update" else "per_step"] += seconds
    return CommunicationTime(**sums)


def _sent_seconds(move: Collective, layout: MeshPlacement, strategy: Strategy) -> float:
    """Return the seconds per step of a collective, plus the framework's start-up time of each run over tp."""
    start = strategy.profile.tp_start_seconds * layout.degrees.get("tp", 1) if move.axes == ("tp",) else 0.0
    return planned_seconds(move, layout) + move.count * start


def _field_name(move: Collective, strategy: Strategy, *, is_once: bool) -> str:
    """Return the name of the `CommunicationTime` field to which a collective that ops can hide is added."""
    name = WINDOWS[move.phase]
    return f"once_{name}" if is_once and strategy.profile.once_collectives == "microbatch" else name


def ring_shares(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> Mapping[Phase, float]:
    """Return the fraction of the time of ring attention's sends that attention does not hide, by phase."""
    step, sends = train_step(workload, mesh, strategy), dict[Phase, dict[str, float]]()
    round_ring = filter(is_round_ring, step.communication)
    for op, move in sized_collectives(round_ring, step, workload, strategy, "useful"):
        what = "gradients" if op.gradient_of else "keys"
        each = sends.setdefault(move.phase, {"keys": 0.0, "gradients": 0.0})
        each[what] += planned_seconds(move, lay_mesh(system, mesh.layout)) / move.count
    if not sends:
        return NO_RING
    work = ring_work(workload, mesh, system, strategy)
    return {phase: work.exposed_share(phase, **each) for phase, each in sends.items()}


def timed_collectives(
    moves: Iterable[tuple[Collective, bool]],
    layout: MeshPlacement,
    shares: Mapping[str, float],
    ring_shares: Mapping[Phase, float],
    strategy: Strategy,
) -> Iterator[Collective]:
    """Yield each collective with its seconds and its exposed seconds per step.

    moves, ring_shares: as in `communication_time`. shares: from `CommunicationTime.shares`.
    """
    for move, is_once in moves:
        seconds = _sent_seconds(move, layout, strategy)
        if is_round_ring(move):
            share = ring_shares[move.phase]
        elif can_hide(move, layout, strategy, is_once=is_once):
            share = shares[_field_name(move, strategy, is_once=is_once)]
        else:
            share = 1.0
        yield replace(move, seconds=seconds, exposed_seconds=share * seconds)


def step_communication(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> CommunicationTime:
    """Return the communication time of all collectives of a step."""
    # GPipe's stages run in lockstep and gather an embedding table twice, so with pp the schedule matters.
    shape = _SHAPE if mesh.pp == 1 else _SHAPE[:1]
    once, each = _weight_communication(with_remat(workload, "none"), mesh, system, _without(strategy, shape))
    activations = _activation_communication(workload, mesh, system, _without(strategy, ("zero_stage",)))
    return once + each * strategy.num_microbatches + activations


def least_communication(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> CommunicationTime:
    """Return a lower bound of the communication time of all collectives of a step, cheap to compute.

    It is `least_weight_communication`, plus the exposed activation collectives as if the step had a single microbatch:
    several microbatches send the same bytes in smaller messages, at no higher bandwidth.
    """
    whole = _without(strategy, ("num_microbatches", "virtual_stages", "schedule", "zero_stage"))
    seconds = _activation_communication(workload, mesh, system, whole).per_microbatch
    return replace(least_weight_communication(workload, mesh, system, strategy), per_microbatch=seconds)


def least_weight_communication(
    workload: Workload, mesh: MeshShape, system: System, strategy: Strategy
) -> CommunicationTime:
    """Return a lower bound of the communication time of weight gathers and gradient reductions, cheap to compute.

    It assumes that links send gathered weights and their gradients at full rate and without latency.
    """
    stored = tuple(axis for axis in RULES["embed"] if mesh.degree(axis) > 1)
    if not stored or not strategy.profile.overlaps_weights:
        return NO_COMMUNICATION
    rate = _gather_rate(lay_mesh(system, mesh.layout), stored)
    # Gathered bytes are the same for every degree of fsdp above 1, so the smallest such degree is the cache key.
    split = {axis: mesh.degree(axis) for axis in (*WEIGHT_AXES, "pp")}
    ends = MeshShape(fsdp=divisors(mesh.degree(RULES["embed"]))[1], **split)
    once, each = _gathered_bytes(with_remat(workload, "none"), ends, _without(strategy, _SHAPE))
    times = strategy.num_microbatches
    forward, backward = ((a + times * b) / rate for a, b in zip(once, each, strict=True))
    return CommunicationTime(forward=forward, backward=backward)


@lru_cache(maxsize=1 << 15)
def _activation_communication(
    workload: Workload, mesh: MeshShape, system: System, strategy: Strategy
) -> CommunicationTime:
    """Return the communication time of activation collectives and of the reductions in the loss, cached.

    The caller resets strategy fields without effect to their defaults, so that equal steps share a cache entry.
    """
    moves = activation_moves(workload, mesh, strategy)
    shares = ring_shares(workload, mesh, system, strategy)
    return communication_time(moves, lay_mesh(system, mesh.layout), strategy, shares)


@lru_cache(maxsize=1 << 14)
def _weight_communication(
    workload: Workload, mesh: MeshShape, system: System, strategy: Strategy
) -> tuple[CommunicationTime, CommunicationTime]:
    """Return the communication time of weight gathers and gradient reductions in two parts, cached.

    The first is for the collectives that run once per step, the second for those of one microbatch.
    """
    layout = lay_mesh(system, mesh.layout)
    # Interleaved stages process microbatches in groups of pp. With two groups, gradients are summed over microbatches.
    group = 2 * (mesh.pp if strategy.virtual_stages > 1 else 1)
    moves = weight_moves(workload, mesh, replace(strategy, num_microbatches=group))
    once, each = (
        communication_time((m for m in moves if m[1] is is_once), layout, strategy) for is_once in (True, False)
    )
    return once, each * (1 / group)


@lru_cache(maxsize=1 << 14)
def _gather_rate(layout: MeshPlacement, axes: tuple[str, ...]) -> float:
    """Return the bytes per second of an all-gather or reduce-scatter over some axes, at full rate without latency."""
    return 1 / collective_seconds("all-gather", 1.0, layout.placement(axes)).bandwidth_seconds


@lru_cache(maxsize=1 << 12)
def _gathered_bytes(
    workload: Workload, mesh: MeshShape, strategy: Strategy
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the bytes of weight gathers and gradient reduce-scatters over fsdp: two pairs (in forward, in backward).

    The first pair counts the collectives that run once per step, the second those of one microbatch.
    """
    sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for move, is_once in weight_moves(workload, mesh, replace(strategy, num_microbatches=2)):
        if is_of_weights(move) and move.phase in WINDOWS:
            sums[is_once][WINDOWS[move.phase] == "backward"] += move.bytes
    (forward, backward), (forward_each, backward_each) = sums[True], sums[False]
    return (forward, backward), (forward_each / 2, backward_each / 2)


@lru_cache(maxsize=1 << 12)
def _without(strategy: Strategy, fields: tuple[str, ...]) -> Strategy:
    """Return the strategy with the default values of some fields: a cache key for results that ignore these fields."""
    return replace(strategy, **{field: getattr(DEFAULT, field) for field in fields})


def can_hide(move: Collective, layout: MeshPlacement, strategy: Strategy, *, is_once: bool) -> bool:
    """Whether ops can overlap with a collective.

    No op overlaps with an all-reduce that the TPU compiler emits for a reduce-scatter or an all-gather
    (`benchmarks/planned_steps.py`).

    is_once: whether the collective runs once per step and not once per microbatch.
    """
    if stops_ops(move, layout):
        return False
    if is_once and strategy.profile.once_collectives == "exposed":
        return False
    if move.kind == "all-reduce" and move.phase == "backward" and not strategy.profile.overlaps_gradients:
        return False
    if move.kind in ("all-gather", "reduce-scatter") and not strategy.profile.overlaps_weights:
        return False
    if not is_critical(move):
        return True
    if move.axes == ("pp",) and strategy.profile.overlaps_sends and strategy.virtual_stages > 1:
        return True
    # A collective matmul overlaps with permutes over tp; if tp does not split the residual stream, with every
    # collective over tp.
    in_steps = move.kind == "collective-permute" or strategy.tp_stream == "whole"
    return strategy.collective_matmul and move.axes == ("tp",) and move.phase != "update" and in_steps


def is_critical(move: Collective) -> bool:
    """Whether the next op needs the collective's result: a matmul needs activations, the update the gradient norm."""
    return move.phase == "update" or (CRITICAL.issuperset(move.axes) and move.array != KEPT_INPUTS)


def _exposed(wanted: float, free: float) -> float:
    """Return the exposed fraction of `wanted` seconds of collectives that overlap with `free` seconds of ops."""
    return max(0.0, 1 - free / wanted) if wanted else 0.0
