"""Predict a train step: the record of a workload on one mesh of a system with one strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from meshwright.description.hardware.fabric import MeshPlacement, lay_mesh
from meshwright.description.hardware.system import System
from meshwright.description.step.blocks import program
from meshwright.description.step.legality import has_reference
from meshwright.description.step.padding import padding_notes
from meshwright.description.step.passes.pipeline import is_shared_before, pre_pipeline_stack
from meshwright.description.step.rules import RULES, rules_of
from meshwright.description.step.strategy import DEFAULT, STAGES_APART, Strategy
from meshwright.description.step.token_routing import device_blocks, dropless_padding
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import step_collectives, step_moves
from meshwright.planning.cost.flops import model_flops, step_flops
from meshwright.planning.cost.gpu_pool import pool_notes
from meshwright.planning.cost.memory import host_bytes, offloaded_bytes, step_memory
from meshwright.planning.cost.rates.achieved import contention_seconds, straggling_seconds
from meshwright.planning.cost.rates.borrowed import borrowed_notes
from meshwright.planning.cost.rates.collective_time import planned_seconds
from meshwright.planning.cost.rates.hbm import hbm_bytes
from meshwright.planning.cost.seconds import buffer_seconds, microbatch_seconds, update_seconds
from meshwright.planning.overlap import (
    NO_COMMUNICATION,
    CommunicationTime,
    communication_time,
    ring_shares,
    step_communication,
    timed_collectives,
)
from meshwright.planning.reference import reference_seconds, timed_reference_collectives
from meshwright.record import Bound, Collective, Record, merge
from meshwright.units import show_bytes

ROUTING_SHARE = 0.1
"""Fraction of a device's memory from which a note says that experts' rows take it."""

SIMULATED = "simulated devices share one machine's cores, so times on cpu are an indication"


def predict(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> Record:
    """Return the predicted record of a train step.

    Activation collectives are exposed, except for those over tp that collective matmuls hide and those over sp that
    ring attention hides. Weight gathers and gradient reductions overlap with the ops of their pass; the seconds by
    which they take longer are exposed. The terms of `breakdown_seconds` add up to the step.
    """
    layout = lay_mesh(system, mesh.layout)
    moves = step_moves(workload, mesh, strategy)
    in_ticks = step_collectives(workload, mesh, strategy, counted="executed")
    round_ring = ring_shares(workload, mesh, system, strategy)
    communication = communication_time(moves, layout, strategy, round_ring)
    breakdown = step_breakdown(workload, mesh, system, strategy, communication)
    shares = communication.shares(*windows(breakdown), strategy.num_microbatches)
    exposed = timed_collectives(moves, layout, shares, round_ring, strategy)
    beside = timed_reference_collectives(workload, mesh, system, strategy)
    step, memory = sum(breakdown.values()), step_memory(workload, mesh, strategy, kind=system.chip.kind)
    return Record(
        origin="predicted",
        mesh=mesh.degrees,
        hardware=str(system),
        step_seconds=step,
        mfu=model_flops(workload) / (step * system.peak(workload.compute_dtype) * mesh.num_devices),
        flops=step_flops(workload, mesh, strategy).total,
        memory_bytes=memory,
        fits=memory["peak"] <= system.plannable_bytes,
        bound=_bound(workload, mesh, system, breakdown),
        tokens_per_second=workload.tokens / step,
        breakdown_seconds=breakdown,
        collectives=merge((*beside, *_in_every_tick(exposed, in_ticks, layout))),
        notes=layout.notes
        + _notes(workload, mesh, system, strategy)
        + _routing_notes(workload, mesh, system, strategy, memory.get("working", 0))
        + pool_notes(system, memory["peak"]),
    )


def _notes(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> tuple[str, ...]:
    """Return the notes of a prediction: sentences on what it assumes or leaves out."""
    notes = ()
    if strategy.profile.name:
        notes += (f"planned as {strategy.profile.name} runs a step, which meshwright does not run",)
    notes += padding_notes(workload.model, mesh, rules_of(strategy))
    notes += (SIMULATED,) if system.chip.kind == "cpu" else borrowed_notes(system)
    if before := pre_pipeline_stack(program(workload.model), mesh, strategy):
        notes += _repeated(before.num_layers, workload, mesh, strategy)
    experts = workload.model.experts
    if system.chip.kind == "gpu" and experts and experts.capacity_factor is None:
        size = device_blocks(workload, mesh, strategy).size
        notes += (f"predicted with grouped matmuls; XLA has none for GPUs: train multiplies {size} rows at a time",)
    if system.chip.kind == "gpu" and strategy.attention == "flash" and strategy.profile == DEFAULT.profile:
        notes += (
            "attention is priced as one kernel; on GPUs `flash` runs block by block through memory, and took 1.3 (2,048"
            " tokens) to 4.7 times (65,536) the step on an H200: `--attention cudnn` is NVIDIA's kernel",
        )
    if system.chip.kind == "cpu" and experts and (room := dropless_padding(workload, mesh)) > 1:
        notes += (
            "predicted for tokens spread evenly over experts; as none may be dropped, simulated devices exchange"
            f" {room:.3g}x the rows, TPUs and GPUs only the rows that there are",
        )
    if experts and experts.balance_weight and strategy.num_microbatches > 1:
        notes += (
            f"the loss of experts' balance is of each of {strategy.num_microbatches} microbatches, not of the batch:"
            " losses differ a little from those with another number of them",
        )
    if waiting := host_bytes(workload, mesh, strategy):
        notes += (f"{show_bytes(waiting)} of each device's activations are kept in its host's memory",)
    return notes


def _routing_notes(
    workload: Workload, mesh: MeshShape, system: System, strategy: Strategy, working: int
) -> tuple[str, ...]:
    """Return a note if experts' rows for any routing take much of a device's memory; working: bytes in a layer."""
    experts = workload.model.experts
    if experts is None or strategy.profile.balanced_routing or working < ROUTING_SHARE * system.usable_bytes:
        return ()
    if (room := dropless_padding(workload, mesh)) == 1:
        return ()
    return (
        f"a layer works with {show_bytes(working)}, most of it experts' rows: {room:.3g}x those of even routing, as no"
        " token may be dropped; a smaller ep or more microbatches needs less",
    )


def _repeated(count: int, workload: Workload, mesh: MeshShape, strategy: Strategy) -> tuple[str, ...]:
    """Return a note if every pipeline stage repeats the work of the layers before the pipeline; else ().

    Stages share this work if they can split the sequences of a microbatch. count: the number of layers before the
    pipeline.
    """
    if is_shared_before(program(workload.model), workload.batch, mesh, strategy):
        return ()
    ours = workload.batch // (mesh.degree(RULES["batch"]) * strategy.num_microbatches)
    return (
        f"every stage runs the plain layers before those of experts, {count} of {workload.model.num_layers}:"
        f" pp={mesh.pp} does not divide a device's sequences of a microbatch, {ours}",
    )


def step_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> float:
    """Return the predicted seconds of a step, as `predict` does, without the rest of the record."""
    communication = step_communication(workload, mesh, system, strategy)
    return sum(step_breakdown(workload, mesh, system, strategy, communication).values())


def step_breakdown(
    workload: Workload, mesh: MeshShape, system: System, strategy: Strategy, communication: CommunicationTime
) -> dict[str, float]:
    """Return the seconds of a step by term, which add up to the step.

    Every step has the terms forward, recompute, backward, exposed communication and update; other terms, such as
    pipeline bubble, are left out where they do not apply. communication: the time of the step's collectives, before
    overlap with ops.
    """
    once, parts = microbatch_seconds(workload, mesh, system, strategy), strategy.num_microbatches
    breakdown = {phase: parts * getattr(once, phase) for phase in ("forward", "recompute", "backward")}
    for phase, seconds in buffer_seconds(workload, mesh, system, strategy).items():
        breakdown[phase] += seconds
    shares = communication.shares(*windows(breakdown), parts)
    breakdown["exposed communication"] = communication.exposed(shares)
    if workload.remat == "offload":
        # Copies to and from the host overlap with the ops of their pass, but use HBM bandwidth that these ops need.
        size = offloaded_bytes(workload, mesh, strategy)
        copying, moving = size / system.host_bytes_per_second, size / system.hbm_bytes_per_second
        breakdown["host copies"] = sum(max(moving, copying - window) for window in windows(breakdown))
    if mesh.pp > 1:
        # With p stages of v virtual stages each, the bubble lasts as long as (p - 1) / v microbatches. v is 1 for GPipe
        # (arXiv:1811.06965) and 1F1B, and larger for interleaved stages (arXiv:2104.04473, section 2.2).
        each = once.total + communication.exposed_per_microbatch(shares) / parts
        breakdown["pipeline bubble"] = each * (mesh.pp - 1) / strategy.virtual_stages
    if system.chip.kind == "gpu":
        breakdown["contention"] = contention_seconds(communication.hidden(shares), system)
        breakdown["stragglers"] = straggling_seconds(parts * once.total, mesh.num_devices, system)
    breakdown["update"] = update_seconds(workload, mesh, system, strategy)
    if strategy.profile.host_seconds:
        breakdown["host"] = strategy.profile.host_seconds
    if has_reference(workload):
        breakdown = {"reference": reference_seconds(workload, mesh, system, strategy)} | breakdown
    return breakdown


def windows(breakdown: Mapping[str, float]) -> tuple[float, float]:
    """Return the seconds of compute with which collectives can overlap, as (forward, recompute + backward).

    breakdown: the seconds of a step by term.
    """
    return breakdown["forward"], breakdown["recompute"] + breakdown["backward"]


def step_bound_seconds(
    workload: Workload,
    mesh: MeshShape,
    system: System,
    strategy: Strategy,
    communication: CommunicationTime = NO_COMMUNICATION,
) -> float:
    """Return a lower bound of a step's seconds that is cheap to compute.

    communication: a lower bound of the time of the step's collectives; by default none.
    """
    return sum(step_breakdown(workload, mesh, system, strategy, communication).values())


def _in_every_tick(
    exposed: Iterable[Collective], in_ticks: Iterable[Collective], layout: MeshPlacement
) -> Iterator[Collective]:
    """Yield the collectives of `in_ticks`, whose bytes and runs include a pipeline's bubble ticks, with their seconds.

    Exposed seconds are those of `exposed`, the same collectives counted in useful ticks only: the time of bubble ticks
    already counts as bubble.
    """
    for worked, move in zip(exposed, in_ticks, strict=True):
        yield replace(move, seconds=planned_seconds(move, layout), exposed_seconds=worked.exposed_seconds)


def _bound(workload: Workload, mesh: MeshShape, system: System, breakdown: Mapping[str, float]) -> Bound:
    """Return the resource that limits the largest part of the step's time, pipeline bubble excluded."""
    flops, traffic = step_flops(workload, mesh, STAGES_APART), hbm_bytes(workload, mesh)
    seconds: dict[Bound, float] = {
        "compute": 0.0,
        "memory": breakdown["update"],
        "communication": breakdown["exposed communication"],
    }
    for phase in ("forward", "recompute", "backward"):
        computing = getattr(flops, phase) / system.peak(workload.compute_dtype)
        is_computing = computing >= traffic[phase] / system.hbm_bytes_per_second
        # The pass of a reference model is a forward pass too, and is limited by the same resource.
        more = breakdown.get("reference", 0.0) if phase == "forward" else 0.0
        seconds["compute" if is_computing else "memory"] += breakdown[phase] + more
    return max(seconds, key=seconds.__getitem__)
