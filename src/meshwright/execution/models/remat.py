"""Remat policies: the checkpoint names of a layer's values, and which of them are saved for backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshwright.description.step.workload import Remat
from meshwright.execution.runtime.attention.blockwise import ATTENTION_RESIDUALS
from meshwright.execution.runtime.collective_matmul import GATHERED_BY_RING

INTERMEDIATE = "intermediate"
"""Inputs of matmuls: saved by the remat policies `none` and `attention`."""

PRODUCT = "product"
"""Results of matmuls: saved by all remat policies except `block` and `offload`."""

SCORES = "scores"
"""Attention scores: saved by the remat policy `none` alone."""

LAYER_INPUT = "stream"
"""The input of a layer: saved in host memory by the remat policy `offload`."""

KEPT: Mapping[Remat, tuple[str, ...]] = {
    "none": (PRODUCT, INTERMEDIATE, GATHERED_BY_RING, ATTENTION_RESIDUALS, SCORES),
    "attention": (PRODUCT, INTERMEDIATE, GATHERED_BY_RING, ATTENTION_RESIDUALS),
    "matmuls": (PRODUCT,),
    "block": (),
}
"""The checkpoint names that each remat policy saves in device memory."""


def rematerialized(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Return the function of a layer with a remat policy applied.

    Only named values are saved, so gathered weights never are: that would undo their sharding. Even the policy `none`
    recomputes norms and activation functions.
    """
    policies = jax.checkpoint_policies
    if remat == "offload":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.save_only_these_names(*KEPT[remat])
        if ATTENTION_RESIDUALS in KEPT[remat]:
            policy = policies.save_from_both_policies(policy, _is_cudnn_attention)
    return jax.checkpoint(layer, policy=policy)


def _is_cudnn_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a primitive is cuDNN's attention, whose results have no checkpoint name in JAX 0.10.2 to 0.12.0.1.

    One result is each query's softmax statistics; without it, backward would run the whole kernel again.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"
