"""Compute time of one device in the forward, recompute and backward passes, as sums over the times of ops.

The time of a matmul depends on its sizes (`product_seconds`). Ops between matmuls are memory bound (`elementwise`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.system import System
from meshwright.description.step.blocks import program
from meshwright.description.step.ir import AttentionOp, ComputingOp, Elementwise, Extents, Matmul, Step
from meshwright.description.step.layer import DotProduct, Linear
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.passes.muon import ITERATIONS, matrices_per_device, matrix_products
from meshwright.description.step.passes.pipeline import (
    is_shared_before,
    pre_pipeline_stack,
    pre_pipeline_strategy,
    stage_layers,
    stage_slots,
)
from meshwright.description.step.rules import RULES, local_parameter_shape, token_axes
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.token_routing import routed_tokens, sent_tokens
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import Workload, with_remat
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import is_of_weights, weight_collectives
from meshwright.planning.cost.elementwise import (
    LOGITS_BYTES,
    LOGITS_BYTES_ONE_BY_ONE,
    OF_EXPERTS,
    UPDATE_PASSES,
    UPDATE_PASSES_ONE_BY_ONE,
    pass_of,
    softmax_passes,
)
from meshwright.planning.cost.flops import window_share
from meshwright.planning.cost.model_states import trained_elements
from meshwright.planning.cost.rates.achieved import HBM_SHARE, TPU_GATHER_SHARE, TPU_GROUPED_SHARE, product_seconds
from meshwright.planning.cost.rates.attention import fused_attention_time
from meshwright.planning.cost.rates.data_files import gpu_products
from meshwright.planning.cost.rates.efficiency import launch_seconds, layer_shares
from meshwright.record import Phase


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one device's compute in each pass of a step, without communication and without idle time."""

    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """The sum of the three passes."""
        return self.forward + self.recompute + self.backward

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            self.forward + other.forward, self.recompute + other.recompute, self.backward + other.backward
        )

    def __mul__(self, times: float) -> PassSeconds:
        return PassSeconds(times * self.forward, times * self.recompute, times * self.backward)


NONE = PassSeconds()

WEIGHT_AXES = tuple(dict.fromkeys(axis for name in ("kv_heads", "mlp", "vocab", "expert") for axis in RULES[name]))
"""Mesh axes that split weights in matmuls; with the tokens per device they determine a device's ops."""


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer's ops for one microbatch on one device, each op compiled alone.

    rest: all ops but attention. of_queries: the part of `rest` in the backward pass of the query projection.
    """

    attention: PassSeconds = NONE
    rest: PassSeconds = NONE
    of_queries: float = 0.0


def microbatch_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> PassSeconds:
    """Return the seconds of each pass of one microbatch through the slowest pipeline stage.

    Each pass dequantises the weights that it reads.
    """
    ops = _stage_seconds(workload, mesh, system, strategy)
    once = _dequantising_seconds(workload, mesh, system, strategy)
    return ops + PassSeconds(once, once if ops.recompute else 0.0, once if ops.backward else 0.0) if once else ops


def _stage_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> PassSeconds:
    """Return the seconds of the ops of each pass of one microbatch through the slowest pipeline stage.

    That is a stage with most layers, or the last one, which also computes the logits; lockstep stages share the logits,
    and the layers before the pipeline if they can.
    """
    found = program(workload.model)
    before = pre_pipeline_stack(found, mesh, strategy)
    timed = _timed(workload, mesh, system, strategy)
    ends, stacks = timed.ends, [stack for stack in found.stacks if stack is not before]
    layer = _mean([(timed.layer(stack.name), stack.num_layers) for stack in stacks])
    if mesh.pp == 1 or strategy.profile.spmd_pipeline:
        slots = sum(stage_slots(stack.num_layers, mesh, strategy) for stack in stacks)
        stage = layer * slots + ends * (1 / mesh.pp)
        if before is None:
            return stage
        copies = mesh.pp if is_shared_before(found, workload.batch, mesh, strategy) else 1
        ahead = _timed(
            with_remat(workload, "block"), mesh, system, pre_pipeline_strategy(strategy, before),
            share=copies,
        )  # fmt: skip
        return stage + ahead.layer(before.name) * before.num_layers
    num_layers = workload.model.num_layers
    most = stage_layers(num_layers, mesh)
    last = max(num_layers - most * (mesh.pp - 1), 0)
    return max(layer * most, layer * last + ends, key=lambda stage: stage.total)


def layer_parts(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> dict[str, PassSeconds]:
    """Return the seconds of one layer's `attention` and `rest` for one microbatch, as sums of ops compiled alone."""
    found = _mean_layer(workload, mesh, system, strategy)
    return {"attention": found.attention, "rest": found.rest}


def attention_seconds(
    workload: Workload, mesh: MeshShape, system: System, strategy: Strategy
) -> tuple[PassSeconds, float]:
    """Return (seconds of attention, seconds of the query projection's backward) of one layer for one microbatch."""
    found = _mean_layer(workload, mesh, system, strategy)
    return found.attention, found.of_queries


def _mean_layer(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> LayerSeconds:
    """Return the seconds of a layer, as the mean over all layers."""
    timed = _timed(workload, mesh, system, strategy)
    stacks = program(workload.model).stacks
    total = sum(stack.num_layers for stack in stacks)
    return LayerSeconds(
        _mean([(timed.layers[stack.name].attention, stack.num_layers) for stack in stacks]),
        _mean([(timed.layers[stack.name].rest, stack.num_layers) for stack in stacks]),
        sum(timed.layers[stack.name].of_queries * stack.num_layers for stack in stacks) / total,
    )


def _mean(parts: list[tuple[PassSeconds, int]]) -> PassSeconds:
    """Return the mean of pass times, weighted by their counts."""
    total = sum(count for _, count in parts)
    return sum((time * (count / total) for time, count in parts), NONE)


@dataclass(frozen=True)
class _Timed:
    """Seconds of one microbatch on one device.

    layers: seconds of one layer of each stack, by its name. ends: seconds of the logits and the loss. shares: speed of
    `attention` and `rest` inside a compiled layer, relative to ops compiled alone. known: seconds of each op, by
    `op.work`, an id that ops of equal cost share.
    """

    layers: dict[str, LayerSeconds]
    ends: PassSeconds
    shares: dict[str, float]
    known: Mapping[int, float]

    def layer(self, name: str) -> PassSeconds:
        """Return the seconds of one layer of a stack inside the compiled program of a step."""
        found = self.layers[name]
        return found.attention * (1 / self.shares["attention"]) + found.rest * (1 / self.shares["rest"])


def _timed(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy, *, share: int = 1) -> _Timed:
    """Return the times of one microbatch, cached by the arguments that determine them, for use in a search.

    share: number of devices among which the tokens are further divided.
    """
    tokens = workload.tokens / mesh.degree(token_axes()) / strategy.num_microbatches / share
    has_rows = any(isinstance(op, DotProduct) for op in program(workload.model).logits)
    rows = workload.tokens / strategy.num_microbatches if has_rows else None
    return _time(workload, _weights_mesh(mesh), system, _of_ops(strategy), tokens, rows)


@lru_cache(maxsize=1 << 14)
def _weights_mesh(mesh: MeshShape) -> MeshShape:
    """Return the mesh with degree 1 on every axis, such as fsdp, that does not split weights in matmuls."""
    return MeshShape(**{axis: mesh.degree(axis) for axis in WEIGHT_AXES})


@lru_cache(maxsize=1 << 12)
def _of_ops(strategy: Strategy) -> Strategy:
    """Return the strategy with defaults in all fields that do not change ops; num_microbatches becomes at most 2."""
    return replace(
        strategy, num_microbatches=min(strategy.num_microbatches, 2), virtual_stages=1, schedule="1f1b", zero_stage=3
    )


@lru_cache(maxsize=1 << 14)
def _time(
    workload: Workload, mesh: MeshShape, system: System, strategy: Strategy, tokens: float, rows: float | None
) -> _Timed:
    """Return the times of one microbatch of `tokens` tokens on a device.

    mesh: only with axes that split weights in matmuls. rows: rows of a microbatch over all devices, for losses with a
    matmul over all these rows; else None.
    """
    step = train_step(workload, mesh, strategy)
    sizes = dict(step.extents.sizes) | {"B": tokens * mesh.degree(RULES["batch"]) / workload.seq_len}
    if rows is not None:
        sizes["I"] = rows
    if experts := workload.model.experts:
        sent = routed_tokens(workload, mesh) / sent_tokens(workload, mesh)
        sizes["R"] = tokens * mesh.ep * sent / experts.count
    # The time of an op is the same under every remat policy, so the times without recomputation are reused.
    plain = with_remat(workload, "none")
    known = dict(_time(plain, mesh, system, strategy, tokens, rows).known) if workload.remat != "none" else {}
    timer = OpTimer(step, Extents(sizes=sizes, mesh=mesh), workload.compute_dtype, system, strategy, known,
                    is_grouped=experts is not None and experts.capacity_factor is None)  # fmt: skip
    shares = dict(layer_shares(system))
    if strategy.attention != "scores":
        shares["attention"] = 1.0
    names = [stack.name for stack in program(workload.model).stacks]
    return _Timed({name: timer.layer(name) for name in names}, timer.passes(timer.ops("logits")), shares, timer.known)


@dataclass(frozen=True)
class OpTimer:
    """Computes the seconds of ops on one device.

    dtype: dtype of matmuls. known: cache of seconds, by `op.work`; it grows. is_grouped: whether the matmuls of experts
    are grouped matmuls, with any number of rows per expert.
    """

    step: Step
    extents: Extents
    dtype: str
    system: System
    strategy: Strategy
    known: dict[int, float] = field(default_factory=dict[int, float])
    is_grouped: bool = False

    def ops(self, region: str) -> tuple[ComputingOp, ...]:
        """Return the matmuls, attention and elementwise ops of a stack's layer or of `logits`; () for other regions."""
        found = self.step.ops.computing.get(region)
        return (*found.attention, *found.rest) if found else ()

    def layer(self, name: str) -> LayerSeconds:
        """Return the seconds of one layer of a stack."""
        ops = self.step.ops.computing[name]
        return LayerSeconds(self.passes(ops.attention), self.passes(ops.rest), self.passes(ops.of_queries).backward)

    def passes(self, ops: Iterable[ComputingOp]) -> PassSeconds:
        """Return the seconds of some ops, summed for each pass."""
        known, sums = self.known, {"forward": 0.0, "recompute": 0.0, "backward": 0.0}
        for op in ops:
            seconds = known.get(op.work)
            if seconds is None:
                seconds = known[op.work] = self.seconds(op)
            sums[op.phase] += seconds
        return PassSeconds(**sums)

    def seconds(self, op: ComputingOp) -> float:
        """Return the seconds of one op."""
        match op:
            case Matmul():
                return self._matmul(op)
            case AttentionOp():
                return self._attention(op)
            case Elementwise():
                return self._elementwise(op)

    def _matmul(self, op: Matmul) -> float:
        """Return the seconds of a matmul or of a gradient of a matmul."""
        rate = TPU_GROUPED_SHARE if op.experts and self.is_grouped and self.system.chip.kind == "tpu" else 1.0
        return self._dense(op) / rate

    def _dense(self, op: Matmul) -> float:
        """Return the seconds of a matmul or of one of its gradients; experts have equally many rows each."""
        local = self.extents.local_dims
        rows, inner, columns, count = local(op.rows), local(op.inner), local(op.columns), local(op.experts)
        if not rows:  # A matmul with the states of earlier chunks, in a sequence of only one chunk.
            return 0.0
        rounded = (self.strategy.matmul_dtype if op.is_rounded else None) or self.dtype
        # A collective matmul has a ring step for each shard over tp. On a torus each step sends and multiplies the two
        # halves of a shard separately.
        tp = self.extents.mesh.tp
        steps = tp * (2 if self.system.chip.kind == "tpu" else 1) if op.is_ring and tp > 1 else 1
        if op.role == "result":
            seconds = count * self._product(rows, inner, columns, rounded, steps)
            return seconds + self._cast(rounded, count * rows, count * inner * columns, inner, columns, is_forward=True)
        if op.role == "input_gradient":
            seconds = count * self._product(rows, columns, inner, rounded, steps)
            return seconds + self._cast(
                rounded, count * rows, count * inner * columns, inner, columns, is_forward=False
            )
        # int8 training computes the gradients of weights without int8 (`models.quantised.products`).
        dtype = self.dtype if rounded == "int8" else rounded
        # Matmuls that add to the residual stream accumulate their weight gradient over ring steps. Others compute it at
        # once, from the gathered input.
        sums = steps if op.is_summed else 1
        return count * sums * product_seconds(inner, rows / sums, columns, system=self.system, dtype=dtype)

    def _product(self, rows: float, inner: float, columns: float, dtype: str, steps: int) -> float:
        """Return the seconds of a matmul whose rows are split into `steps` matmuls."""
        return steps * product_seconds(rows / steps, inner, columns, system=self.system, dtype=dtype)

    def _cast(
        self, dtype: str, rows: float, weights: float, inner: float, columns: float, *, is_forward: bool
    ) -> float:
        """Return the seconds of rounding the operands of a matmul [rows, inner] @ [inner, columns] to 8 bits.

        In fp8 each operand is read for its maximum, then read again and written in 8 bits (torchao, float8 training).
        weights: elements of the weight. is_forward: whether for the forward matmul; if False, for its two gradient
        matmuls together.
        """
        if self.strategy.profile.fused_casts:
            return 0.0
        if dtype == "fp8":
            cast = 5 * (rows * (inner + 2 * columns) + 2 * weights)
            return self._hbm(cast / 3 if is_forward else 2 * cast / 3)
        if dtype == "int8":
            return self._hbm(5 * (rows * (inner if is_forward else columns) + weights))
        return 0.0

    def _attention(self, op: AttentionOp) -> float:
        """Return the seconds of attention in the phase of `op`, fused or with scores written to memory."""
        if op.is_of_chunks:
            return 0.0
        seq_len = self.extents.sizes["S"]
        pairs = self.extents.local(op.query) / op.qk_dim * seq_len
        if self.strategy.attention == "scores":
            forward, backward = self._scores(op, pairs, seq_len)
        else:
            kernel = self.strategy.attention
            value_dim = op.qk_dim if kernel == "cudnn" else op.value_dim  # cuDNN gets narrower values with zeros.
            flops = pairs * (op.qk_dim + value_dim) * window_share(op, seq_len)
            time = fused_attention_time(flops, int(seq_len), op.qk_dim, value_dim, kernel, self.system)
            rate = self.strategy.profile.attention_rate
            forward, backward = time.forward / rate, time.backward / rate
        if op.phase == "backward":
            return backward
        return forward * op.qk_dim / (op.qk_dim + op.value_dim) if op.is_scores_alone else forward

    def _scores(self, op: AttentionOp, pairs: float, seq_len: float) -> tuple[float, float]:
        """Return (forward seconds, backward seconds) of attention that writes its scores to memory.

        The matmuls are [s, h] @ [h, s] and [s, s] @ [s, h], batched over heads. pairs: query-key pairs of all heads.
        """
        dtype, size = self.dtype, dtype_bytes(self.dtype)
        heads = pairs / seq_len**2
        products = 0.0
        for inner, columns in ((op.qk_dim, seq_len), (seq_len, op.value_dim)):
            moved = size * heads * (seq_len * inner + inner * columns + seq_len * columns)
            products += product_seconds(
                heads * seq_len, inner, columns, system=self.system, dtype=dtype, moved_bytes=moved
            )
        # Each of the two matmuls has up to two gradient matmuls: those that a trained operand needs.
        forward, backward = products, products * len(op.gradient_products) / 2
        for each in softmax_passes(fuses=self.strategy.profile.fused_elementwise, dropout=self.strategy.dropout > 0):
            forward += self._pass(pairs, each.forward_bytes, each.forward_kernels)
            backward += self._pass(pairs, each.backward_bytes, each.backward_kernels)
        return forward, backward

    def _elementwise(self, op: Elementwise) -> float:
        """Return the seconds of an elementwise op, which reads and writes memory."""
        elements = sum(self.extents.local(array) for array in op.arrays)
        if op.kind == "accumulate":
            if self.strategy.profile.fused_accumulation:
                return 0.0
            return self._hbm(3 * dtype_bytes(self.dtype) * elements)
        if op.kind == "loss":
            forward, backward = LOGITS_BYTES if self.strategy.profile.fused_elementwise else LOGITS_BYTES_ONE_BY_ONE
            return self._hbm((backward if op.phase == "backward" else forward) * elements)
        if op.kind in OF_EXPERTS and self.system.chip.kind == "tpu":
            elements *= HBM_SHARE / TPU_GATHER_SHARE
        each = pass_of(op.kind, fuses=self.strategy.profile.fused_elementwise)
        if op.phase == "backward":
            return self._pass(elements, each.backward_bytes, each.backward_kernels)
        return self._pass(elements, each.forward_bytes, each.forward_kernels)

    def _pass(self, elements: float, nbytes: float, kernels: int) -> float:
        """Return the seconds of `kernels` kernels, which together read and write `nbytes` per element of an array.

        elements: the array's size. nbytes: for elements of 2 bytes; scaled for other dtypes.
        """
        launch = launch_seconds(self.system)
        scale = dtype_bytes(self.dtype) / 2
        return kernels * launch + self._hbm(scale * nbytes * elements)

    def _hbm(self, nbytes: float) -> float:
        """Return the seconds of reading and writing `nbytes` of memory, at the achieved bandwidth."""
        return nbytes / (HBM_SHARE * self.system.hbm_bytes_per_second)


def update_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> float:
    """Return the seconds of the gradient norm and of the optimizer's update on one device.

    The ops are fused, or run one by one as in PyTorch's foreach. Every optimizer is assumed to read and write as much
    as AdamW; Muon's matmuls are added.
    """
    states = trained_elements(workload, mesh, strategy) * dtype_bytes(workload.param_dtype)
    passes = UPDATE_PASSES if strategy.profile.fused_elementwise else UPDATE_PASSES_ONE_BY_ONE
    products = 0.0
    if strategy.optimizer == "muon":
        dtype = workload.compute_dtype
        for parameter, count in matrices_per_device(workload, mesh, strategy):
            each = sum(product_seconds(*sizes, system=system, dtype=dtype) for sizes in matrix_products(parameter))
            products += count * ITERATIONS * each
    return passes * states / (HBM_SHARE * system.hbm_bytes_per_second) + products


def _dequantising_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> float:
    """Return the seconds in which a GPU dequantises its part of a stage's base once; 0 where it was not measured."""
    each = gpu_products()["dequantised_value_seconds"].get(workload.quantize_base or "", 0.0)
    if system.chip.kind != "gpu" or not each:
        return 0.0
    stored, base = mesh if strategy.zero_stage == 3 else _weights_mesh(mesh), workload.base_paths
    values = sum(
        math.prod(local_parameter_shape(parameter, mesh=stored, rules=RULES, what=path))
        for path, parameter in leaves(parameters(workload.model))
        if path in base
    )
    return each * values / mesh.pp


def buffer_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> dict[Phase, float]:
    """Return the seconds per step, by phase, of copies out of and into the buffers of collectives.

    Weights are copied out of the buffers of all-gathers, gradients into those of reduce-scatters. Empty if the
    framework makes no such copies. They do not overlap with compute. Each element of a buffer is read and written once.
    Frameworks with lists of shards make one copy per group member, and zero the array before a gather.
    """
    if not (strategy.profile.flat_buffers or strategy.profile.shard_lists):
        return {}
    narrow = dtype_bytes(workload.compute_dtype)
    wide = dtype_bytes(strategy.gradient_dtype or workload.compute_dtype)
    # A gathered weight is read and written; a gradient is read in the compute dtype and written in that of its sum.
    factors, launch = {"all-gather": 2.0, "reduce-scatter": 1 + narrow / wide}, 0.0
    if strategy.profile.shard_lists:
        factors = {"all-gather": 3.0, "reduce-scatter": 2.0}
        launch = launch_seconds(system)
    fused = {
        f"{stack.name}.{op.name}"
        for stack in program(workload.model).stacks
        for op in stack.ops
        if isinstance(op, Linear) and op.is_fused
    }
    seconds: dict[Phase, float] = {}
    for move in filter(is_of_weights, weight_collectives(workload, mesh, strategy)):
        copies = 0 if move.array in fused else move.count * mesh.degree(move.axes)
        taken = copies * launch + factors[move.kind] * move.bytes / (HBM_SHARE * system.hbm_bytes_per_second)
        seconds[move.phase] = seconds.get(move.phase, 0.0) + taken
    return seconds
