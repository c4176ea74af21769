"""The bytes a train step holds on one device at its fullest moment, term by term."""

from __future__ import annotations

import math

from meshwright.hardware import dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.workload import (
    Workload,
    leaves,
    local_parameter_shape,
    num_query_chunks,
    parameters,
    token_axes,
)

MOMENTS = 2
"""AdamW keeps two arrays of a parameter's size and dtype."""


def step_memory(workload: Workload, mesh: MeshShape) -> dict[str, int]:
    """Bytes per device by name, as they are live at the fullest moment, and their sum, `peak`.

    That moment is the loss, where the logits are, or the backward pass of a layer, where what it did not keep is made
    again: the terms of the other one are left out.
    """
    elements = parameter_elements(workload, mesh)
    states = elements * dtype_bytes(workload.param_dtype)
    always = {
        "parameters": states,
        "optimizer": MOMENTS * states,
        "batch": 2 * 4 * _tokens(workload, mesh),
        "activations": workload.model.num_layers * saved_layer_bytes(workload, mesh),
    }
    loss = {"logits": _logits_bytes(workload, mesh), "gathered": _gathered_bytes(workload, mesh, "unembedding")}
    layer = {
        "gradients": states,
        "working": _working_bytes(workload, mesh),
        "gathered": _gathered_bytes(workload, mesh, "layers."),
    }
    terms = {name: int(size) for name, size in (always | max(loss, layer, key=lambda d: sum(d.values()))).items()}
    return terms | {"peak": sum(terms.values())}


def argument_bytes(workload: Workload, mesh: MeshShape) -> int:
    """The bytes of a step's arguments on one device: parameters, moments and their two counters, and the batch."""
    memory = step_memory(workload, mesh)
    return memory["parameters"] + memory["optimizer"] + memory["batch"] + 2 * 4


def parameter_elements(workload: Workload, mesh: MeshShape) -> int:
    """The elements of all parameters that one device stores."""
    return sum(
        math.prod(local_parameter_shape(parameter, mesh=mesh, what=path))
        for path, parameter in leaves(parameters(workload.model))
    )


def saved_layer_bytes(workload: Workload, mesh: MeshShape) -> int:
    """The bytes that one layer keeps for backward under the workload's remat policy."""
    if workload.remat == "none":
        return residual_layer_bytes(workload, mesh)
    size, stream = dtype_bytes(workload.compute_dtype), _stream(workload, mesh)
    if workload.remat == "block":
        return int(size * stream)
    return int(size * (2 * stream + _heads(workload, mesh) + _mlp(workload, mesh)))


def _working_bytes(workload: Workload, mesh: MeshShape) -> float:
    """What a layer's backward pass has live beside what was kept: all it reads, the softmax, and its gradient."""
    softmax = (4 + dtype_bytes(workload.compute_dtype)) * _scores(workload, mesh)
    return residual_layer_bytes(workload, mesh) - saved_layer_bytes(workload, mesh) + softmax


def residual_layer_bytes(workload: Workload, mesh: MeshShape) -> int:
    """The bytes of all that one layer's backward reads, the gathered weights apart.

    The stream before each of its two blocks, and their gathered inputs; queries, keys and values before and after
    rotation; float32 scores of one chunk of queries; the mlp's two products and their own.
    """
    size, stream, inputs = dtype_bytes(workload.compute_dtype), _stream(workload, mesh), _inputs(workload, mesh)
    narrow = 2 * stream + 2 * inputs + 2 * _heads(workload, mesh) + 3 * _mlp(workload, mesh) / 2
    return int(size * narrow + 4 * _scores(workload, mesh))


def _tokens(workload: Workload, mesh: MeshShape) -> int:
    """The tokens of one device."""
    return workload.tokens // mesh.degree(token_axes())


def _inputs(workload: Workload, mesh: MeshShape) -> float:
    """The elements of a block's gathered input."""
    return _tokens(workload, mesh) * workload.model.embed


def _stream(workload: Workload, mesh: MeshShape) -> float:
    """The elements of the residual stream between blocks."""
    return _inputs(workload, mesh) / mesh.tp


def _heads(workload: Workload, mesh: MeshShape) -> float:
    """The elements of queries, keys and values."""
    model = workload.model
    return _tokens(workload, mesh) * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim / mesh.tp


def _mlp(workload: Workload, mesh: MeshShape) -> float:
    """The elements of the mlp's two products."""
    return _tokens(workload, mesh) * 2 * workload.model.mlp / mesh.tp


def _scores(workload: Workload, mesh: MeshShape) -> float:
    """The elements of the attention scores of one chunk of queries."""
    queries = _tokens(workload, mesh) / num_query_chunks(workload.seq_len)
    return queries * workload.model.num_heads / mesh.tp * workload.seq_len


def _logits_bytes(workload: Workload, mesh: MeshShape) -> float:
    """The float32 logits, and their gradient as the product that follows takes it."""
    each = 4 + dtype_bytes(workload.compute_dtype)
    return each * _tokens(workload, mesh) * workload.model.vocab / mesh.tp


def _gathered_bytes(workload: Workload, mesh: MeshShape, prefix: str) -> float:
    """The gathered weights of one layer, or of the table of the logits."""
    sizes = [
        math.prod(local_parameter_shape(parameter, mesh=mesh, what=path)) * mesh.degree(("fsdp", "sp"))
        for path, parameter in leaves(parameters(workload.model))
        if path.startswith(prefix) and "norm" not in parameter.axes
    ]
    layers = workload.model.num_layers if prefix == "layers." else 1
    return dtype_bytes(workload.compute_dtype) * sum(sizes) / layers


def step_traffic(workload: Workload, mesh: MeshShape) -> dict[str, float]:
    """The bytes that each phase of a step moves between HBM and one device's cores, at least.

    Forward reads the gathered weights and writes what a layer's backward reads; recomputing does the same once more;
    backward reads both, and writes gradients of both. The update reads gradient, parameter and two moments, and writes
    the last three.
    """
    layers = workload.model.num_layers
    weights = sum(_gathered_bytes(workload, mesh, p) for p in ("embedding", "unembedding"))
    weights += layers * _gathered_bytes(workload, mesh, "layers.")
    activations = layers * residual_layer_bytes(workload, mesh) + _logits_bytes(workload, mesh)
    states = parameter_elements(workload, mesh) * dtype_bytes(workload.param_dtype)
    again = {"none": 0.0, "matmuls": 0.5, "block": 1.0}[workload.remat]
    forward = weights + activations
    return {"forward": forward, "recompute": again * forward, "backward": 2 * forward, "update": 7 * states}
