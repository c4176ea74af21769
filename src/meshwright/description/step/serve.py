"""The step of a server on a mesh, as a `Step`: whole prompts (prefill), or one token of every sequence (decode).

Its symbols (sizes in `Extents`):

- `B`: sequences on all devices. `S`: tokens of a sequence in a step. `P`: devices over which the vocab is split.
- `A`: experts of a device that receive tokens. `R`: rows of such an expert. `C`: devices of ep that a token is sent to.
- `Q`: sequences of whose cache a device has all or a part. `T`: tokens of such a sequence that a step reads.
- `Z`, `Y`: tokens in chunks of the gated delta rule (`passes.shard_delta`).
- `keys`: keys that a query attends to; no array has this dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

from meshwright.description.step.blocks import program
from meshwright.description.step.ir import Array, Extents, Repeat, Step
from meshwright.description.step.layer import Attention, Dispatch, Program
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.passes.serve_ends import EMBEDDING, LOGITS
from meshwright.description.step.passes.shard_delta import chunk_sizes
from meshwright.description.step.sequence import visible_pairs
from meshwright.description.step.serve_ops import serving_ops
from meshwright.description.step.serving import SERVING_RULES, Serving, ServingLayout, cache_axes
from meshwright.mesh import MeshShape


@dataclass(frozen=True, kw_only=True)
class ServeStep(Step):
    """The step of a server.

    Attributes:
        live: by moment (in a layer, the lookup, the logits), the activations that a device holds at the same time.
        paged_tokens: tokens that fit in the pages of one sequence on a device, as a mean over layers.
    """

    live: Mapping[str, tuple[Array, ...]]
    paged_tokens: float


def serve_step(serving: Serving, layout: ServingLayout, batch: int) -> ServeStep:
    """Return the step of `batch` sequences of full length on all devices, for the device with most work."""
    mesh, one, dispatch = layout.mesh, *_without_batch_sizes(serving, layout)
    own = math.ceil(batch / layout.num_groups)
    gathered = mesh.fsdp if layout.gathers_weights(serving) else 1
    split = mesh.degree(cache_axes(serving.model)) if layout.cache == "batch" else 1
    sizes = {
        **one.extents.sizes,
        "B": math.ceil(own / gathered) * gathered * layout.num_groups,
        "Q": math.ceil(own / split),
    }
    if dispatch:
        # Each group is assumed to receive as many tokens as it sends. With uniform routing, a token's k experts are on
        # ep (1 - (1 - 1 / ep)^k) devices.
        tokens = own * serving.step_length
        count, active = dispatch.num_experts, dispatch.num_active
        activated = activated_experts(count, active, count / mesh.ep, tokens * mesh.ep)
        sizes |= {
            "A": activated,
            "R": tokens * active / activated,
            "C": mesh.ep * (1 - (1 - 1 / mesh.ep) ** active),
        }
    return ServeStep(
        ops=one.ops,
        live=one.live,
        repeats=one.repeats,
        extents=Extents(sizes=sizes, mesh=mesh),
        paged_tokens=one.paged_tokens,
    )


@lru_cache(maxsize=1 << 10)
def _without_batch_sizes(serving: Serving, layout: ServingLayout) -> tuple[ServeStep, Dispatch | None]:
    """Return a step without the sizes that depend on the batch, and the model's `Dispatch` op if it has experts."""
    mesh = layout.mesh
    model = padded(serving.model, mesh, SERVING_RULES)
    found = program(model)
    live = frozenset(axis for axis, degree in vars(mesh).items() if degree > 1)
    ops, arrays = serving_ops(model, serving.is_paged, layout.cache, live)
    parts = page_parts(serving.model, layout)
    paged = paged_tokens(serving, parts)
    kept = min(kept_tokens(serving), math.ceil(paged)) if parts > 1 else kept_tokens(serving)
    sizes = {
        "S": serving.step_length,
        **chunk_sizes(serving.step_length, has_state=True),
        "P": mesh.degree(SERVING_RULES["vocab"]),
        "T": kept,
        # Pages are read whole; keys outside a query's window are masked.
        "keys": paged_tokens(serving, parts, "queries") if serving.is_paged else keys_of_query(serving),
    }
    step = ServeStep(
        ops=ops,
        live=arrays,
        repeats=_repeats(found),
        extents=Extents(sizes=sizes, mesh=mesh),
        paged_tokens=paged,
    )
    return step, _dispatch(found)


def model_step(serving: Serving, batch: int) -> Step:
    """Return the step of `batch` sequences on one device with the least possible work.

    Nothing is padded or computed twice, each token passes only through the experts that it is routed to, and adapters
    are left out.
    """
    model, length = replace(serving.model, lora=None), serving.step_length
    found = program(model)
    sizes: dict[str, float] = {"B": batch, "S": length, "keys": keys_of_query(serving)}
    sizes |= chunk_sizes(length, has_state=True)
    if dispatch := _dispatch(found):
        sizes |= {"A": dispatch.num_experts, "R": batch * length * dispatch.num_active / dispatch.num_experts}
    ops, _ = serving_ops(model, False, "heads", frozenset[str]())
    return Step(ops=ops, repeats=_repeats(found), extents=Extents(sizes=sizes, mesh=MeshShape()))


Weight = Literal["cache", "queries"]
"""How layers with heads of different sizes weigh in a mean over layers.

`cache`: by the keys and values that they cache of a token. `queries`: by the products of queries with keys and values.
"""


def mean_over_layers(model: ModelConfig, of_window: Callable[[int | None], float], weight: Weight = "cache") -> float:
    """Return the mean over layers of `of_window(window)`; the window is None for a layer that attends to all keys."""
    windows = _weights(model, weight)
    return sum(count * of_window(window) for window, count in windows.items()) / sum(windows.values())


@cache
def _weights(model: ModelConfig, weight: Weight) -> Mapping[int | None, int]:
    """Return the number of layers by window, times the weight of each; without common factors."""
    sizes: dict[int | None, int] = {}
    for stack in program(model).stacks:
        for op in stack.ops:
            if isinstance(op, Attention):
                heads = op.num_kv_heads if weight == "cache" else op.num_heads
                sizes |= dict.fromkeys(op.windows, heads * (op.qk_dim + op.value_dim))
    factor = math.gcd(*sizes.values())
    counts = layers_by_window(model, have_keys=weight == "cache")
    return {window: count * sizes[window] // factor for window, count in counts.items()}


@cache
def layers_by_window(model: ModelConfig, *, have_keys: bool = True) -> Mapping[int | None, int]:
    """Return the number of layers by window; the key None is for layers that attend to all keys.

    have_keys: count only layers with keys and values of their own, which a cache holds.
    """
    counts: dict[int | None, int] = {}
    for stack in program(model).stacks:
        for op in stack.ops:
            if isinstance(op, Attention) and not (have_keys and op.is_sharing):
                for layer in range(stack.num_layers):
                    window = op.windows[layer % len(op.windows)]
                    counts[window] = counts.get(window, 0) + 1
    return counts


def cache_slots(window: int | None, length: int, unit: int) -> int:
    """Return how many of `length` tokens a layer with this window caches, rounded up to a multiple of `unit`."""
    return math.ceil(min(window or length, length) / unit) * unit


def pages_read(windows: Iterable[int | None], page_size: int, most: int, length: int) -> tuple[int, ...]:
    """Return, for each window, the largest number of pages whose keys `length` consecutive tokens attend to.

    Without a window these are all `most` pages of the sequence; with one, those that `window` + `length` - 1 tokens can
    touch, wherever the first is in its page, and at most `most`.
    """
    return tuple(most if window is None else min(most, (window + length - 2) // page_size + 2) for window in windows)


def kept_tokens(serving: Serving, weight: Weight = "cache") -> int:
    """Return how many tokens of a sequence of full length are still inside windows, as a mean over layers."""
    context = serving.context
    return math.ceil(mean_over_layers(serving.model, lambda window: min(context, window or context), weight))


def keys_of_query(serving: Serving) -> float:
    """Return the number of keys that a query attends to; for a prompt, the mean over its queries and layers.

    Without windows that mean is half the prompt's length, by causality. In a layer with a window only the keys inside
    it count.
    """
    length, is_chunked = serving.prompt_len, serving.model.attention.is_chunked
    if serving.phase == "decode":
        return kept_tokens(serving, "queries")
    pairs = mean_over_layers(serving.model, lambda own: visible_pairs(length, own, is_chunked=is_chunked), "queries")
    return pairs / length


def paged_tokens(serving: Serving, parts: int = 1, weight: Weight = "cache") -> float:
    """Return how many tokens fit into the pages of a sequence of full length on one device, as a mean over layers.

    parts: devices over which the pages are evenly split.
    """
    unit = serving.page_size * parts
    if not serving.is_paged:
        slots = mean_over_layers(serving.model, lambda window: cache_slots(window, serving.context, unit), weight)
        return slots / parts
    of_window = dict(zip(layers_by_window(serving.model), table_entries(serving, parts), strict=True))
    return mean_over_layers(serving.model, of_window.__getitem__, weight) * serving.page_size


def table_entries(serving: Serving, parts: int = 1) -> tuple[int, ...]:
    """Return, for each window, how many pages of a sequence of full length a step reads.

    parts: devices that share a page.
    """
    unit = serving.page_size * parts
    return pages_read(layers_by_window(serving.model), unit, math.ceil(serving.context / unit), serving.step_length)


def page_parts(model: ModelConfig, layout: ServingLayout) -> int:
    """Return over how many devices a sequence's tokens are split; each holds `page_size` tokens of every page."""
    return layout.mesh.degree(cache_axes(model)) if layout.cache == "sequence" else 1


def activated_experts(num_experts: int, num_active: int, num_local: float, tokens: float) -> float:
    """Return the expected number of a device's experts that receive any of `tokens` tokens, with uniform routing.

    Of all E experts, T tokens with k experts each use E (1 - (1 - k / E)^T): one token uses k, many tokens use all.

    Args:
        num_experts: experts of a layer.
        num_active: experts of a token.
        num_local: experts of the device.
        tokens: tokens that are routed to all experts.
    """
    return num_local * (1 - (1 - num_active / num_experts) ** tokens)


@cache
def _dispatch(found: Program) -> Dispatch | None:
    """Return the op that sends tokens to experts; None for a model without experts."""
    return next((op for stack in found.stacks for op in stack.ops if isinstance(op, Dispatch)), None)


@cache
def _repeats(found: Program) -> Mapping[str, Repeat]:
    """Return how often a server runs each region in a step."""
    counts = {EMBEDDING.name: 1, LOGITS.name: 1} | {stack.name: stack.num_layers for stack in found.stacks}
    return {name: Repeat(useful=n, executed=n, static=n, mean=n) for name, n in counts.items()}
