"""The passes over memory between a layer's products, counted op by op: what each reads and writes.

Two ways to run them. Fused: each chain of elementwise ops is one kernel, as XLA, torch.compile and the fused kernels of
Megatron-LM (arXiv:2104.04473, section 4.2) have it. One by one: every op of PyTorch reads its operands and writes its
result, the norm in float32. Bytes are given for 2-byte activations and for float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """Elements moved by an op per element of its arrays, forward and backward, and its number of kernels."""

    forward_bytes: float
    backward_bytes: float
    forward_kernels: int = 1
    backward_kernels: int = 1


FUSED = {
    # x -> y; backward reads dy, x and the gradient of the residual stream, and writes that.
    "norm": Pass(4, 8),
    "residual": Pass(6, 0, 1, 0),
    # What a product made and what its low-rank branch makes, read and their sum written.
    "low_rank": Pass(6, 0, 1, 0),
    # Each product beside the first that reads the same input has a gradient of it, read by the norm's backward.
    "branch": Pass(0, 2, 0, 0),
    "rotary": Pass(4, 4),
    # gate, up -> y; backward reads dy, gate and up, writes two gradients. Not gated: x -> y; dy, x -> dx.
    "gated": Pass(6, 10),
    "activation": Pass(4, 6),
    "softmax": Pass(4, 6),
    # Batch norm and the relu that follows: read for the statistics, read again, written. Backward its input and the
    # gradient are read for the sums of the statistics' gradients, both again, and the gradient is written.
    "batch_norm": Pass(6, 10, 0, 0),
    # The shortcut is read too; backward the sum's result, in both passes, as no gradient goes where it was cut off.
    "batch_norm_add": Pass(8, 14, 0, 0),
    # A shortcut's results are normed as that sum reads them.
    "batch_norm_shortcut": Pass(2, 10, 0, 0),
}
"""One kernel for each chain of elementwise ops. Launches of the passes over images are not counted."""

ONE_BY_ONE = {
    # RMSNorm of PyTorch: to float32 6, square 8, mean 4, times its root 8, to narrow 6, times the scale 4; backward the
    # scale and its gradient 12, to float32 6, the root's two branches 24, the square's two 16, their sums 24, narrow 6.
    "rms": Pass(36, 88, 6, 12),
    # LayerNorm is one kernel of PyTorch's; backward one for the input and one for scale and bias.
    "layer": Pass(4, 10, 1, 2),
    "residual": Pass(6, 6),
    "low_rank": Pass(6, 0, 1, 0),
    "branch": Pass(0, 6, 0, 1),
    # To float32 6, the complex product 8, to narrow 6; backward the same.
    "rotary": Pass(20, 20, 3, 3),
    # silu 4, times up 6; backward the product's two gradients 12, silu's 6.
    "gated": Pass(10, 18, 2, 3),
    "activation": Pass(4, 6),
    # Scale 4, mask 5, to float32 6, softmax 8, to narrow 6; backward narrow 6, softmax 12, float32 6, mask 5, scale 4.
    "softmax": Pass(29, 33, 5, 5),
    # A relu reads and writes; backward it reads two and writes one, as a sum does forward.
    "batch_norm": Pass(10, 16, 0, 0),
    "batch_norm_add": Pass(16, 16, 0, 0),
    "batch_norm_shortcut": Pass(6, 10, 0, 0),
}
"""One kernel for each op, as PyTorch runs a model that is not compiled."""

OF_IMAGES = {
    # A block's input has two gradients, its own and the shortcut's: both read, their sum written.
    "gradients": Pass(0, 6, 0, 0),
    # One side is read and the other written.
    "pool": Pass(2, 2, 0, 0),
}
"""Passes that are the same both ways."""

DROPOUT = {
    # The mask, a byte: written forward with what is there, backward read, and a gradient of its own written.
    "residual": Pass(1, 5, 0, 1),
    "softmax": Pass(5, 5),
    # Read, written and the mask; backward the gradient read and written, and the mask.
    "low_rank": Pass(5, 5),
}
"""Dropout: fused into the kernel of the residual stream; a kernel of its own on attention weights and adapter inputs.
"""

LOGITS_BYTES = (12, 12)
"""Per float32 logit, forward and backward: written by the product in either width, read for maximum and sum, read again
for the gradient, which is written, and read by the backward products.
"""

LOGITS_BYTES_ONE_BY_ONE = (22, 26)
"""The same op by op: to float32 6, softmax reads it three times and writes it 16; backward the gradient of the loss is
filled in 4, softmax reads it twice and the result once and writes 16, to narrow 6."""

UPDATE_PASSES = 8
"""AdamW per float32 state in one pass: gradient for its norm; gradient, parameter and two moments read, the last three
written.
"""

SGD_PASSES = 5
"""SGD with momentum: gradient, parameter and momentum read, the last two written."""

UPDATE_PASSES_ONE_BY_ONE = 23
"""The same by PyTorch's foreach ops: norm 1 and clipping 2, decay 2, first moment 3, second 2 + 3, root 2, divided 2,
epsilon added 2, parameter 4."""


def pass_of(kind: str, *, fuses: bool) -> Pass:
    """Return what an elementwise op moves per element of its arrays (`step.ir.Elementwise`)."""
    if kind == "dropout":
        return DROPOUT["residual"]
    if kind == "low_rank_dropout":
        return DROPOUT["low_rank"]
    if kind in ("norm", "layer_norm"):
        return FUSED["norm"] if fuses else ONE_BY_ONE["layer" if kind == "layer_norm" else "rms"]
    return OF_IMAGES.get(kind) or (FUSED if fuses else ONE_BY_ONE)[kind]


def softmax_passes(*, fuses: bool, dropout: bool) -> Iterator[Pass]:
    """The passes over attention's scores between their two products."""
    yield (FUSED if fuses else ONE_BY_ONE)["softmax"]
    if dropout:
        yield DROPOUT["softmax"]
