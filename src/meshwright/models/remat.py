"""What a layer keeps for backward: the names that its values carry, and the remat policies over those names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshwright.runtime.attention.blockwise import ATTENTION_RESIDUALS
from meshwright.runtime.collective_matmul import GATHERED_BY_RING
from meshwright.step import Remat

INTERMEDIATE = "intermediate"
"""The name of what products read, which the remat policies `none` and `attention` keep for backward."""

PRODUCT = "product"
"""The name of the results of products, which all remat policies but `block` and `offload` keep for backward."""

SCORES = "scores"
"""The name of attention's scores, which only the remat policy `none` keeps for backward."""

LAYER_INPUT = "stream"
"""The name of a layer's input, which the remat policy `offload` keeps in host memory."""

KEPT: Mapping[Remat, tuple[str, ...]] = {
    "none": (PRODUCT, INTERMEDIATE, GATHERED_BY_RING, ATTENTION_RESIDUALS, SCORES),
    "attention": (PRODUCT, INTERMEDIATE, GATHERED_BY_RING, ATTENTION_RESIDUALS),
    "matmuls": (PRODUCT,),
    "block": (),
}
"""The names that a remat policy keeps for backward in the device's memory."""


def rematerialized(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """The layer under a remat policy.

    What is kept is named, so that gathered weights never are: that would undo their sharding. Without a policy backward
    recomputes what takes neither a product nor a collective, norms and activation functions.
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
    return jax.checkpoint(layer, policy=policy)
