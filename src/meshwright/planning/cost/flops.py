"""Flops of a step by phase, and model flops.

Only matmuls are counted, with 2 flops per multiply-add: norms, rotary embedding, softmax and AdamW's update add less
than a percent in models of usual width. Model flops count attention in full, masked scores included. Executed flops
also count masked scores, even in blocks that block-wise attention skips, but not the quarter of the scores that
attention avoids by splitting a sequence into halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.description.step.ir import OPERANDS, AttentionOp, Extents, Matmul, Repeat, Step
from meshwright.description.step.legality import has_reference
from meshwright.description.step.parameter_tree import is_adapter
from meshwright.description.step.passes.muon import ITERATIONS, matrices_per_device, matrix_products
from meshwright.description.step.reference import reference_pass
from meshwright.description.step.sequence import halves_queries, visible_pairs
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.token_routing import device_blocks, dropless_padding
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape

HALVED = 0.75
"""The computed share of scores if a sequence is halved: the first half's queries skip the second half's keys."""


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The flops of one step on one device, by phase; `reference` is the pass of a frozen reference model."""

    reference: float = 0.0
    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """The flops of all phases."""
        return self.reference + self.forward + self.recompute + self.backward + self.update

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(**{phase: flops + vars(other)[phase] for phase, flops in vars(self).items()})

    def __mul__(self, times: float) -> StepFlops:
        return StepFlops(**{phase: times * flops for phase, flops in vars(self).items()})


def step_flops(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> StepFlops:
    """Return the flops that one device executes in a step; over pp, the mean of the stages.

    Included are the forward pass of a frozen reference model and the matmuls of Muon's update. Lockstep pipeline stages
    also execute their layers, and the layers before the pipeline, in bubble ticks; with GPipe they recompute the
    logits.
    """
    found = product_flops(train_step(workload, mesh, strategy)) + attention_flops(workload, mesh, strategy)
    found += StepFlops(update=update_flops(workload, mesh, strategy))
    if (own := reference_pass(workload, mesh, strategy)) is None:
        return found
    once = product_flops(train_step(*own)) + attention_flops(*own)
    return found + StepFlops(reference=once.forward)


def update_flops(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> float:
    """Return the flops per step of Muon's Newton-Schulz matmuls on one device; 0 for other optimizers.

    The zero matrices that give every device equally many matrices are included.
    """
    if strategy.optimizer != "muon":
        return 0.0
    return float(sum(
        count * ITERATIONS * 2 * math.prod(sizes)
        for parameter, count in matrices_per_device(workload, mesh, strategy)
        for sizes in matrix_products(parameter)
    ))  # fmt: skip


def product_flops(step: Step) -> StepFlops:
    """Return the flops per step of matmuls with weights on one device; over pp, the mean of the stages."""
    return _matmuls(step, step.ops.matmuls, _mean)


def attention_flops(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> StepFlops:
    """Return the flops per step and device of attention's matmuls without weights, a part of `step_flops`."""
    return _attention(train_step(workload, mesh, strategy), workload, mesh, strategy, _mean)


@dataclass(frozen=True, kw_only=True)
class AttentionProduct:
    """One matmul of attention on one device, over every query and every key of its sequence.

    kind: `scores` multiplies queries with keys, `values` multiplies the scores' softmax with values. role: the matmul
    itself, or the gradient of its left or right operand. flops: the flops of one execution.
    """

    kind: Literal["scores", "values"]
    role: Literal["result", "left_gradient", "right_gradient"]
    flops: float


def attention_products(op: AttentionOp, step: Step, *, is_fused: bool) -> Iterator[AttentionProduct]:
    """Yield the matmuls that attention executes in the phase of `op`.

    is_fused: whether it is a fused kernel, whose backward recomputes the scores (arXiv:2307.08691, section 4.1).
    """
    pairs = step.extents.local(op.query) / op.qk_dim * step.extents.sizes["S"]
    scores, values = 2 * pairs * op.qk_dim, 2 * pairs * op.value_dim
    if op.phase != "backward" or is_fused:
        yield AttentionProduct(kind="scores", role="result", flops=scores)
    if op.phase != "backward":
        if not op.is_scores_alone:
            yield AttentionProduct(kind="values", role="result", flops=values)
        return
    # A fused kernel computes the gradients of all its operands.
    whole = replace(op, gradients=OPERANDS) if is_fused else op
    for kind, side in whole.gradient_products:
        flops = scores if kind == "scores" else values
        yield AttentionProduct(kind=kind, role="left_gradient" if side == "left" else "right_gradient", flops=flops)


def window_share(op: AttentionOp, seq_len: float) -> float:
    """Return the fraction of causal query-key pairs that are inside a layer's window, as the mean over layers."""
    pairs = [visible_pairs(seq_len, window, is_chunked=op.is_chunked) for window in op.windows]
    return 2 * sum(pairs) / len(pairs) / seq_len**2


def model_flops(workload: Workload, *, is_causal: bool = False) -> float:
    """Return the flops of a step over all devices, without recomputation, as MFU counts them.

    They are 6 per weight and token, and 12 x layers x heads x head_dim x seq_len per token for attention (PaLM,
    arXiv:2204.02311, appendix B). A frozen weight counts 4 (no weight gradient), or 2 if nothing before it is trained.
    A frozen reference model adds 2 per weight and token. is_causal: count only unmasked scores.
    """
    step = train_step(replace(workload, remat="none"), MeshShape())
    sizes = dict(step.extents.sizes)
    if experts := workload.model.experts:
        sizes["R"] = workload.tokens * experts.num_active / experts.count
    step = replace(step, extents=replace(step.extents, sizes=sizes))
    # The weights of a frozen reference are those without adapters.
    runs_reference = has_reference(workload)
    with_gradient = {op.region.name for op in step.ops.ops if op.phase == "backward"}
    total = 0.0
    for op in step.ops.matmuls:
        if op.phase == "forward":
            passes = 1 + (op.region.name in with_gradient) + (op.name not in workload.frozen_paths)
            passes += runs_reference and not is_adapter(op.name)
            total += passes * step.repeats[op.region.name].mean * matmul_flops(op, step.extents)
    for op in step.ops.attention:
        if op.phase == "forward":
            products = attention_products(op, step, is_fused=False)
            kept = window_share(op, workload.seq_len) / 2 if is_causal else 1.0
            passes = (3 if op.region.name in with_gradient else 1) + runs_reference
            total += passes * kept * step.repeats[op.region.name].mean * sum(product.flops for product in products)
    return total


def dropless_padding_flops(
    workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT, *, has_ragged: bool
) -> float:
    """Return the flops per device and step of the padding of dropless experts, as the HLO text counts them.

    A plan counts balanced routing only. The program's expert matmuls are compiled for the rows of any routing, and skip
    empty rows when they run. Weight gradients, and without a grouped matmul all of them, run in blocks of rows
    (`step.token_routing.expert_blocks`): the program has every block that some routing could need.

    has_ragged: whether the compiler has a grouped matmul (ragged dot), which needs no blocks.
    """
    experts = workload.model.experts
    if experts is None or experts.capacity_factor is not None:
        return 0.0
    found = _dropless_padding(workload, mesh, strategy, has_ragged=has_ragged).total
    own = reference_pass(workload, mesh, strategy)
    return found if own is None else found + _dropless_padding(*own, has_ragged=has_ragged).forward


def _dropless_padding(workload: Workload, mesh: MeshShape, strategy: Strategy, *, has_ragged: bool) -> StepFlops:
    """Return, by phase, `dropless_padding_flops` of the trained model only, without those of a reference model."""
    step = train_step(workload, mesh, strategy)
    room, padding = dropless_padding(workload, mesh), device_blocks(workload, mesh, strategy).padding
    row_share, weight_share = room * (1 if has_ragged else padding) - 1, room * padding - 1
    ops = [op for op in step.ops.matmuls if op.experts]
    rows = _matmuls(step, (op for op in ops if op.role != "weight_gradient"), _mean)
    weights = _matmuls(step, (op for op in ops if op.role == "weight_gradient"), _mean)
    return rows * row_share + weights * weight_share


def single_column_flops(workload: Workload, mesh: MeshShape, strategy: Strategy) -> float:
    """Return the flops per device and step of matmuls with one column, such as a shared expert's gate.

    XLA:TPU and XLA:GPU compute these matmuls elementwise, and count no flops for them.
    """
    found = _single_columns(train_step(workload, mesh, strategy)).total
    own = reference_pass(workload, mesh, strategy)
    return found if own is None else found + _single_columns(train_step(*own)).forward


def _single_columns(step: Step) -> StepFlops:
    """Return the flops of a step's matmuls with one column, by phase."""
    return _matmuls(step, (op for op in step.ops.matmuls if math.prod(dim.size or 0 for dim in op.columns) == 1), _mean)


def untaken_branch_flops(workload: Workload, mesh: MeshShape, strategy: Strategy) -> float:
    """Return the flops per device and step that are in the HLO text but not executed.

    In the text, every pipeline tick has the logits and the layers before the pipeline; most ticks skip them.
    """
    step = train_step(workload, mesh, strategy)

    def untaken(_: Matmul | AttentionOp, repeat: Repeat) -> float:
        return repeat.static - repeat.executed

    attention = _attention(step, workload, mesh, strategy, untaken)
    return _matmuls(step, step.ops.matmuls, untaken).total + attention.total


def scores_share(workload: Workload, mesh: MeshShape, strategy: Strategy) -> float:
    """Return the fraction of all query-key pairs whose scores are computed; below 1 only without a fused kernel."""
    return HALVED if strategy.attention == "scores" and halves_queries(workload, mesh) else 1.0


def matmul_flops(op: Matmul, extents: Extents) -> float:
    """Return the flops of one run of a matmul on one device."""
    local = extents.local_dims
    return 2 * local(op.rows) * local(op.inner) * local(op.columns) * local(op.experts)


def _mean(op: Matmul | AttentionOp, repeat: Repeat) -> float:
    """Return how often an op runs in a step, as the mean over pipeline stages. repeat: that of its region."""
    return repeat.mean - op.skipped


def _attention(
    step: Step, workload: Workload, mesh: MeshShape, strategy: Strategy, count: Callable[[AttentionOp, Repeat], float]
) -> StepFlops:
    """Return the flops of attention on one device. count: returns the runs of an op; takes its region's `Repeat`."""
    is_fused = strategy.attention != "scores"
    made = scores_share(workload, mesh, strategy)
    sums: dict[str, float] = dict.fromkeys(("forward", "recompute", "backward"), 0.0)
    for op in step.ops.attention:
        flops = sum(product.flops for product in attention_products(op, step, is_fused=is_fused))
        sums[op.phase] += count(op, step.repeats[op.region.name]) * made * flops
    return StepFlops(**sums)


def _matmuls(step: Step, ops: Iterable[Matmul], count: Callable[[Matmul, Repeat], float]) -> StepFlops:
    """Return the flops of matmuls on one device. count: returns the runs of an op; takes its region's `Repeat`."""
    sums: dict[str, float] = dict.fromkeys(("forward", "recompute", "backward"), 0.0)
    for op in ops:
        sums[op.phase] += count(op, step.repeats[op.region.name]) * matmul_flops(op, step.extents)
    return StepFlops(**sums)
