"""Weights of experts in MXFP4, as gpt-oss publishes them (arXiv:2508.10925, section 2.1).

A weight NAME [experts, in, out] is stored as two tensors: `NAME_blocks` [experts, out, in / 32, 16], with two 4-bit
values in each byte, the first in the lower bits; and `NAME_scales` [experts, out, in / 32], with one exponent for 32
values (OCP Microscaling Formats, version 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.execution.weights.directory import Tensor

BLOCKS, SCALES = "_blocks", "_scales"

BLOCK = 32
"""The number of values that share a scale."""

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
"""The value of each 4-bit code: a sign bit, two bits of exponent, one bit of mantissa."""

_BIAS = 127
"""Number that is subtracted from a stored exponent."""


@dataclass(frozen=True, kw_only=True)
class Mxfp4Tensor(Tensor):
    """A weight [experts, in, out] in MXFP4. `file` and `start` are those of its blocks; `scales` has its exponents."""

    scales: Tensor

    @property
    def is_readable(self) -> bool:
        """Always true, because `with_mxfp4` has checked that blocks and scales are 8-bit integers."""
        return True

    def values(self, experts: slice, inputs: slice, outputs: slice) -> np.ndarray:
        """Return a part of the weight in float32 [experts, in, out]; the slice `inputs` has no step."""
        count, width, length = self.shape
        packed = np.memmap(
            self.file, np.uint8, mode="r", offset=self.start, shape=(count, length, width // BLOCK, BLOCK // 2)
        )
        exponents = np.memmap(
            self.scales.file, np.uint8, mode="r", offset=self.scales.start, shape=(count, length, width // BLOCK)
        )
        start, stop, _ = inputs.indices(width)
        within = slice(start // BLOCK, -(-stop // BLOCK))
        packed, exponents = packed[experts, outputs, within], exponents[experts, outputs, within]
        found = np.empty((*packed.shape, 2), np.float32)
        found[..., 0], found[..., 1] = _VALUES[packed & 15], _VALUES[packed >> 4]
        found = found.reshape(*exponents.shape, BLOCK)
        with np.errstate(over="ignore"):
            np.ldexp(found, exponents[..., None].astype(np.int32) - _BIAS, out=found)
        first = within.start * BLOCK
        whole = found.reshape(*exponents.shape[:2], -1)[..., start - first : stop - first]
        return np.swapaxes(whole, 1, 2)


def with_mxfp4(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a directory with each pair of blocks and scales combined into one `Mxfp4Tensor`.

    Raises:
        MeshwrightError: blocks have no scales, scales have no blocks, or either has a wrong shape or dtype.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith((BLOCKS, SCALES))}
    for name, tensor in tensors.items():
        other = name.removesuffix(BLOCKS) + SCALES if name.endswith(BLOCKS) else name.removesuffix(SCALES) + BLOCKS
        if name.endswith((BLOCKS, SCALES)) and other not in tensors:
            raise MeshwrightError(f"{tensor.file} holds {name}, and no file of the directory {other}")
        if not name.endswith(BLOCKS):
            continue
        scales = tensors[other]
        is_whole = len(tensor.shape) == 4 and tensor.shape[3] == BLOCK // 2 and scales.shape == tensor.shape[:3]
        if not is_whole or {tensor.dtype, scales.dtype} != {"U8"}:
            raise MeshwrightError(
                f"{name} in {tensor.file} is {tensor.dtype} {list(tensor.shape)} and {other} {scales.dtype}"
                f" {list(scales.shape)}; weights in MXFP4 are U8 [experts, out, in / {BLOCK}, {BLOCK // 2}] and U8"
                f" [experts, out, in / {BLOCK}]"
            )
        experts, outputs, blocks, _ = tensor.shape
        weight = name.removesuffix(BLOCKS)
        found[weight] = Mxfp4Tensor(
            name=weight,
            file=tensor.file,
            dtype="BF16",
            shape=(experts, blocks * BLOCK, outputs),
            start=tensor.start,
            scales=scales,
        )
    return found
