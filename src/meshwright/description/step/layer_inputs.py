"""An input of its own for each layer, from a second embedding table (the per-layer embeddings of Gemma 3n and Gemma 4).

For each token the table has a row with columns for all layers. It is added to a projection of the embedded token, which
is normed for each layer. A layer gates its own part, projects it to the width of the stream and adds it. All this is
computed in the layout of the residual stream between blocks: weights are gathered only over the axes that split their
storage, and the table is not gathered at all, because tokens are sent to the devices with its columns, and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.description.step.layer import (
    STREAM,
    Activation,
    Add,
    Block,
    ClampedSwiglu,
    EndOp,
    Gated,
    LayerOp,
    Linear,
    Lookup,
    Mix,
    Norm,
)
from meshwright.errors import MeshwrightError

LAYER_INPUT = "layer_input"
"""The name of a layer's own input [batch, sequence, width], and the logical axis of its width and of all widths."""

STREAMS = "streams"
"""The name of all streams [batch, sequence, streams, embed] of AltUp, of which the residual stream is the first."""

ALTUP_ACTIVE = "altup_active"
"""The name of the corrected first stream of AltUp, which gates a layer's own input."""

LAYER_COLUMNS = "layer_columns"
"""The logical axis of the table's columns, one for each layer and element of its input."""


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """The sizes of the inputs of layers."""

    vocab: int  # Rows of the table, one for each token.
    width: int  # Elements of one layer's input of a token.

    def __post_init__(self) -> None:
        for field in ("vocab", "width"):
            if (value := getattr(self, field)) < 1:
                raise MeshwrightError(f"layer_inputs have {field}={value}; it takes a whole number from 1")


@dataclass(frozen=True, kw_only=True)
class AltUp:
    """Several residual streams, of which each layer computes the first and predicts the others (arXiv:2301.13310).

    Before a layer every stream is predicted from all of them. What the layer changes in the first stream is added to
    each stream, times a factor. Both take their factors from a router of the first stream. The other parts are those
    that only models with such streams have (Gemma 3n).
    """

    num_streams: int
    laurel_rank: int  # Rank of the branch beside attention (LAuReL, arXiv:2411.07501).
    num_sparse_layers: int = 0  # First layers, in whose MLPs a cutoff sets most gates to zero.
    sparsity: float = 0.0  # The share of gates below it, if they were normally distributed.

    def __post_init__(self) -> None:
        for field, least in (("num_streams", 2), ("laurel_rank", 1), ("num_sparse_layers", 0)):
            if (value := getattr(self, field)) < least:
                raise MeshwrightError(f"altup has {field}={value}; it takes a whole number from {least}")
        if not 0 <= self.sparsity < 1 or bool(self.sparsity) != bool(self.num_sparse_layers):
            raise MeshwrightError(
                f"altup has sparsity={self.sparsity:g} and num_sparse_layers={self.num_sparse_layers}; the first is"
                f" below 1, and 0 without such layers"
            )


def check_altup(altup: AltUp, with_keys: int | None, *, name: str, has_inputs: bool, norms: str) -> None:
    """Raise if a model with AltUp has not what all models with it have.

    with_keys: the number of layers with keys and values of their own; None if all have them. norms: `Norms.place`.
    """
    if with_keys is None or not has_inputs or norms != "both":
        raise MeshwrightError(
            f"model {name} has altup; it is known of models whose layers have inputs of their own (layer_inputs)"
            f" and norms before and after blocks, and whose last layers have no keys and values (attention.sharing)"
        )
    if altup.num_sparse_layers > with_keys:
        raise MeshwrightError(
            f"model {name} has altup.num_sparse_layers={altup.num_sparse_layers}; they are among its {with_keys} layers"
            f" with keys and values of their own"
        )


def stream_matmuls(altup: AltUp, embed: int, name: str) -> tuple[Linear, ...]:
    """Return the matmuls of all streams but the first, before or after the layers: `{name}_1`, `{name}_2` and so on."""
    names = (f"{name}_{number}" for number in range(1, altup.num_streams))
    return tuple(_linear(own, STREAM, own, ("embed", embed), (LAYER_INPUT, embed)) for own in names)


def mix_ops(altup: AltUp, kind: Literal["predict", "correct"], norm: Norm) -> tuple[LayerOp, ...]:
    """Return the ops of AltUp before a layer or after its MLP. norm: a norm of the residual stream."""
    normed = replace(norm, name="altup_norm", source=STREAM, target="altup_normed", factor=1 / norm.size)
    count, embed = altup.num_streams, ("embed", norm.size)
    router = _linear("altup_router", normed.target, "altup_logits", embed, ("router", count))
    return normed, router, Mix(kind=kind, source=router.target, num_streams=count, size=norm.size)


def laurel_ops(altup: AltUp, source: str, norm: Norm) -> tuple[LayerOp, ...]:
    """Return the low-rank branch beside attention, which reads `source` too, and whose result is `laurel_added`.

    norm: a norm of the residual stream.
    """
    embed, rank = ("embed", norm.size), (LAYER_INPUT, altup.laurel_rank)
    left = _linear("laurel_left", source, "laurel", embed, rank)
    right = _linear("laurel_right", left.target, "laurel_output", rank, embed)
    return left, right, replace(norm, name="laurel_norm", source=right.target, target="laurel_added")


def input_ops(inputs: LayerInputs, num_layers: int, norm: Norm) -> tuple[EndOp, ...]:
    """Return the ops that compute the inputs of all layers from the tokens and their embeddings.

    The results of the lookup and of the norm are added.

    Args:
        num_layers: the number of all layers.
        norm: a norm of the residual stream.
    """
    columns, half = num_layers * inputs.width, math.sqrt(0.5)
    rows = Lookup(
        name="layer_embedding",
        rows=("vocab", inputs.vocab),
        columns=(LAYER_COLUMNS, columns),
        target=LAYER_INPUT,
        multiplier=half * math.sqrt(inputs.width),
    )
    embed, of_input = ("embed", norm.size), (LAYER_INPUT, columns)
    projection = _linear("layer_projection", STREAM, "layer_projected", embed, of_input)
    # The projection is divided by the root of its inputs before the norm, which changes nothing but its epsilon.
    of_layers = replace(
        norm,
        name="layer_input_norm",
        source=projection.target,
        target=LAYER_INPUT,
        size=inputs.width,
        epsilon=norm.epsilon * norm.size,
        factor=half,
    )
    return rows, projection, of_layers


def input_block(
    inputs: LayerInputs, function: Activation | ClampedSwiglu, norm: Norm, add: Add, altup: AltUp | None
) -> Block:
    """Return the block of a layer that gates its own input, and adds its projection to the residual stream.

    With AltUp, all streams are corrected first, and it is added to all but the first.

    function: the activation of the gate. norm: a norm of the residual stream. add: the op that adds to it.
    """
    of_input, of_stream = (LAYER_INPUT, inputs.width), ("embed", norm.size)
    gate = _linear("layer_gate", ALTUP_ACTIVE if altup else STREAM, "layer_gate", of_stream, of_input)
    gated = Gated(
        sources=(gate.target, LAYER_INPUT),
        target="layer_gated",
        function=function,
        width=inputs.width,
        is_on_residual=True,
    )
    output = _linear("layer_output", gated.target, "layer_output", of_input, of_stream)
    normed = replace(norm, name="layer_output_norm", source=output.target, target="layer_added")
    ops = gate, gated, output, normed
    if not altup:
        return Block(name="layer_input", ops=(*ops, replace(add, sources=(normed.target,))))
    added = Mix(kind="add", source=normed.target, num_streams=altup.num_streams, size=norm.size)
    return Block(name="layer_input", ops=(*mix_ops(altup, "correct", norm), *ops, added))


def _linear(name: str, source: str, target: str, inputs: tuple[str, int], outputs: tuple[str, int]) -> Linear:
    """Return a matmul in the layout of the residual stream. inputs, outputs: logical axis and size of its dims."""
    return Linear(
        name=name,
        source=source,
        target=target,
        inputs=(inputs,),
        outputs=(outputs,),
        is_rounded=False,
        is_on_residual=True,
    )
