"""An input of its own for each layer, from a second embedding table (the per-layer embeddings of Gemma 3n and Gemma 4).

For each token the table has a row with columns for all layers. It is added to a projection of the embedded token, which
is normed for each layer. A layer gates its own part, projects it to the width of the stream and adds it. All this is
computed in the layout of the residual stream between blocks: weights are gathered only over the axes that split their
storage, and the table is not gathered at all, because tokens are sent to the devices with its columns, and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.description.step.layer import (
    STREAM,
    Activation,
    Add,
    Block,
    ClampedSwiglu,
    EndOp,
    Gated,
    Linear,
    Lookup,
    Norm,
)
from meshwright.errors import MeshwrightError

LAYER_INPUT = "layer_input"
"""The name of a layer's own input [batch, sequence, width], and the logical axis of its width and of all widths."""

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
    projection = Linear(
        name="layer_projection",
        source=STREAM,
        target="layer_projected",
        inputs=(("embed", norm.size),),
        outputs=((LAYER_INPUT, columns),),
        is_rounded=False,
        is_on_residual=True,
    )
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


def input_block(inputs: LayerInputs, function: Activation | ClampedSwiglu, norm: Norm, add: Add) -> Block:
    """Return the block of a layer that gates its own input, and adds its projection to the residual stream.

    function: the activation of the gate. norm: a norm of the residual stream. add: the op that adds to it.
    """
    of_input, of_stream = (LAYER_INPUT, inputs.width), ("embed", norm.size)
    gate = Linear(
        name="layer_gate",
        source=STREAM,
        target="layer_gate",
        inputs=(of_stream,),
        outputs=(of_input,),
        is_rounded=False,
        is_on_residual=True,
    )
    gated = Gated(
        sources=(gate.target, LAYER_INPUT),
        target="layer_gated",
        function=function,
        width=inputs.width,
        is_on_residual=True,
    )
    output = replace(gate, name="layer_output", source=gated.target, target="layer_output")
    output = replace(output, inputs=gate.outputs, outputs=gate.inputs)
    normed = replace(norm, name="layer_output_norm", source=output.target, target="layer_added")
    return Block(name="layer_input", ops=(gate, gated, output, normed, replace(add, sources=(normed.target,))))
