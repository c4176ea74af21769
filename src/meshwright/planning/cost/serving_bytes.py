"""Memory of a server on one device: weights, KV cache and activations of a step; and the largest batch that fits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.fabric import MeshPlacement
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import is_adapter, leaves, parameters
from meshwright.description.step.passes.serve_ends import EMBEDDING, LOGITS
from meshwright.description.step.rules import local_parameter_shape
from meshwright.description.step.serve import ServeStep, page_parts, serve_step, table_entries
from meshwright.description.step.serving import SERVING_RULES, Serving, ServingLayout
from meshwright.description.step.weight_formats import WeightFormat, has_format, matrix_shape
from meshwright.mesh import MeshShape
from meshwright.planning.cost.kv_cache import paged_cache_bytes
from meshwright.planning.cost.rates.collective_time import runs_as_all_reduce


def serving_memory(
    serving: Serving, layout: ServingLayout, batch: int, laid: MeshPlacement | None = None
) -> dict[str, int]:
    """Return the bytes on the fullest device if all sequences have full length, by term, and their sum, `peak`.

    batch: sequences over all devices. laid: the layout's mesh on its system, for gathers that run as all-reduces. The
    terms are `weights`, `cache`, `activations`, for LoRA `adapters`, and for weights that a step gathers `gathered`.
    """
    step = serve_step(serving, layout, batch)
    # The largest activations of a block or the lookup, and the logits of the last tokens.
    widths = {"compute": dtype_bytes(serving.activation_dtype), "float32": 4}
    sizes = {
        name: sum(widths[array.width] * step.extents.local(array) for array in arrays)
        for name, arrays in step.live.items()
    }
    logits = sizes.pop(LOGITS.name)
    activations = max(sizes.values()) + logits
    terms = {
        "weights": weight_bytes(serving, layout),
        **({"adapters": adapter_bytes(serving, layout)} if serving.model.lora else {}),
        **({"gathered": _gathered_bytes(step, serving, activations, laid)} if layout.gathers_weights(serving) else {}),
        "cache": paged_cache_bytes(step, serving),
        "activations": activations,
    }
    sizes = {name: round(size) for name, size in terms.items()}
    return sizes | {"peak": sum(sizes.values())}


def serving_argument_bytes(serving: Serving, layout: ServingLayout, batch: int) -> int:
    """Return the bytes of a step's arguments on one device: weights, integers and, for a server, the KV cache.

    In a step over whole prompts, the integers are the tokens and the length of each prompt. For a server they are each
    sequence's newest token, and a replicated array with one row per sequence: its tokens of the step, the first page
    and the page table for each attention window, and eight more columns (`serving.engine.programs.Columns`).
    """
    memory = serving_memory(serving, layout, batch)
    if not serving.is_paged:
        groups = layout.num_groups * (layout.mesh.fsdp if layout.gathers_weights(serving) else 1)
        return memory["weights"] + 4 * (batch // groups) * serving.step_length + 4 * batch
    tables = sum(1 + entries for entries in table_entries(serving, page_parts(serving.model, layout)))
    stored = memory["weights"] + memory.get("adapters", 0) + memory["cache"]
    return stored + 4 * batch * (1 + 8 + serving.step_length + tables)


def weight_bytes(serving: Serving, layout: ServingLayout) -> float:
    """Return the bytes of the weights on one device, without adapters; norms and biases have the activations' dtype.

    So have all weights that a server does not store in a `WeightFormat`, if `weight_dtype` is one.
    """
    elements, activation_bytes = _elements(serving.model, layout.mesh), dtype_bytes(serving.activation_dtype)
    form, vectors = serving.weight_format, elements["vector"] * activation_bytes
    if form is None:
        return vectors + (elements["layer matrix"] + elements["matrix"]) * dtype_bytes(serving.weight_dtype)
    return vectors + elements["matrix"] * activation_bytes + _stored_bytes(serving.model, layout.mesh, form)


def adapter_bytes(serving: Serving, layout: ServingLayout) -> float:
    """Return the bytes of all adapter slots on one device, in the activations' dtype."""
    return _elements(serving.model, layout.mesh)["adapter"] * dtype_bytes(serving.activation_dtype)


def most_sequences(
    serving: Serving, layout: ServingLayout, usable_bytes: float, at_most: int, laid: MeshPlacement | None = None
) -> int:
    """Return how many sequences per group of devices fit in memory, up to `at_most`; 0 if none fits."""

    def fits(sequences: int) -> bool:
        return serving_memory(serving, layout, sequences * layout.num_groups, laid)["peak"] <= usable_bytes

    return last_true(fits, at_most)


def last_true(holds: Callable[[int], bool], at_most: int) -> int:
    """Return the largest number from 1 to `at_most` for which the monotone `holds` is true; 0 if there is none."""
    low, high = 0, 1
    while high <= at_most and holds(high):
        low, high = high, 2 * high
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@lru_cache(maxsize=1 << 12)
def _elements(model: ModelConfig, mesh: MeshShape) -> Counter[str]:
    """Return the parameter elements on one device by kind.

    The kinds are `layer matrix` (weights that can have a `WeightFormat`), `matrix` (other weights), `vector` (norms and
    biases) and `adapter`.
    """
    sizes = Counter[str]()
    for path, parameter in leaves(parameters(padded(model, mesh, SERVING_RULES))):
        shape = local_parameter_shape(parameter, mesh=mesh, rules=SERVING_RULES, what=path)
        kind = "layer matrix" if has_format(parameter) else "matrix"
        kind = "adapter" if is_adapter(path) else "vector" if parameter.role == "vector" else kind
        sizes[kind] += math.prod(shape)
    return sizes


@lru_cache(maxsize=1 << 12)
def _stored_bytes(model: ModelConfig, mesh: MeshShape, form: WeightFormat) -> float:
    """Return the bytes of values and scales on one device of all weights in a format."""
    return sum(
        matrix_shape(parameter, form, mesh=mesh, rules=SERVING_RULES, what=path).nbytes(form)
        for path, parameter in leaves(parameters(padded(model, mesh, SERVING_RULES)))
        if has_format(parameter)
    )


def _gathered_bytes(step: ServeStep, serving: Serving, activations: float, laid: MeshPlacement | None) -> float:
    """Return the bytes of gathered weights on one device, in the activations' dtype: one in use, and the next.

    If the embedding table, which is gathered before there are activations, needs more than both: what it needs more
    than activations. A gather that runs as an all-reduce has its shard in an array of zeros, beside the sum.
    """
    sizes = {True: 0.0, False: 0.0}
    for move in step.communication:
        if move.of_weight:
            is_table = move.region == EMBEDDING
            copies = 2 if is_table and laid is not None and runs_as_all_reduce(move, laid) else 1
            sizes[is_table] = max(sizes[is_table], copies * step.extents.local(move.array))
    width = dtype_bytes(serving.activation_dtype)
    return max(2 * width * sizes[False], width * sizes[True] - activations)
