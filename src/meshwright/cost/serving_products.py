"""The products with weights that a device of a server does, and their time: arithmetic or reading the weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshwright.cost.achieved import HBM_SHARE
from meshwright.cost.efficiency import gpu_figures, product_efficiency
from meshwright.cost.roofline import OpTime, matmul_bytes
from meshwright.hardware import System
from meshwright.mesh import MeshShape
from meshwright.step import (
    SERVING_RULES,
    STACKED,
    Experts,
    ModelConfig,
    Serving,
    ServingLayout,
    leaves,
    local_parameter_shape,
    parameters,
)

BUSY_ROWS = 512
"""Rows from which the estimates of products with bf16 weights are those of their arithmetic.

With fewer they are times of reading the weights, which are counted here on their own, in the dtype they are kept in.
"""


@dataclass(frozen=True)
class ServingProduct:
    """[rows, inner] @ [inner, columns] on one device.

    num_experts: the experts of a device that have such a product, 0 where it is not one of experts. is_inside: in the
    layers, where every token has it.
    """

    inner: int
    columns: int
    num_experts: int
    is_inside: bool


@lru_cache(maxsize=1 << 12)
def serving_products(model: ModelConfig, mesh: MeshShape) -> tuple[tuple[ServingProduct, int], ...]:
    """Every product with weights that a device does, split as `SERVING_RULES` say, and how often in a step."""
    counts: Counter[ServingProduct] = Counter()
    for path, parameter in leaves(parameters(model)):
        if parameter.role == "product":
            shape = local_parameter_shape(parameter, mesh=mesh, rules=SERVING_RULES, what=path)
            counts[_product(dict(zip(parameter.axes, shape, strict=True)))] += parameter.num_layers
    return tuple(counts.items())


def _product(dims: dict[str, int]) -> ServingProduct:
    """The product of one weight; what is contracted is its first dim, or for a weight back into the stream the rest."""
    is_inside = any(dims.pop(name, 0) for name in STACKED)
    num_experts = dims.pop("expert", 0)
    size = math.prod(dims.values())
    contracted = dims.get("embed", next(iter(dims.values())))
    columns = dims["embed"] if next(reversed(dims)) == "embed" and "vocab" not in dims else size // contracted
    return ServingProduct(size // columns, columns, num_experts, is_inside)


def hit_experts(experts: Experts, num_local: int, tokens: float) -> float:
    """The experts of a device that some of `tokens` tokens are sent to, as expected where each is as likely.

    E (1 - (1 - k / E)^T): one token reads k experts, many read all of them.
    """
    return num_local * (1 - (1 - experts.num_active / experts.count) ** tokens)


def product_times(
    serving: Serving, layout: ServingLayout, system: System, *, rows: float, ends_rows: float
) -> Iterator[OpTime]:
    """The time of each product of a step, over all its layers; `rows` of them in layers, `ends_rows` for the logits."""
    mesh, experts = layout.mesh, serving.model.experts
    for product, times in serving_products(serving.model, mesh):
        count, own = 1.0, rows if product.is_inside else ends_rows
        if experts and product.num_experts:
            count = hit_experts(experts, product.num_experts, rows * mesh.ep)
            # As many tokens come from the other devices of ep as go to them.
            own = rows * experts.num_active / count
        once = product_time(own, product.inner, product.columns, count, system=system, serving=serving)
        yield OpTime(times * once.flops_seconds, times * once.memory_seconds)


def product_time(
    rows: float, inner: float, columns: float, count: float = 1, *, system: System, serving: Serving
) -> OpTime:
    """The time of `count` products at the efficiency of their size, and of reading what they multiply.

    HBM gives what it achieves. On a GPU reading begins with a launch, one for all `count`; the efficiency of arithmetic
    has it in it.
    """
    dtype = serving.compute_dtype
    share = product_efficiency(system, max(rows, BUSY_ROWS), inner, columns, dtype=dtype)
    flops_seconds = count * 2 * rows * inner * columns / (system.peak(dtype) * share)
    moved = matmul_bytes(
        rows, inner, columns, weight_dtype=serving.weight_dtype, activation_dtype=serving.activation_dtype
    )
    launch = gpu_figures(system.chip.name).launch_seconds if system.chip.kind == "gpu" else 0.0
    return OpTime(flops_seconds, launch + count * moved / (HBM_SHARE * system.hbm_bytes_per_second))
