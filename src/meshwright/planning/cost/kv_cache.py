"""The size of a server's KV cache: per token, per sequence and per device.

Models with latent attention cache only the latent (DeepSeek-V2, arXiv:2405.04434), those with a sliding window only the
keys and values inside it (Mistral 7B, arXiv:2310.06825). Space is allocated in pages (vLLM, arXiv:2309.06180).
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.step.ir import AttentionOp, Extents, Step, Width
from meshwright.description.step.serve import ServeStep, kept_tokens, model_step, paged_tokens, serve_step
from meshwright.description.step.serving import Serving, ServingLayout, cache_axes


def wasted_share(serving: Serving) -> float:
    """Return the fraction of the space in a sequence's pages that is unused when the sequence ends."""
    return 1 - kept_tokens(serving) / paged_tokens(serving)


def token_cache_bytes(serving: Serving) -> float:
    """Return the cache bytes of one token: all layers, over all devices; copies and padding are not counted."""
    return _stored_bytes(model_step(serving, 1), replace(serving, cache_lanes=1), sequences=1, tokens=1)


def sequence_cache_bytes(serving: Serving) -> float:
    """Return the bytes of one sequence's pages when it ends, over all devices, copies not counted."""
    return token_cache_bytes(serving) * paged_tokens(serving)


def paged_cache_bytes(step: ServeStep, serving: Serving) -> float:
    """Return the cache bytes on the fullest device if all sequences have full length.

    Pages are counted whole. The states of linear attention are included.
    """
    pages = _stored_bytes(step, serving, sequences=step.extents.sizes["Q"], tokens=step.paged_tokens)
    return pages + state_bytes(step, serving)


def state_bytes(step: Step, serving: Serving) -> float:
    """Return the bytes of linear attention's states on a device: one state per row and layer, whatever the length."""
    widths: dict[Width, float] = {"compute": dtype_bytes(serving.activation_dtype), "float32": 4}
    return sum(
        step.repeats[op.region.name].mean * sum(widths[array.width] * step.extents.local(array) for array in op.arrays)
        for op in step.ops.elementwise
        if op.kind == "state"
    )


def mean_cache_bytes(serving: Serving, layout: ServingLayout) -> float:
    """Return the cache bytes that a device reads in a step for each sequence that its group of devices serves.

    It is the mean over the group's devices, among which a sequence's cache may be split.
    """
    step = serve_step(serving, layout, layout.num_groups)
    split = 1 if layout.cache == "heads" else layout.mesh.degree(cache_axes(serving.model))
    extents = _extents(step, sequences=1, tokens=kept_tokens(serving))
    return sum(_of_layers(op, step, extents, serving) for op in step.ops.attention) / split


def cache_bytes(op: AttentionOp, extents: Extents, serving: Serving) -> float:
    """Return the bytes of one layer's cache on a device, for the sequences and tokens in `extents`.

    In pages, the keys and values of a token are padded together.
    """
    tokens, lanes = extents.sizes["Q"] * extents.sizes["T"], serving.cache_lanes if serving.is_paged else 1
    width = sum(extents.local(array) for array in op.cache) / tokens
    return tokens * math.ceil(round(width) / lanes) * lanes * dtype_bytes(serving.kv_dtype)


def _stored_bytes(step: Step, serving: Serving, *, sequences: float, tokens: float) -> float:
    """Return the cache bytes on a device, for `sequences` sequences of `tokens` tokens each.

    Layers that attend to keys and values of earlier ones have no cache; they read that of those layers.
    """
    extents = _extents(step, sequences=sequences, tokens=tokens)
    return sum(_of_layers(op, step, extents, serving) for op in step.ops.attention if not op.is_sharing)


def _extents(step: Step, *, sequences: float, tokens: float) -> Extents:
    """Return the extents of a step with another number of sequences in the cache, and of tokens of each."""
    return replace(step.extents, sizes={"Q": sequences, "T": tokens})


def _of_layers(op: AttentionOp, step: Step, extents: Extents, serving: Serving) -> float:
    """Return the bytes of the caches that the layers of an attention op read."""
    return step.repeats[op.region.name].mean * cache_bytes(op, extents, serving)
