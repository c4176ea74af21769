"""A mixture of experts in place of a layer's mlp, beside the mlp that works on every token where there is one.

Letters of dims: t tokens of a device, e experts, d embed, f the width of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.models.attention import INTERMEDIATE, PRODUCT
from meshwright.models.product import product
from meshwright.models.quantised_experts import expert_product
from meshwright.runtime import Layout
from meshwright.runtime.experts import Split, visit
from meshwright.runtime.experts_routing import Load, probabilities, route
from meshwright.runtime.shards import on_shards
from meshwright.workload import RULES, Experts, MatmulDtype

STREAM = ("batch", "residual_sequence", "activation")


def mix(
    h: Array, weights: Mapping[str, Any], experts: Experts, layout: Layout, matmul_dtype: MatmulDtype | None = None
) -> tuple[Array, Array]:
    """What its experts add to each token of h [b, s, d], split as the stream is between blocks; and their load.

    The load [devices, 3, e] is one layer's `Load` on each device that has other tokens: `load_of_layers` takes the sums
    of all layers at once. matmul_dtype: to what operands of their products are rounded; the router's are not.
    """
    router = layout.weight(weights["router"], "embed", "router", dtype=h.dtype, along="residual_sequence")
    logits = checkpoint_name(product("bsd,de->bse", h, router, dtype=jnp.float32), PRODUCT)
    dims = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
    used = [layout.weight(weights[f"expert_{name}"], "expert", *rest, dtype=h.dtype) for name, rest in dims.items()]
    stream, tokens = layout.spec(*STREAM), layout.axes("batch") + layout.axes("residual_sequence")
    mixed = on_shards(
        partial(_mix, experts=experts, split=_split(layout, tokens), matmul_dtype=matmul_dtype),
        layout,
        in_specs=(stream, stream, *(jax.typeof(weight).sharding.spec for weight in used)),
        out_specs=(stream, P(tokens or None, None, None)),
    )
    added, load = mixed(h, logits, *used)
    return checkpoint_name(added, PRODUCT), load


def _split(layout: Layout, tokens: tuple[str, ...]) -> Split:
    """How experts and the tokens that come to them are split; over ep tokens have to be where experts are."""
    ep, tp = layout.axes("expert"), layout.axes("mlp")
    if not set(ep) <= set(tokens):
        batch = RULES["batch"]
        raise MeshwrightError(
            f"experts are split over {' and '.join(ep)}, and the batch is not; use a batch that is a multiple of"
            f" {'*'.join(batch)}={layout.mesh.degree(batch)}, or ep=1"
        )
    return Split(ep, tp, tp if set(tp) <= set(tokens) else ())


def load_of_layers(loads: Array) -> Load:
    """The load of every layer [layers, e], of all devices, from what `mix` gave for each [layers, devices, 3, e]."""
    return Load(*jnp.moveaxis(jnp.sum(loads, axis=1), 1, 0))


def _mix(
    h: Array,
    logits: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    experts: Experts,
    split: Split,
    matmul_dtype: MatmulDtype | None,
) -> tuple[Array, Array]:
    """`mix` on one device."""
    times = partial(expert_product, matmul_dtype=matmul_dtype)
    if split.width and not split.tokens:
        # Every device has all tokens, and parts of experts: so gradients are summed here once, not for each product.
        h = jax.lax.pcast(h, split.width, to="varying")
    routing = route(logits, experts.num_active)
    here = visit(h, routing, experts, split, keep=partial(checkpoint_name, name=INTERMEDIATE))
    opened = [checkpoint_name(times(here.rows, weight, here.sizes), PRODUCT) for weight in (gate, up)]
    # A product is as much in whichever order it is scaled; scaled here, backward needs nothing that `down` makes.
    hidden = (jax.nn.silu(opened[0]) * opened[1] * here.shares).astype(h.dtype)
    added = here.back(times(checkpoint_name(hidden, INTERMEDIATE), down, here.sizes))
    copies = jnp.sum(routing.chosen[..., None] == jnp.arange(experts.count), axis=(0, 1, 2), dtype=jnp.float32)
    return added, jnp.stack([copies, here.dropped, probabilities(logits)])[None]
