"""The cache of keys and values of a server: what a token, a sequence and a device hold of it.

Models with latent attention keep the latent alone (DeepSeek-V2, arXiv:2405.04434), those with a sliding window the
keys and values inside it (Mistral 7B, arXiv:2310.06825). Space is handed out in pages (vLLM, arXiv:2309.06180).
"""

from __future__ import annotations

import math

from meshwright.hardware import dtype_bytes
from meshwright.step import ModelConfig, Serving, ServingLayout, cache_axes


def cache_width(model: ModelConfig) -> int:
    """The elements that a token keeps in each layer: keys and values of every kv head, or one latent and its key."""
    if model.latent:
        return model.latent.kv_rank + model.latent.rope_head_dim
    return model.num_kv_heads * (model.query_key_dim + model.value_dim)


def kept_tokens(serving: Serving) -> int:
    """The tokens of a sequence at its end whose keys and values are still read, the mean over layers."""
    kept = serving.model.mean_over_layers(lambda window: min(serving.context, window or serving.context))
    return math.ceil(kept)


def paged_tokens(serving: Serving) -> int:
    """The tokens that the pages of a sequence at its end have room for."""
    return math.ceil(kept_tokens(serving) / serving.page_size) * serving.page_size


def wasted_share(serving: Serving) -> float:
    """The share of a sequence's pages, at its end, in which there is nothing."""
    return 1 - kept_tokens(serving) / paged_tokens(serving)


def token_cache_bytes(serving: Serving) -> float:
    """The bytes that one token keeps, over all layers and devices, copies not counted."""
    return serving.model.num_layers * cache_width(serving.model) * dtype_bytes(serving.kv_dtype)


def sequence_cache_bytes(serving: Serving) -> float:
    """The bytes of the pages of one sequence at its end, copies not counted."""
    return token_cache_bytes(serving) * paged_tokens(serving)


def device_sequences(serving: Serving, layout: ServingLayout, batch: int) -> int:
    """The sequences of which the fullest device holds some cache."""
    own = math.ceil(batch / layout.num_groups)
    return math.ceil(own / _split(serving.model, layout)) if layout.cache == "batch" else own


def device_tokens(serving: Serving, layout: ServingLayout) -> int:
    """The tokens of a sequence that the fullest device looks at: all that are kept, or its part of the pages."""
    if layout.cache != "sequence":
        return kept_tokens(serving)
    return min(kept_tokens(serving), _device_pages(serving, layout) * serving.page_size)


def device_cache_bytes(serving: Serving, layout: ServingLayout, batch: int) -> float:
    """The bytes of the cache on the fullest device, in whole pages, all sequences at their end."""
    tokens = _device_pages(serving, layout) * serving.page_size
    return (
        device_sequences(serving, layout, batch) * tokens * token_cache_bytes(serving) / _heads_degree(serving, layout)
    )


def mean_cache_bytes(serving: Serving, layout: ServingLayout) -> float:
    """The bytes of the cache that a device reads for each sequence of its group, as the mean over the group."""
    split = 1 if layout.cache == "heads" else _split(serving.model, layout)
    return kept_tokens(serving) * token_cache_bytes(serving) / (_heads_degree(serving, layout) * split)


def read_cache_bytes(serving: Serving, layout: ServingLayout, batch: int) -> float:
    """The bytes of the cache that the fullest device reads for one token of every sequence."""
    tokens = device_tokens(serving, layout)
    return (
        device_sequences(serving, layout, batch) * tokens * token_cache_bytes(serving) / _heads_degree(serving, layout)
    )


def _device_pages(serving: Serving, layout: ServingLayout) -> int:
    """The pages of a sequence that the fullest device holds."""
    pages = paged_tokens(serving) // serving.page_size
    return math.ceil(pages / _split(serving.model, layout)) if layout.cache == "sequence" else pages


def _split(model: ModelConfig, layout: ServingLayout) -> int:
    """The devices over which sequences, or the tokens of each, are split."""
    return layout.mesh.degree(cache_axes(model))


def _heads_degree(serving: Serving, layout: ServingLayout) -> int:
    """The devices over which the kv heads of a sequence are split; a latent has none."""
    return 1 if serving.model.latent else layout.mesh.tp
