"""The time of one step of a server on a mesh, term by term: a token of every sequence, or the prompts of one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.cost.achieved import HBM_SHARE
from meshwright.cost.collective import collective_seconds
from meshwright.cost.elementwise import FUSED, Pass
from meshwright.cost.kv_cache import kept_tokens, mean_cache_bytes
from meshwright.cost.links import collective_efficiency
from meshwright.cost.roofline import critical_batch, critical_tokens_moe
from meshwright.cost.serving_attention import decode_attention_time, prefill_attention_time, prompt_pairs
from meshwright.cost.serving_bytes import mlp_width, weight_bytes
from meshwright.cost.serving_products import product_times
from meshwright.cost.serving_traffic import serving_collectives
from meshwright.hardware import Placement, System, dtype_bytes
from meshwright.record import Bound, Collective
from meshwright.step import TENSOR_AXES, ModelConfig, Serving, ServingLayout, active_share, leaves, parameters

Placements = Callable[[tuple[str, ...]], Placement]

BOUNDS: Mapping[str, Bound] = {
    "weights": "memory",
    "cache": "memory",
    "elementwise": "memory",
    "products": "compute",
    "attention": "compute",
    "communication": "communication",
}
"""What each term of a step waits for."""


@dataclass(frozen=True)
class ServingStep:
    """The time of a step, and each of its collectives with its time; every term of `BOUNDS` is in the breakdown.

    `weights`: products that wait for reading them; `products`: those that wait for arithmetic; `cache` and `attention`
    the same of attention. Nothing hides a collective: the next product needs what it brings.
    """

    breakdown_seconds: Mapping[str, float]
    moves: tuple[tuple[Collective, float], ...]

    @property
    def seconds(self) -> float:
        """The sum of all terms."""
        return sum(self.breakdown_seconds.values())

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives with their times, all of them exposed."""
        return tuple(replace(move, seconds=time, exposed_seconds=time) for move, time in self.moves)

    @property
    def bound(self) -> Bound:
        """What most of the step waits for."""
        waits: dict[Bound, float] = {}
        for name, seconds in self.breakdown_seconds.items():
            waits[BOUNDS[name]] = waits.get(BOUNDS[name], 0.0) + seconds
        return max(waits, key=waits.__getitem__)


def serving_step(
    serving: Serving, layout: ServingLayout, batch: int, system: System, placement: Placements
) -> ServingStep:
    """The time of a step of `batch` sequences, all as long as they get.

    placement: where some mesh axes lie on the system (`hardware.lay_mesh(…).placement`).
    """
    own = math.ceil(batch / layout.num_groups)
    is_prefill = serving.phase == "prefill"
    rows = own * (serving.prompt_len if is_prefill else 1)
    terms = dict.fromkeys(BOUNDS, 0.0)
    for time in product_times(serving, layout, system, rows=rows, ends_rows=own):
        terms["products" if time.bound == "compute" else "weights"] += time.seconds
    attention = (prefill_attention_time if is_prefill else decode_attention_time)(serving, layout, batch, system)
    terms["attention" if attention.bound == "compute" else "cache"] += attention.seconds
    terms["elementwise"] = _elementwise_seconds(serving, layout, rows, system)
    moves = serving_collectives(serving, layout, batch)
    times = [_move_seconds(move, placement(move.axes), system) for move in moves]
    terms["communication"] = sum(times)
    return ServingStep(terms, tuple(zip(moves, times, strict=True)))


def serving_flops(serving: Serving, batch: int) -> float:
    """The flops that a step of the model needs over all devices: 2 for each weight that works on a token, and pairs.

    The logits are those of each sequence's last token; of a prompt, attention is counted as far as it is not masked.
    """
    model, is_prefill = serving.model, serving.phase == "prefill"
    inside = outside = 0.0
    for path, parameter in leaves(parameters(model)):
        if parameter.role == "product":
            size = parameter.size * active_share(parameter, model)
            inside, outside = (inside + size, outside) if "." in path else (inside, outside + size)
    pairs = prompt_pairs(serving) if is_prefill else kept_tokens(serving)
    scores = model.num_layers * model.num_heads * (model.query_key_dim + model.value_dim) * pairs
    return 2 * batch * (inside * (serving.prompt_len if is_prefill else 1) + outside + scores)


def batch_of_equal_reads(serving: Serving, layout: ServingLayout) -> float:
    """The batch from which a device reads as many bytes of cache as of weights."""
    return layout.num_groups * weight_bytes(serving, layout) / mean_cache_bytes(serving, layout)


def compute_bound_batch(serving: Serving, layout: ServingLayout, system: System) -> float:
    """The batch from which products with weights take longer than reading them, both at their full rate.

    s_w C / (2 W) for each group of devices that reads its weights, times E / k of experts, which ep shares out
    (`critical_batch`, `critical_tokens_moe`).
    """
    rows = critical_batch(system, weight_dtype=serving.weight_dtype, compute_dtype=serving.compute_dtype)
    experts = serving.model.experts
    if experts is None:
        return rows * layout.num_groups
    whole = critical_tokens_moe(rows, num_experts=experts.count, num_active=experts.num_active)
    return max(whole * layout.mesh.dp, rows * layout.num_groups)


def _elementwise_seconds(serving: Serving, layout: ServingLayout, rows: float, system: System) -> float:
    """Norms, residual sums, rotation and activation, each chain of them in one pass over memory.

    Launches are not counted: what a server runs over and over is launched as a whole, and products count theirs.
    """
    model, degree = serving.model, layout.mesh.degree(TENSOR_AXES)
    widths = {
        "stream": model.embed / layout.mesh.fsdp / (degree if serving.phase == "prefill" else 1),
        "mlp": mlp_width(model) / degree,
        "heads": (model.num_heads + model.num_kv_heads) * model.query_key_dim / degree,
    }
    # Passes are counted in narrow elements, of two bytes.
    narrow = sum(each.forward_bytes * widths[name] for name, each in _layer_passes(model))
    moved = model.num_layers * rows * narrow * dtype_bytes(serving.activation_dtype) / 2
    return moved / (HBM_SHARE * system.hbm_bytes_per_second)


def _layer_passes(model: ModelConfig) -> Iterator[tuple[str, Pass]]:
    """Every pass of a layer but the softmax's, with what its elements are: `stream`, `heads` or `mlp`."""
    table = FUSED
    norm = table["norm"]
    for _ in range(1 if model.parallel_blocks else 2):
        yield "stream", norm
    for _ in range(2):
        yield "stream", table["residual"]
    # Queries, keys and values; gate and up.
    for _ in range(3 if model.gated else 2):
        yield "stream", table["branch"]
    if model.positions == "rotary":
        yield "heads", table["rotary"]
    yield "mlp", table["gated" if model.gated else "activation"]


def _move_seconds(move: Collective, placement: Placement, system: System) -> float:
    """The time that all runs of a collective take on the fabric, at the rate that links achieve."""
    once = collective_seconds(move.kind, move.bytes / move.count, placement)
    share = collective_efficiency(system, once)
    return max(once.bandwidth_seconds / share, once.latency_seconds) * move.count
