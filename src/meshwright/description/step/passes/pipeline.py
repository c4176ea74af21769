"""Pipeline pass: how often a device runs each region, and the collectives between stages.

Stages that are one SPMD program (`FrameworkProfile.spmd_pipeline`) run every tick together, on zeros if the schedule
has no work for them. Layers and the lookup before them run in all ticks. The loss runs from the tick in which the first
microbatch has passed the layers. With virtual stages, ticks that need no lookup or loss skip it. Dense layers before
MoE layers run with the lookup, and again in backward, on all stages: each stage runs them on a share of the sequences,
or on all sequences if pp does not divide them (`stages.batch_before_stages`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from meshwright.description.step.ir import Array, Communicate, Dim, Region, Repeat
from meshwright.description.step.layer import Dispatch, Lookup, Program, Stack, alternating
from meshwright.description.step.passes.nodes import Layout
from meshwright.description.step.passes.schedule import Schedule
from meshwright.description.step.stages import batch_before_stages, chunk_slots, staged_stacks
from meshwright.description.step.strategy import Strategy
from meshwright.mesh import MeshShape
from meshwright.record import Phase

BATCH, EMBEDDING, LOGITS, STAGES, UPDATE = "batch", "embedding", "logits", "stages", "update"
"""Names of the regions outside the layers. `batch` has the ops on the batch before the lookup."""

KEPT_INPUTS = "kept inputs"
"""Name of the sends of saved layer inputs, which stages of 1F1B store for each other."""


def is_spmd_pipeline(mesh: MeshShape, strategy: Strategy) -> bool:
    """Whether a step has pipeline stages that are one program (SPMD) and run every tick together."""
    return mesh.pp > 1 and strategy.profile.spmd_pipeline


def schedule_of(mesh: MeshShape, strategy: Strategy) -> Schedule:
    """Return the schedule of the pipeline on a mesh."""
    return Schedule(
        stages=mesh.pp,
        microbatches=strategy.num_microbatches,
        kind=strategy.schedule,
        virtual_stages=strategy.virtual_stages,
    )


def stage_layers(num_layers: int, mesh: MeshShape) -> int:
    """Return the number of layers on the largest stage."""
    return math.ceil(num_layers / mesh.pp)


def stage_slots(num_layers: int, mesh: MeshShape, strategy: Strategy) -> int:
    """Return the number of layers of a stack that the largest stage runs per microbatch.

    In an SPMD pipeline, it is the number of slots for layers (`step.stages`), which may be empty.
    """
    virtual = strategy.virtual_stages if is_spmd_pipeline(mesh, strategy) else 1
    return virtual * chunk_slots(num_layers, mesh.pp, virtual)


def pre_pipeline_stack(program: Program, mesh: MeshShape, strategy: Strategy) -> Stack | None:
    """Return the stack of dense layers before MoE layers, which runs with the lookup on all stages of an SPMD pipeline.

    None without such layers or such a pipeline.
    """
    first, *others = alternating(program.stacks)
    return first[0] if is_spmd_pipeline(mesh, strategy) and others else None


def pre_pipeline_strategy(strategy: Strategy, stack: Stack) -> Strategy:
    """Return the strategy for the layers of `stack`, which run before the pipeline.

    Several such layers run as a loop that is recomputed as a whole; `recomputes_whole_blocks` is then set.
    """
    return _recomputing(strategy, is_whole=stack.num_layers > 1)


@lru_cache(maxsize=1 << 12)
def _recomputing(strategy: Strategy, *, is_whole: bool) -> Strategy:
    """Return the strategy with `recomputes_whole_blocks` set to `is_whole`; cached."""
    return replace(strategy, profile=replace(strategy.profile, recomputes_whole_blocks=is_whole))


def is_shared_before(program: Program, batch: int, mesh: MeshShape, strategy: Strategy) -> bool:
    """Whether each stage runs the layers before the pipeline for only a share of the sequences."""
    if pre_pipeline_stack(program, mesh, strategy) is None:
        return False
    return "pp" in batch_before_stages(batch, mesh, strategy)


def repeats(program: Program, mesh: MeshShape, strategy: Strategy) -> dict[str, Repeat]:
    """Return how often a device runs each region in a step, by the region's name."""
    if is_spmd_pipeline(mesh, strategy):
        return _lockstep_repeats(program, mesh, strategy)
    parts = strategy.num_microbatches
    ends = _equal_counts(parts, parts / mesh.pp)
    found = {
        BATCH: _equal_counts(parts),
        EMBEDDING: ends,
        LOGITS: ends,
        STAGES: _equal_counts(parts * strategy.virtual_stages),
        UPDATE: _equal_counts(1),
    }
    remaining = sum(stack.num_layers for stack in program.stacks)
    for stack in program.stacks:
        # All layers, whatever their stack, are divided among stages; so the counts of the stacks add up to one stage's.
        count = stage_layers(remaining, mesh) - stage_layers(remaining - stack.num_layers, mesh)
        found[stack.name] = _equal_counts(parts * count, parts * stack.num_layers / mesh.pp, once=count)
        remaining -= stack.num_layers
    return found


def _equal_counts(count: int, mean: float | None = None, once: int = 1) -> Repeat:
    """Return a `Repeat` whose useful, executed and static counts are all `count`, and by default the mean too."""
    return Repeat(useful=count, executed=count, static=count, mean=count if mean is None else mean, once=once)


def _lockstep_repeats(program: Program, mesh: MeshShape, strategy: Strategy) -> dict[str, Repeat]:
    """Return how often a device runs each region in a step of an SPMD pipeline, by the region's name."""
    schedule, virtual, parts = schedule_of(mesh, strategy), strategy.virtual_stages, strategy.num_microbatches
    ticks = schedule.ticks
    first = ticks if virtual == 1 else parts
    last = parts if virtual == 1 else ticks - schedule.warm_up
    found = {
        BATCH: _equal_counts(parts),
        EMBEDDING: Repeat(useful=parts, executed=first, static=ticks, mean=first),
        LOGITS: Repeat(useful=parts, executed=parts, static=last, mean=parts),
        STAGES: Repeat(useful=parts * virtual, executed=ticks, static=ticks, mean=ticks),
        UPDATE: _equal_counts(1),
    }
    for stack in staged_stacks(program):
        slots = stage_slots(stack.num_layers, mesh, strategy)
        in_ticks = ticks * chunk_slots(stack.num_layers, mesh.pp, virtual)
        found[stack.name] = Repeat(useful=parts * slots, executed=in_ticks, static=in_ticks, mean=in_ticks, once=slots)
    if before := pre_pipeline_stack(program, mesh, strategy):
        count = before.num_layers
        found[before.name] = Repeat(
            useful=count * parts, executed=count * first, static=count * ticks, mean=count * first, once=count
        )
    return found


def has_single_last_tick(mesh: MeshShape, strategy: Strategy) -> bool:
    """Whether a single tick of an SPMD pipeline ends its backward passes, as with two stages; no loop is around it."""
    return is_spmd_pipeline(mesh, strategy) and schedule_of(mesh, strategy).warm_up == 1


def kept_layers(num_layers: int, mesh: MeshShape, strategy: Strategy) -> int:
    """Return the largest number of layer inputs of a stack that an SPMD pipeline's device saves for backward at a time.

    GPipe: one per layer slot and tick. 1F1B: for each layer slot, one for each saved microbatch (`Schedule.kept`), one
    in transit between paired stages, and one in progress.
    """
    schedule = schedule_of(mesh, strategy)
    chunk = chunk_slots(num_layers, mesh.pp, strategy.virtual_stages)
    if schedule.kind == "gpipe":
        return chunk * schedule.ticks
    return chunk * (schedule.kept + schedule.is_balanced + 1)


def stage_moves(program: Program, mesh: MeshShape, strategy: Strategy, layout: Layout) -> Iterator[Communicate]:
    """Yield the collectives between stages: sends of the stream, its gradient, and inputs that other stages store.

    If tp does not split the stream and each stage is a separate program, every tp device sends a share of the stream,
    and the shares are gathered on arrival (arXiv:2104.04473, section 4.1).
    """
    if mesh.pp == 1:
        return
    region, width = Region(STAGES), _stream_dim(program)
    stream = Array("stream", (*layout.residual_tokens, width))
    phases: tuple[Phase, ...] = ("forward", "backward")
    if not is_spmd_pipeline(mesh, strategy):
        shared = Array("stream", (*layout.tokens, width._replace(axes=layout.axes("mlp"))))
        for phase in phases:
            yield _over_pp("stream", "collective-permute", shared, phase, region)
            if strategy.tp_stream == "whole" and "tp" in layout.live:
                whole = Array("stream", (*layout.tokens, width))
                yield replace(_over_pp("stream", "all-gather", whole, phase, region), axes=("tp",))
        return
    schedule, stacks = schedule_of(mesh, strategy), staged_stacks(program)
    # With two stages the compiler removes the send of the last tick's gradient, which is unused.
    is_seen = schedule.kind == "1f1b" and has_single_last_tick(mesh, strategy)
    yield _over_pp("stream", "collective-permute", stream, "forward", region)
    yield replace(_over_pp("stream", "collective-permute", stream, "backward", region), skipped=int(is_seen))
    if schedule.is_balanced:
        kept = replace(stream, dims=(Dim("slots", chunk_slots(stacks[0].num_layers, mesh.pp, 1)), *stream.dims))
        for _ in stacks:
            yield _over_pp(KEPT_INPUTS, "collective-permute", kept, "forward", region)
    for stack in stacks:
        for op in (op for op in stack.ops if isinstance(op, Dispatch)):
            # Each stage has only the loads of its own layers.
            once = Region(STAGES, is_once=True)
            slots = mesh.pp * stage_slots(stack.num_layers, mesh, strategy)
            load = Array("load", (Dim("slots", slots), Dim("load", 3 * op.num_experts)), width="float32")
            yield _over_pp("load of experts", "all-gather", load, "forward", once)


def end_moves(
    program: Program, mesh: MeshShape, strategy: Strategy, layout: Layout, *, is_shared: bool
) -> Iterator[Communicate]:
    """Yield the collectives over pp at the ends of an SPMD pipeline, whose stages share the embedding and unembedding.

    They bring the stream to the first stage and from the last one.

    is_shared: result of `is_shared_before`.
    """
    if not is_spmd_pipeline(mesh, strategy):
        return
    stream = Array("stream", (*layout.residual_tokens, _stream_dim(program)))
    first, last = Region(EMBEDDING), Region(LOGITS)
    if is_shared:
        yield _over_pp("first stage's stream", "all-gather", stream, "forward", first)
    kind = "reduce-scatter" if is_shared else "all-reduce"
    yield _over_pp("first stage's gradient", kind, stream, "backward", first)
    yield _over_pp("last stage's stream", "all-reduce", stream, "forward", last)


def _stream_dim(program: Program) -> Dim:
    """Return the dim of the residual stream's width."""
    size = next(op.columns[1] for op in program.embedding if isinstance(op, Lookup))
    return Dim("D", size)


def _over_pp(name: str, kind: str, array: Array, phase: Phase, region: Region) -> Communicate:
    """Return a collective between stages, over pp."""
    return Communicate(name=name, kind=kind, axes=("pp",), phase=phase, region=region, array=array)  # type: ignore[arg-type]
