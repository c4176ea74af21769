"""Time of a server's step on a mesh, by term. A step generates a token of each sequence, or processes whole prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.fabric import MeshPlacement
from meshwright.description.hardware.system import System
from meshwright.description.step.ir import AttentionOp, Communicate, Extents, Step, Width
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.passes.serve_ends import EMBEDDING, LOGITS
from meshwright.description.step.serve import model_step, serve_step
from meshwright.description.step.serving import CacheSplit, Serving, ServingLayout, can_gather_weights
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import moved_bytes
from meshwright.planning.cost.elementwise import pass_of
from meshwright.planning.cost.flops import matmul_flops
from meshwright.planning.cost.kv_cache import cache_bytes, mean_cache_bytes
from meshwright.planning.cost.rates.achieved import HBM_SHARE
from meshwright.planning.cost.rates.attention import attention_share
from meshwright.planning.cost.rates.collective_time import planned_seconds, stops_ops
from meshwright.planning.cost.rates.efficiency import launch_seconds, layer_shares, product_efficiency
from meshwright.planning.cost.rates.narrow_values import cached_seconds, weight_conversion_seconds
from meshwright.planning.cost.rates.triton_rows import padded_rows
from meshwright.planning.cost.roofline import OpTime, critical_batch, matmul_bytes
from meshwright.planning.cost.serving_bytes import weight_bytes
from meshwright.planning.cost.small_ops import small_op_seconds
from meshwright.record import Bound, Collective

BUSY_ROWS = 512
"""The number of rows from which a matmul with bf16 weights is compute bound.

With fewer rows its flops are timed at the efficiency of this many rows, and reading its weights takes longer.
"""

BOUNDS: Mapping[str, Bound] = {
    "weights": "memory",
    "cache": "memory",
    "elementwise": "memory",
    "products": "compute",
    "attention": "compute",
    "small ops": "latency",
    "communication": "communication",
}
"""The resource that limits each term of a step's time."""


@dataclass(frozen=True)
class ServingStep:
    """Seconds of a server's step on one device.

    breakdown_seconds: seconds by term; the terms are the keys of `BOUNDS`. `products` are compute-bound matmuls,
    `weights` matmuls bound by reading weights; `attention` is compute-bound attention, `cache` attention bound by
    reading the cache; `small ops` is the least time of ops in decode (`small_op_seconds`). moves: (collective,
    its seconds, those of them that are exposed). Collectives of activations do not overlap with compute: the next
    matmul needs their result. Gathers of weights do, as in training.
    """

    breakdown_seconds: Mapping[str, float]
    moves: tuple[tuple[Collective, float, float], ...]

    @property
    def seconds(self) -> float:
        """The sum of all terms."""
        return sum(self.breakdown_seconds.values())

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives with their seconds."""
        return tuple(replace(move, seconds=time, exposed_seconds=exposed) for move, time, exposed in self.moves)

    @property
    def bound(self) -> Bound:
        """The resource that limits most of the step's time."""
        waits: dict[Bound, float] = {}
        for name, seconds in self.breakdown_seconds.items():
            waits[BOUNDS[name]] = waits.get(BOUNDS[name], 0.0) + seconds
        return max(waits, key=waits.__getitem__)


def serving_step(serving: Serving, layout: ServingLayout, batch: int, laid: MeshPlacement) -> ServingStep:
    """Return the times of a step of `batch` sequences (over all groups of devices), each at full length.

    laid: the layout's mesh, laid over its system (`hardware.fabric.lay_mesh`).
    """
    step, system = serve_step(serving, layout, batch), laid.system
    terms = dict.fromkeys(BOUNDS, 0.0)
    matmuls = matmul_times(step, serving, system)
    for times, time, *_ in matmuls:
        terms["products" if time.bound == "compute" else "weights"] += times * time.seconds
    if serving.phase == "decode":
        terms["small ops"] = small_op_seconds(step, serving.model, system, layers_read_seconds(matmuls, system))
    # Whole prompts use a fused kernel that skips masked scores, and read no cache.
    flops = read = 0.0
    for op in step.ops.attention:
        times = step.repeats[op.region.name].mean
        flops += times * _attention_flops(op, step.extents)
        read += times * _cache_seconds(op, step.extents, serving, system) if serving.is_paged else 0.0
    peak = attention_share(system) * system.peak(serving.activation_dtype)
    attention = OpTime(flops / peak, read)
    terms["attention" if attention.bound == "compute" else "cache"] += attention.seconds
    # Each chain of norms, sums, rotary embedding and activation functions is one pass over memory.
    # The bytes of a pass are given for elements of 2 bytes.
    narrow = sum(
        step.repeats[op.region.name].mean
        * pass_of(op.kind, fuses=True).forward_bytes
        * sum(map(step.extents.local, op.arrays))
        for op in step.ops.elementwise
    )
    terms["elementwise"] = (
        narrow * dtype_bytes(serving.activation_dtype) / 2 / (HBM_SHARE * system.hbm_bytes_per_second)
    )
    if layout.gathers_weights(serving):  # The layers are those of training.
        terms |= {name: terms[name] / layer_shares(system)["rest"] for name in ("products", "weights", "elementwise")}
    compute = sum(terms[name] for name, bound in BOUNDS.items() if bound == "compute")
    moves = tuple(_moves(step, serving, laid, compute))
    terms["communication"] = sum(exposed for *_, exposed in moves)
    return ServingStep(terms, moves)


class MatmulTime(NamedTuple):
    """How often one device runs a size of matmul, the time of one, and whether it is of the logits or of experts."""

    times: float
    time: OpTime
    is_head: bool
    is_of_experts: bool


def matmul_times(step: Step, serving: Serving, system: System) -> tuple[MatmulTime, ...]:
    """Return the times of a step's matmuls by size."""
    local, counts = step.extents.local_dims, dict[tuple[tuple[float, float, float, float], bool, bool], float]()
    for op in step.ops.matmuls:
        shape = local(op.rows), local(op.inner), local(op.columns), local(op.experts)
        key = shape, op.region == LOGITS, bool(op.experts)
        counts[key] = counts.get(key, 0.0) + step.repeats[op.region.name].mean
    return tuple(
        MatmulTime(times, product_time(*shape, system=system, serving=serving, is_head=is_head), is_head, is_of_experts)
        for (shape, is_head, is_of_experts), times in counts.items()
    )


def layers_read_seconds(matmuls: Iterable[MatmulTime], system: System) -> float:
    """Return the seconds of reading those weights of layers of which some are read ahead (`SmallOps`).

    matmuls: from `matmul_times`.
    """
    small = system.chip.small_ops
    return sum(
        each.times * each.time.memory_seconds
        for each in matmuls
        if not each.is_head and (not each.is_of_experts or (small is not None and small.reads_experts_ahead))
    )


def _moves(
    step: Step, serving: Serving, laid: MeshPlacement, compute: float
) -> Iterator[tuple[Collective, float, float]]:
    """Yield each collective of a step, its seconds, and its exposed seconds.

    Gathers of weights are exposed as far as all of them take longer than `compute`, the seconds of matmuls and
    attention: each runs beside the layer before.
    """
    moves = tuple(_collectives(step, serving))
    timed = [
        (move, planned_seconds(move, laid), _is_of_layer(op) and not stops_ops(move, laid))
        for move, op in zip(moves, step.communication, strict=True)
    ]
    behind = sum(seconds for _, seconds, hides in timed if hides)
    share = max(0.0, 1 - compute / behind) if behind else 0.0
    for move, seconds, hides in timed:
        yield move, seconds, seconds * (share if hides else 1.0)


def _is_of_layer(op: Communicate) -> bool:
    """Whether an op gathers a weight of a layer, beside which the layer before can run."""
    return op.of_weight and op.region != EMBEDDING


def serving_collectives(serving: Serving, layout: ServingLayout, batch: int) -> tuple[Collective, ...]:
    """Return every collective of a step with more than one device in its group, in bytes per device and step."""
    return tuple(_collectives(serve_step(serving, layout, batch), serving))


def moves_fewer_weights(model: ModelConfig, mesh: MeshShape, *, prompts: int, length: int) -> bool:
    """Whether whole prompts of `length` tokens move fewer bytes if weights are gathered over fsdp than if they are not.

    False where weights cannot be gathered. prompts: their number, over all devices.
    """
    if not can_gather_weights(model, mesh):
        return False
    serving = Serving(model=model, phase="prefill", prompt_len=length, output_len=1)

    def moved(cache: CacheSplit) -> int:
        return sum(move.bytes for move in serving_collectives(serving, ServingLayout(mesh, cache), prompts))

    return moved("batch") < moved("sequence")


def serving_flops(serving: Serving, batch: int) -> float:
    """Return the model flops of a step over all devices: 2 per weight and token, and attention.

    Logits are counted for each sequence's last token, attention within a prompt for unmasked pairs.
    """
    step = model_step(serving, batch)
    products = sum(step.repeats[op.region.name].mean * matmul_flops(op, step.extents) for op in step.ops.matmuls)
    return products + sum(
        step.repeats[op.region.name].mean * _attention_flops(op, step.extents) for op in step.ops.attention
    )


def serving_device_flops(
    serving: Serving, layout: ServingLayout, batch: int, *, keys: float | None = None, logits: int = 1
) -> int:
    """Return the flops of a step on the device with most work: matmuls with weights, and attention to the whole cache.

    They are rounded, as the mean number of experts that are read times their mean number of rows is whole.

    keys: keys per query, masked ones included; by default only unmasked ones. logits: how often the output head is
    counted.
    """
    step = serve_step(serving, layout, batch)
    extents = step.extents if keys is None else replace(step.extents, sizes={**step.extents.sizes, "keys": keys})
    counts = {name: repeat.mean * (logits if name == LOGITS.name else 1) for name, repeat in step.repeats.items()}
    products = sum(counts[op.region.name] * matmul_flops(op, extents) for op in step.ops.matmuls)
    return round(
        products + sum(step.repeats[op.region.name].mean * _attention_flops(op, extents) for op in step.ops.attention)
    )


def batch_of_equal_reads(serving: Serving, layout: ServingLayout) -> float:
    """Return the batch, over all devices, at which a device reads as many bytes of cache as of weights in a step."""
    return layout.num_groups * weight_bytes(serving, layout) / mean_cache_bytes(serving, layout)


def compute_bound_batch(serving: Serving, layout: ServingLayout, system: System) -> float:
    """Return the batch, over all devices, from which matmuls take longer than reading their weights, at full rates.

    It is s_w C / (2 W) sequences for each group of devices that has a copy of the weights (`critical_batch`). With E
    experts, k of them active, it is E / (k ep) times as large.
    """
    rows = critical_batch(system, weight_dtype=serving.weight_dtype, compute_dtype=serving.compute_dtype)
    sizes = model_step(serving, 1).extents.sizes
    if "R" not in sizes:
        return rows * layout.num_groups
    return max(rows * sizes["B"] * sizes["S"] / sizes["R"] * layout.mesh.dp, rows * layout.num_groups)


def prefill_servers(*, prefill_seconds: float, step_seconds: float, batch: float, decode_tokens: float) -> float:
    """Return the number of prefill servers that keep a decode server busy: t_prefill B / (t_step decode_tokens).

    Each sequence is prefilled alone, and one of `batch` sequences ends every decode_tokens / batch steps (scaling book,
    applied-inference: disaggregated serving).
    """
    return prefill_seconds * batch / (step_seconds * decode_tokens)


def product_time(
    rows: float,
    inner: float,
    columns: float,
    count: float = 1,
    *,
    system: System,
    serving: Serving,
    is_head: bool = False,
) -> OpTime:
    """Return the time of the flops and of the memory traffic of `count` matmuls [rows, inner] @ [inner, columns].

    Flops are timed at the efficiency of the size, bytes at the achieved bandwidth. On GPUs that efficiency includes
    each matmul's launch; the time of memory traffic includes one launch for all `count` matmuls, and is that of
    converting a narrow weight's values if that takes longer.

    is_head: whether the weight is the output head, which has no `WeightFormat`.
    """
    dtype = serving.compute_dtype
    share = product_efficiency(system, max(rows, BUSY_ROWS), inner, columns, dtype=dtype)
    flops_seconds = count * 2 * rows * inner * columns / (system.peak(dtype) * share)
    form, activation_dtype = serving.weight_format, serving.activation_dtype
    weight_dtype = activation_dtype if form is not None and is_head else serving.weight_dtype
    moved = matmul_bytes(rows, inner, columns, weight_dtype=weight_dtype, activation_dtype=activation_dtype)
    if form is not None and not is_head:
        moved += max(1, inner / (form.group or inner)) * columns * (form.scale_bytes + form.zero_bytes)
    launch, reading = launch_seconds(system), count * moved / (HBM_SHARE * system.hbm_bytes_per_second)
    if system.chip.kind == "gpu" and form is not None and not is_head and dtype == activation_dtype:
        reading = max(reading, weight_conversion_seconds(serving.weight_dtype, count * inner * columns, rows))
    return OpTime(flops_seconds, launch + reading)


def _cache_seconds(op: AttentionOp, extents: Extents, serving: Serving, system: System) -> float:
    """Return the seconds of reading the cache of one layer.

    On GPUs heads are padded to a power of 2 as they are read, and narrow elements are converted.
    """
    read = cache_bytes(op, extents, serving)
    if system.chip.kind != "gpu":
        return read / (HBM_SHARE * system.hbm_bytes_per_second)
    sizes = [array.dims[-1].size or 1 for array in op.cache]
    padding = sum(map(padded_rows, sizes)) / sum(sizes)
    return cached_seconds(serving.kv_dtype, padding * read / dtype_bytes(serving.kv_dtype), system)


def _attention_flops(op: AttentionOp, extents: Extents) -> float:
    """Return the flops of attention: of each query with the keys that it attends to."""
    return 2 * extents.local(op.query) / op.qk_dim * (op.qk_dim + op.value_dim) * extents.sizes["keys"]


def _collectives(step: Step, serving: Serving) -> Iterator[Collective]:
    """Yield the collectives of a step, in bytes per device and step."""
    widths: dict[Width, float] = {"compute": dtype_bytes(serving.activation_dtype), "float32": 4}
    for op in step.communication:
        count = step.repeats[op.region.name].useful
        size = moved_bytes(op, step.extents, widths)
        yield Collective(
            kind=op.kind, axes=op.axes, phase=op.phase, bytes=int(size) * count, count=count, array=op.name
        )
