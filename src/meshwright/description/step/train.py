"""Build the train step of a model on a mesh as a `Step`, by running every pass over the model's ops.

program (families) -> shard -> differentiate -> rematerialize -> ZeRO, microbatch -> pipeline -> optimizer
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from meshwright.description.step.blocks import program
from meshwright.description.step.ir import (
    OPERANDS,
    Array,
    AttentionOp,
    Communicate,
    Dim,
    Elementwise,
    Matmul,
    Op,
    Ops,
    Region,
    Step,
)
from meshwright.description.step.layer import STREAM, Lookup, Stack, alternating
from meshwright.description.step.layer_inputs import LAYER_INPUT
from meshwright.description.step.model import Model
from meshwright.description.step.padding import kv_copies, padded
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.passes.differentiate import (
    backward_ops,
    forward_ops,
    gathers,
    nodes_with_gradients,
    scatters,
    sums,
)
from meshwright.description.step.passes.microbatch import extents_of, gradient_sum
from meshwright.description.step.passes.muon import is_matrix, matrix_moves
from meshwright.description.step.passes.nodes import (
    IMBALANCE,
    Core,
    Exchange,
    Layout,
    Node,
    Product,
    Vector,
    Weight,
    from_outside,
)
from meshwright.description.step.passes.optimizer import sum_of_copies, update_moves
from meshwright.description.step.passes.pipeline import (
    BATCH,
    end_moves,
    has_single_last_tick,
    is_shared_before,
    is_spmd_pipeline,
    pre_pipeline_stack,
    repeats,
    stage_moves,
    stage_slots,
)
from meshwright.description.step.passes.rematerialize import keeps_read, recomputed
from meshwright.description.step.passes.shard import shard_stack
from meshwright.description.step.passes.shard_ends import (
    embedding_nodes,
    logits_nodes,
    residual_nodes,
    shared_key_nodes,
)
from meshwright.description.step.rules import RULES, rules_of
from meshwright.description.step.sequence import is_zigzag, reads_key_segments
from meshwright.description.step.strategy import DEFAULT, XLA, Optimizer, Strategy
from meshwright.description.step.workload import Objective, Remat, Workload, num_query_chunks
from meshwright.mesh import MeshShape
from meshwright.record import Phase

STAGED = MeshShape(pp=2)
"""A mesh with pipeline stages, for functions whose result depends only on whether a mesh has stages."""


@lru_cache(maxsize=1 << 14)
def train_step(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> Step:
    """Return a train step: its ops, how often each region repeats on a device, and the sizes of its symbols."""
    model = padded(workload.model, mesh, rules_of(strategy))
    found = program(model)
    shared = is_shared_before(found, workload.batch, mesh, strategy)
    live = frozenset(axis for axis, degree in mesh.degrees.items() if degree > 1)
    plain = _without_counts(strategy, has_stages=mesh.pp > 1)
    has_chunks = num_query_chunks(workload.seq_len) > 1
    stages = ()
    if mesh.pp > 1:
        stages = tuple(stage_moves(found, mesh, strategy, layout_of(live, STAGED, _of_layout(strategy))))
    return Step(
        ops=_ops(
            model,
            workload.frozen_paths,
            workload.base_paths if strategy.zero_stage in (1, 2) else frozenset[str](),
            workload.remat,
            workload.objective,
            has_chunks,
            live,
            mesh.sp == 2,
            plain,
            shared,
            workload.packed,
            kv_copies(workload.model, mesh, rules_of(strategy)),
            # The compiler then sees that no layer reads the gradient of the last tick's input.
            has_single_last_tick(mesh, strategy) and stage_slots(found.stacks[-1].num_layers, mesh, strategy) == 1,
        ),
        stages=stages,
        repeats=repeats(found, mesh, strategy),
        extents=extents_of(workload, mesh, strategy),
    )


@lru_cache(maxsize=1 << 14)
def _without_counts(strategy: Strategy, *, has_stages: bool) -> Strategy:
    """Return the strategy with defaults for fields that change only how often ops run, to share cached ops.

    num_microbatches becomes 1 or 2, since ops depend on whether there are several.
    """
    schedule = strategy.schedule if has_stages else "1f1b"
    parts = min(strategy.num_microbatches, 2)
    return replace(strategy, num_microbatches=parts, virtual_stages=1, schedule=schedule, reference_mesh=None)


@lru_cache(maxsize=1 << 12)
def _of_layout(strategy: Strategy) -> Strategy:
    """Return the strategy with only the fields that affect array layouts, and defaults for all others."""
    names = ("tp_stream", "collective_matmul", "attention", "sp_method", "dropout")
    kept = {name: getattr(strategy, name) for name in names}
    profile = replace(XLA, spmd_pipeline=strategy.profile.spmd_pipeline)
    return Strategy(zero_stage=strategy.zero_stage, profile=profile, **kept)


@lru_cache(maxsize=1 << 12)
def _ops(
    model: Model,
    frozen: frozenset[str],
    whole: frozenset[str],
    remat: Remat,
    objective: Objective,
    has_chunks: bool,
    live: frozenset[str],
    is_pair: bool,
    strategy: Strategy,
    is_shared: bool,
    is_packed: bool,
    copies: tuple[tuple[str, int], ...],
    is_last_tick_seen: bool,
) -> Ops:
    """Return the ops of a step. They depend on which axes are larger than 1, not on their degrees.

    Args:
        model: the padded model.
        frozen: paths of parameters without gradient.
        whole: paths of parameters that no axis shards in storage alone, although others are (`Layout.whole`).
        remat: the remat policy.
        objective: the loss.
        has_chunks: whether attention loops over chunks of queries.
        live: the axes larger than 1.
        is_pair: whether sp is 2.
        strategy: the strategy, without fields that only change counts.
        is_shared: whether stages share the sequences of the layers before the pipeline (`is_shared_before`).
        is_packed: whether a row of the batch has several documents.
        copies: as in `kv_copies`.
        is_last_tick_seen: whether stages have one layer each, and one tick ends the backward passes.
    """
    found, mesh = program(model), STAGED if "pp" in live else MeshShape()
    layout = layout_of(live, mesh, _of_layout(strategy), is_pair=is_pair, is_packed=is_packed)
    if frozen:
        layout = replace(layout, frozen=frozen, whole=whole)
    before = pre_pipeline_stack(found, mesh, strategy)
    ahead = replace(layout, batch=(*layout.batch, "pp")) if is_shared else layout
    build = _Builder(strategy, mesh, has_chunks, layout)
    ops: list[Op] = []
    # In backward, a tick of an SPMD pipeline looks up the rows of an adapter again, for the gradient of its B.
    is_looked_up_again = build.is_spmd_pipeline and any(
        isinstance(op, Lookup) and op.low_rank for op in found.embedding
    )
    entry = build.ends(embedding_nodes(found.embedding, ahead), is_recomputed=before is not None or is_looked_up_again)
    ops += (op for op in entry if before is not None or not (isinstance(op, Matmul) and op.phase == "recompute"))
    # Whether the stages' input has a gradient.
    is_entry_trained = build.has_gradient
    ops += build.ends(residual_nodes(found.layer_inputs, layout), is_recomputed=False)
    build.has_input_gradient = build.has_gradient
    ops += build.ends(residual_nodes(found.widening, layout), is_recomputed=False)
    for stacks in alternating(found.stacks):
        build.begin_loop(stacks)
        for stack in stacks:
            if stack is before:
                ops += build.stack(stack, ahead, "block", is_whole=stack.num_layers > 1)
                is_entry_trained = build.has_gradient
            else:
                ops += build.ends(shared_key_nodes(stack, layout), is_recomputed=False)
                is_whole = strategy.profile.recomputes_whole_blocks
                skipped = is_last_tick_seen and not is_entry_trained and len(stacks) == 1
                ops += build.stack(stack, layout, remat, is_whole=is_whole, skips_input_gradient=skipped)
    ops += build.ends(residual_nodes(found.narrowing, layout), is_recomputed=False)
    is_recomputed = is_spmd_pipeline(mesh, strategy) and strategy.schedule == "gpipe"
    ops += build.ends(logits_nodes(found.logits, layout, objective), is_recomputed=is_recomputed)
    if is_packed and layout.sequence and reads_key_segments(model, layout.sp_method):
        # The document ids of all keys are gathered once for all layers.
        ops.append(Communicate(
            name="segments", kind="all-gather", axes=layout.sequence, phase="forward", region=Region(BATCH),
            array=Array("segments", (layout.tokens[0], Dim("S", None)), width="float32"),
        ))  # fmt: skip
    moves = end_moves(found, mesh, strategy, layout, is_shared=is_shared)
    ops += (op for op in moves if is_entry_trained or op.phase == "forward")
    ops += _update(model, frozen, layout, is_spmd_pipeline(mesh, strategy), strategy.optimizer, copies)
    return Ops(tuple(ops))


@lru_cache(maxsize=1 << 12)
def layout_of(
    live: frozenset[str], mesh: MeshShape, strategy: Strategy, *, is_pair: bool = False, is_packed: bool = False
) -> Layout:
    """Return the layout of a step's arrays, by the strategy's rules; cached.

    live: the mesh axes larger than 1. is_pair, is_packed: as in `Layout`.
    """
    vocab = ("pp", *RULES["vocab"]) if is_spmd_pipeline(mesh, strategy) else RULES["vocab"]
    rules = {**rules_of(strategy), "vocab": vocab, "layers": ("pp",)}

    def on(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in live)

    return Layout(
        rules=rules,
        live=live,
        batch=on(RULES["batch"]),
        sequence=on(RULES["sequence"]),
        residual=on(rules["residual_sequence"]),
        sp_method="gather" if strategy.attention == "scores" else strategy.sp_method,
        is_packed=is_packed,
        is_pair=is_pair,
        is_zigzag=is_zigzag(MeshShape(sp=2) if "sp" in live else mesh, strategy),
        collective_matmul=strategy.collective_matmul and strategy.tp_stream == "split" and "tp" in live,
        tp_stream=strategy.tp_stream,
        dropout=strategy.dropout > 0,
        is_gathered_once=strategy.zero_stage in (1, 2),
    )


_Parts = tuple[tuple[Node, bool], ...]
"""The nodes of a layer, and whether an input of each has a gradient (`nodes_with_gradients`)."""


class _Builder:
    """Builder of the ops of a step's regions, for one strategy."""

    def __init__(self, strategy: Strategy, mesh: MeshShape, has_chunks: bool, layout: Layout) -> None:
        self.strategy, self.has_chunks, self.layout = strategy, has_chunks, layout
        self.is_spmd_pipeline = is_spmd_pipeline(mesh, strategy)
        self.sums_once = mesh.pp > 1 and not strategy.profile.spmd_pipeline
        self.tables: set[str] = set()
        self.has_gradient = False
        self.has_input_gradient = False
        self.sums_load = False

    def begin_loop(self, stacks: tuple[Stack, ...]) -> None:
        """Note the gradient that enters a loop over the layers of some stacks, which alternate if there are several.

        All layers of a loop have a backward pass if one of them has a trained parameter; one cycle alone is no loop.
        """
        if stacks[0].num_layers > 1:
            nodes = (node for stack in stacks for node in shard_stack(stack, self.layout))
            self.has_gradient |= any(node.is_trained for node in nodes)

    def stack(
        self, stack: Stack, layout: Layout, remat: Remat, *, is_whole: bool, skips_input_gradient: bool = False
    ) -> Iterator[Op]:
        """Yield the ops of one layer of a stack: forward, recompute, backward, and its weights' collectives.

        Layers before the first trained parameter have no backward. The layers of a stack run as one loop, so all have
        the same ops. A stack of one layer is inlined, and XLA drops its gradients that no trained parameter needs.

        Args:
            is_whole: as in `recomputed`.
            skips_input_gradient: whether compilers remove what only the gradient of the stream before the stack needs,
                in one run of the step.
        """
        nodes = shard_stack(stack, layout)
        with_gradient = {STREAM} if self.has_gradient else set[str]()
        outside = from_outside(stack.ops, layout).keys()
        with_gradient |= outside - {LAYER_INPUT} if self.has_gradient else set()
        with_gradient |= outside & {LAYER_INPUT} if self.has_input_gradient else set()
        is_at_once = self.strategy.attention == "scores" and not self.has_chunks
        parts = tuple(nodes_with_gradients(nodes, with_gradient, is_at_once=is_at_once))
        in_last_run, gathered_last = dict[Op, Op](), frozenset(range(len(nodes)))
        if skips_input_gradient:
            last = tuple(nodes_with_gradients(nodes, with_gradient - {STREAM}, is_at_once=is_at_once))
            gathered_last = self._recomputed(last, remat, is_whole=is_whole)
            in_last_run = {_whole(op): op for ops in self._for_gradients(last, remat, gathered_last) for op in ops}
            gathered_last |= {at for at, (_, has_input_gradient) in enumerate(last) if has_input_gradient}
        self.has_gradient |= any(node.is_trained for node in nodes)
        if not self.has_gradient:
            for node in nodes:
                yield from forward_ops(node)
                yield from self._of_weights(node, is_recomputed=False)
                yield from self._without_policy(node)
            return
        positions = self._recomputed(parts, remat, is_whole=is_whole)
        made = self._for_gradients(parts, remat, positions)
        for at, ((node, has_input_gradient), ops) in enumerate(zip(parts, made, strict=True)):
            yield from forward_ops(node)
            if skips_input_gradient:
                yield from (self._without_last_run(op, in_last_run.get(_whole(op))) for op in ops)
            else:
                yield from ops
            for op in self._of_weights(node, is_recomputed=at in positions or has_input_gradient):
                is_skipped = op.phase == "recompute" and isinstance(op, Communicate) and at not in gathered_last
                yield replace(op, skipped=1) if is_skipped else op
            yield from self._without_policy(node)

    def _recomputed(self, parts: _Parts, remat: Remat, *, is_whole: bool) -> frozenset[int]:
        """Return the indices of the nodes that are recomputed: `rematerialize.recomputed`."""
        saved = self.strategy.profile.saved_values
        return recomputed(tuple(node for node, _ in parts), remat, is_whole=is_whole, saved=saved)

    def _for_gradients(self, parts: _Parts, remat: Remat, positions: frozenset[int]) -> Iterator[tuple[Op, ...]]:
        """Yield the recomputed and the backward ops of each node, without collectives of weights.

        parts: as `nodes_with_gradients` yields them. positions: the indices of those that are recomputed.
        """
        for at, (node, has_input_gradient) in enumerate(parts):
            ops, is_recomputed = list[Op](), at in positions
            if is_recomputed:
                ops += (op for op in forward_ops(node, "recompute") if not isinstance(op, Elementwise))
            if not keeps_read(remat):
                ops += (op for op in forward_ops(node, "recompute") if isinstance(op, Elementwise))
            ops += self._backward(node, is_recomputed=is_recomputed, has_input_gradient=has_input_gradient)
            if has_input_gradient:
                ops += self._recomputed_scores(node, remat, is_recomputed=is_recomputed)
            yield tuple(ops)

    def _without_last_run(self, op: Op, last: Op | None) -> Op:
        """Return an op without what compilers remove of its last run in a step.

        last: the op of that run; None if nothing is left of it.
        """
        if isinstance(op, AttentionOp):
            left = last.pair_flops if isinstance(last, AttentionOp) else 0
            is_fused = self.strategy.attention != "scores"
            return replace(op, skipped=float(not left) if is_fused else 1 - left / op.pair_flops)
        return replace(op, skipped=1) if last is None and not isinstance(op, Elementwise) else op

    def _backward(self, node: Node, *, is_recomputed: bool, has_input_gradient: bool) -> Iterator[Op]:
        """Yield a node's backward ops.

        On a ring of two devices, keys and values that the recomputation has just sent are not sent again.
        """
        is_there = is_recomputed and self.layout.is_pair
        for op in backward_ops(node, has_input_gradient=has_input_gradient):
            is_key = isinstance(op, Communicate) and op.is_ring and op.axes == ("sp",) and op.array.width != "float32"
            is_key = is_key or (isinstance(op, Communicate) and op.is_ring and op.name in ("positions", "segments"))
            if not (is_there and is_key):
                yield op

    def _recomputed_scores(self, node: Node, remat: Remat, *, is_recomputed: bool) -> Iterator[Op]:
        """Yield the ops that recompute attention scores, even if attention's output is saved or not needed."""
        if self.strategy.attention != "scores" or not any(isinstance(work, Core) for work in node.work):
            return
        for op in forward_ops(node, "recompute"):
            if isinstance(op, AttentionOp):
                if remat == "attention" or (not is_recomputed and remat in ("block", "matmuls", "offload")):
                    yield replace(op, is_scores_alone=True)
                elif self.has_chunks:
                    # Each chunk of queries recomputes its scores.
                    yield replace(op, is_scores_alone=True, is_of_chunks=True)

    def _without_policy(self, node: Node) -> Iterator[Op]:
        """Yield the collectives whose results no remat policy saves: those that sum the experts' load.

        SPMD pipelines sum the load in each layer; other steps sum the load of all layers at once, with the loss.
        """
        for work in node.work:
            if not (isinstance(work, Exchange) and work.is_end and work.axes):
                continue
            phases: tuple[Phase, ...] = work.phases if self.has_gradient else ("forward",)
            region, array = node.region, work.array
            if work.name == IMBALANCE and not self.is_spmd_pipeline:
                if self.sums_load:
                    continue  # The first stack's sum is for the layers of all stacks.
                self.sums_load = True
                phases = ("forward",)
                region = Region("logits")
                array = replace(array, dims=(Dim("M", None), *array.dims))
            for phase in phases:
                yield Communicate(
                    name=work.name, kind=work.kind, axes=work.axes, phase=phase, region=region, array=array
                )

    def ends(self, nodes: tuple[Node, ...], *, is_recomputed: bool) -> Iterator[Op]:
        """Yield the ops of nodes before or after the layers. is_recomputed: whether backward recomputes the nodes."""
        for node in nodes:
            yield from forward_ops(node)
            # A lookup's input is integers, so that its output needs a gradient only if its own table is trained.
            is_lookup = any(isinstance(work, Weight) for work in node.work) and not _has_product(node)
            has_input_gradient = node.is_trained if is_lookup else self.has_gradient
            self.has_gradient |= node.is_trained
            if is_recomputed and self.has_gradient:
                yield from (op for op in forward_ops(node, "recompute") if not isinstance(op, Elementwise))
            yield from backward_ops(node, has_input_gradient=has_input_gradient)
            yield from self._of_weights(node, is_recomputed=is_recomputed and self.has_gradient)

    def _of_weights(self, node: Node, *, is_recomputed: bool) -> Iterator[Op]:
        """Yield the collectives of a node's weights, gathers before use and gradient reductions, by ZeRO stage.

        Below ZeRO-3, updated parameters are gathered once at the start of a step. Below ZeRO-2, gradients are
        reduce-scattered once at its end. A tied table is gathered once for both uses, except in an SPMD pipeline.
        """
        stage, region = self.strategy.zero_stage, node.region
        once = region._replace(is_once=True)
        for work in node.work:
            if isinstance(work, Vector) and work.is_trained:
                yield from sums(work, once if self.sums_once else region)
            if not isinstance(work, Weight):
                continue
            is_used = work.name in self.tables
            self.tables.add(work.name)
            if not is_used or self.is_spmd_pipeline:
                if stage == 3:
                    yield from gathers(work, region, "forward")
                    if is_recomputed:
                        yield from gathers(work, region, "recompute")
                elif not is_used:
                    yield from gathers(work, once, "forward")
            if not work.is_trained:
                continue
            for op in scatters(work, region):
                is_repeated = op.kind == "reduce-scatter" and stage >= 2
                if is_repeated and (not is_used or self.is_spmd_pipeline):
                    yield op
                elif not is_repeated and not is_used:
                    yield replace(op, region=once)
            if self.strategy.num_microbatches > 1 and _has_product(node):
                yield gradient_sum(work, region, node.block)


def _whole(op: Op) -> Op:
    """Return an op, attention with the gradients of all its operands."""
    return replace(op, gradients=OPERANDS) if isinstance(op, AttentionOp) else op


def _has_product(node: Node) -> bool:
    """Whether a node has a matmul."""
    return any(isinstance(work, Product) for work in node.work)


@lru_cache(maxsize=1 << 10)
def _update(
    model: Model,
    frozen: frozenset[str],
    layout: Layout,
    is_one_program: bool,
    optimizer: Optimizer,
    copies: tuple[tuple[str, int], ...],
) -> tuple[Communicate, ...]:
    """Return the collectives of the optimizer's update, including the sums over copies of kv heads.

    is_one_program: whether all pipeline stages are one program. copies: as in `kv_copies`.
    """
    found: list[Communicate] = []
    number = dict(copies)
    for path, parameter in leaves(parameters(model)):
        if path in frozen:
            continue
        dims: list[Dim] = []
        for name, size in zip(parameter.axes, parameter.shape, strict=True):
            axes = () if name == "layers" and not is_one_program else layout.axes(name)
            dims.append(Dim("N", size, axes))
        if path in number:
            found.append(sum_of_copies(path, tuple(dims), parameter.axes.index("kv_heads"), number[path]))
        found += update_moves(path, tuple(dims), is_adafactor=optimizer == "adafactor")
        if optimizer == "muon" and is_matrix(parameter):
            live = layout.live if is_one_program else layout.live - {"pp"}
            found += matrix_moves(path, parameter, tuple(dims), live)
    return tuple(found)
