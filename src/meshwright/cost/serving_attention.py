"""The time of attention on a device of a server: reading the cache for one token, or all pairs of a prompt."""

from __future__ import annotations

import math

from meshwright.cost.achieved import HBM_SHARE
from meshwright.cost.attention import attention_share
from meshwright.cost.kv_cache import device_sequences, device_tokens, read_cache_bytes
from meshwright.cost.roofline import OpTime
from meshwright.hardware import System
from meshwright.step import Serving, ServingLayout


def decode_attention_time(serving: Serving, layout: ServingLayout, batch: int, system: System) -> OpTime:
    """The time of one token's attention of every sequence, over all layers: its products, and reading the cache.

    With latent attention queries are multiplied into the latent, and results out of it, by weights that are products
    of their own (DeepSeek-V2, arXiv:2405.04434, section 2.1.2), so that the latent alone is read.
    """
    model = serving.model
    score, value = model.query_key_dim, model.value_dim
    if model.latent:
        score, value = model.latent.kv_rank + model.latent.rope_head_dim, model.latent.kv_rank
    pairs = device_sequences(serving, layout, batch) * device_tokens(serving, layout) * _device_heads(serving, layout)
    flops = 2 * model.num_layers * pairs * (score + value)
    read = read_cache_bytes(serving, layout, batch)
    peak = attention_share(system) * system.peak(serving.activation_dtype)
    return OpTime(flops / peak, read / (HBM_SHARE * system.hbm_bytes_per_second))


def prefill_attention_time(serving: Serving, layout: ServingLayout, batch: int, system: System) -> OpTime:
    """The time of the attention of whole prompts, over all layers, in a fused kernel that skips what is masked.

    Queries are split over fsdp, but for those from latents, which every device of fsdp has whole.
    """
    model, mesh = serving.model, layout.mesh
    queries_degree = mesh.degree(("sp", "tp")) * (1 if model.latent else mesh.fsdp)
    heads = math.ceil(batch / layout.num_groups) * model.num_heads / queries_degree
    flops = 2 * model.num_layers * heads * prompt_pairs(serving) * (model.query_key_dim + model.value_dim)
    return OpTime(flops / (attention_share(system) * system.peak(serving.activation_dtype)), 0.0)


def prompt_pairs(serving: Serving) -> float:
    """The pairs of a query and a key that it sees in a prompt: half of all, of a sliding window those inside it."""
    length = serving.prompt_len

    def pairs(window: int | None) -> float:
        keys = min(window or length, length)
        return length * keys - keys * keys / 2

    return serving.model.mean_over_layers(pairs)


def _device_heads(serving: Serving, layout: ServingLayout) -> float:
    """The query heads for which a device looks at the tokens it has: where the cache is split, all of a kv head's."""
    model, mesh = serving.model, layout.mesh
    if layout.cache == "heads":
        return model.num_heads / mesh.degree(("sp", "tp"))
    return model.num_heads if model.latent else model.num_heads / mesh.tp
