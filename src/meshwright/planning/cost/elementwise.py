"""Memory traffic of the elementwise ops between a layer's matmuls: the bytes that each op reads and writes.

Ops run in one of two ways. Fused: each chain of elementwise ops is one kernel, as in XLA, torch.compile and the fused
kernels of Megatron-LM (arXiv:2104.04473, section 4.2). One by one: every op of PyTorch reads its operands and writes
its result, the norm in float32. Bytes are for activations of 2 bytes; for float32 they are scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """An op's memory traffic in bytes per element of its array, for elements of 2 bytes, and its number of kernels."""

    forward_bytes: float
    backward_bytes: float
    forward_kernels: int = 1
    backward_kernels: int = 1


FUSED = {
    # x -> y; backward reads dy, x and the gradient of the residual stream, and writes that.
    "norm": Pass(4, 8),
    "residual": Pass(6, 0, 1, 0),
    # The outputs of a matmul and of its low-rank branch are read, and their sum is written.
    "low_rank": Pass(6, 0, 1, 0),
    # Each further matmul with the same input adds a gradient of that input, which the norm's backward reads.
    "branch": Pass(0, 2, 0, 0),
    "rotary": Pass(4, 4),
    # gate, up -> y; backward reads dy, gate and up, writes two gradients. Not gated: x -> y; dy, x -> dx.
    "gated": Pass(6, 10),
    "activation": Pass(4, 6),
    "softmax": Pass(4, 6),
}
"""Passes by kind of op, with one kernel for each chain of elementwise ops."""

ONE_BY_ONE = {
    # PyTorch's RMSNorm, in bytes: cast to float32 6, square 8, mean 4, times its root 8, cast back 6, times scale 4.
    # Backward: the scale and its gradient 12, cast to float32 6, the root's two branches 24, the square's two 16, their
    # sums 24, cast back 6.
    "rms": Pass(36, 88, 6, 12),
    # LayerNorm is one kernel of PyTorch's; backward one for the input and one for scale and bias.
    "layer": Pass(4, 10, 1, 2),
    "residual": Pass(6, 6),
    "low_rank": Pass(6, 0, 1, 0),
    "branch": Pass(0, 6, 0, 1),
    # Cast to float32 6, the complex multiplication 8, cast back 6; backward the same.
    "rotary": Pass(20, 20, 3, 3),
    # silu 4, times up 6; backward the two gradients of the multiplication 12, silu's 6.
    "gated": Pass(10, 18, 2, 3),
    "activation": Pass(4, 6),
    # Scale 4, mask 5, cast to float32 6, softmax 8, cast back 6. Backward: cast 6, softmax 12, cast 6, mask 5, scale 4.
    "softmax": Pass(29, 33, 5, 5),
}
"""Passes by kind of op, with one kernel for each op, as PyTorch runs a model that is not compiled."""

OF_EXPERTS = {
    # Forward reads the rows of tokens and writes them in the order of their experts; backward reads their gradients.
    "dispatch": Pass(4, 2),
    # Experts' rows are read and weighted; backward reads them again for the weights, and writes the rows' gradients.
    "combine": Pass(2, 4),
}
"""Passes over the rows of experts, which are read or written in the order of routing, by kind of op."""

OF_DELTA = {
    # One kernel reads and writes each channel of queries, keys and values in float32; backward reads the input and the
    # result's gradient, and writes the input's gradient.
    "convolution": Pass(6, 10),
    # Between the matmuls of a chunk, per element of the values in float32: corrected values and keys, queries, keys
    # and outputs are written and read, and the scores of half as many elements three times. Backward does it twice.
    "delta": Pass(52, 104),
    # The further columns of a state that sp needs, per element: their corrections and outputs are written and read, and
    # the states of all parts are read and written.
    "delta_factors": Pass(16, 32),
    "delta_parts": Pass(8, 16),
    # A server's step reads and writes the float32 state of every row.
    "state": Pass(8, 0),
}
"""Passes of the gated delta rule by kind of op, fused."""

DROPOUT = {
    # The mask has one byte: an existing kernel writes it forward; a backward kernel reads it and writes a gradient.
    "residual": Pass(1, 5, 0, 1),
    "softmax": Pass(5, 5),
    # Forward reads and writes the array and writes the mask; backward reads and writes the gradient and reads the mask.
    "low_rank": Pass(5, 5),
}
"""Passes of dropout, by the array that it acts on.

On the residual stream, an existing kernel applies dropout; on attention weights and adapter inputs, a separate one.
"""

LOGITS_BYTES = (12, 12)
"""Bytes read and written per float32 logit by the fused loss: (forward, backward).

Forward: the matmul writes the logits as float32, and they are read for the maximum and for the sum. Backward: they are
read for their gradient, which is written and then read by the backward matmuls.
"""

LOGITS_BYTES_ONE_BY_ONE = (22, 26)
"""`LOGITS_BYTES` of a loss that runs op by op: bytes read and written per logit, (forward, backward).

Forward: cast to float32 6, softmax (three reads, one write) 16. Backward: fill in the gradient of the loss 4, softmax
(the gradient read twice, the result read once, one write) 16, cast to the compute dtype 6.
"""

UPDATE_PASSES = 8
"""Float32 values that fused AdamW reads and writes per parameter.

The gradient is read for its norm; then gradient, parameter and two moments are read, and the last three are written.
"""

UPDATE_PASSES_ONE_BY_ONE = 23
"""Float32 values that AdamW reads and writes per parameter with PyTorch's foreach ops.

Norm 1, clipping 2, weight decay 2, first moment 3, second moment 2 + 3, square root 2, division 2, adding epsilon 2,
parameter 4.
"""


def pass_of(kind: str, *, fuses: bool) -> Pass:
    """Return the memory traffic of an elementwise op. kind: as in `step.ir.Elementwise`.

    fuses: whether each chain of elementwise ops is one kernel; if False, each op is one.
    """
    if kind == "dropout":
        return DROPOUT["residual"]
    if kind == "low_rank_dropout":
        return DROPOUT["low_rank"]
    if kind in ("norm", "layer_norm"):
        return FUSED["norm"] if fuses else ONE_BY_ONE["layer" if kind == "layer_norm" else "rms"]
    of_some = OF_EXPERTS | OF_DELTA
    return of_some.get(kind) or (FUSED if fuses else ONE_BY_ONE)[kind]


def softmax_passes(*, fuses: bool, dropout: bool) -> Iterator[Pass]:
    """Yield the passes over attention scores between the two matmuls: softmax, any dropout. fuses: as in `pass_of`."""
    yield (FUSED if fuses else ONE_BY_ONE)["softmax"]
    if dropout:
        yield DROPOUT["softmax"]
