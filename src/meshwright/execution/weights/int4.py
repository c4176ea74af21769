"""Weights in 4 bits with a scale and a zero point for each group of inputs, as GPTQ and AWQ publish them.

A weight [out, in] is stored as three tensors: 4-bit values q (`qweight`), zero points (`qzeros` [groups, out / 8]) and
`scales` [groups, out]; the weight is scale * (q - zero point). Eight 4-bit values are packed in each 32-bit integer.
GPTQ (arXiv:2210.17323, files of AutoGPTQ and GPTQModel) packs `qweight` [in / 8, out] along the inputs, the first in
the lowest bits; it stores zero points minus 1, unless the checkpoint format is `gptq_v2`; and it may have the group of
each input, in any order, in a fourth tensor `g_idx` [in]. AWQ (arXiv:2306.00978, AutoAWQ's `gemm`) packs `qweight`
[in, out / 8] along the outputs, in the order of `AWQ_PLACES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.description.families.quantization import quantization
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.directory import Tensor

PACK = 8
"""Number of 4-bit values in a 32-bit integer."""

AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The place of each of eight successive outputs in its 32-bit integer; place 0 is the lowest four bits."""

PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, kw_only=True)
class Int4Tensor(Tensor):
    """A weight [out, in] in 4 bits.

    parts: its tensors by the last word of their names (`PARTS`). method: `gptq` or `awq`. zero_offset: number to add
    to stored zero points.
    """

    parts: Mapping[str, Tensor]
    method: str
    zero_offset: int

    @property
    def is_readable(self) -> bool:
        """Always true, because `with_int4` has checked the parts."""
        return True

    @property
    def width(self) -> int:
        """Number of inputs of a group."""
        return self.shape[1] // self.parts["scales"].shape[0]

    def groups(self, inputs: np.ndarray) -> np.ndarray:
        """Return the group of each input."""
        return _open(self.parts["g_idx"])[inputs] if "g_idx" in self.parts else inputs // self.width

    def codes(self, inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        """Return a part of the 4-bit values in 32 bits [inputs, outputs], given the indices of both."""
        packed = _open(self.parts["qweight"])
        if self.method == "awq":
            return (packed[np.ix_(inputs, outputs // PACK)] >> self._shifts(outputs)) & 15
        return (packed[np.ix_(inputs // PACK, outputs)] >> (4 * (inputs % PACK)).astype(np.int32)[:, None]) & 15

    def zeros(self, outputs: np.ndarray) -> np.ndarray:
        """Return the zero points of all groups [groups, outputs], 0 to 15."""
        stored = _open(self.parts["qzeros"])[:, outputs // PACK] >> self._shifts(outputs)
        return ((stored & 15) + self.zero_offset) & 15

    def scales(self, outputs: np.ndarray) -> np.ndarray:
        """Return the scales of all groups [groups, outputs], in their own dtype."""
        return _open(self.parts["scales"])[:, outputs]

    def _shifts(self, outputs: np.ndarray) -> np.ndarray:
        """Return how far the value of each output is from the lowest bits of its integer [1, outputs]."""
        places = AWQ_PLACES[outputs % PACK] if self.method == "awq" else outputs % PACK
        return (4 * places).astype(np.int32)[None]

    def values(self, inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        """Return a part of the weight in float32 [inputs, outputs], given the indices of the inputs and the outputs."""
        group = self.groups(inputs)
        # Codes stay in 32 bits, so that no intermediate array is larger than the result.
        found = (self.codes(inputs, outputs) - self.zeros(outputs)[group]).astype(np.float32)
        with np.errstate(invalid="ignore"):
            found *= self.scales(outputs).astype(np.float32)[group]
        return found


def with_int4(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a directory with the parts of each 4-bit weight combined into one `Int4Tensor`.

    Raises:
        MeshwrightError: parts are missing or do not fit each other, or config.json names no such quantization, or names
          one and there are no parts.
    """
    modules = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    config = quantization(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    method = config.get("quant_method")
    if (method in ("gptq", "awq")) != bool(modules):
        held = f"{min(modules)}.qweight" if modules else "no qweight"
        raise MeshwrightError(f"{directory} holds {held}, and its config.json has quant_method {method!r}")
    if method is None or not modules:
        return tensors
    offset = 1 if method == "gptq" and config.get("checkpoint_format", "gptq") == "gptq" else 0
    found = {
        name: tensor
        for name, tensor in tensors.items()
        if not (name.endswith(tuple(f".{part}" for part in PARTS)) and name.rpartition(".")[0] in modules)
    }
    for module in modules:
        parts = {part: tensors[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in tensors}
        shape = _shape(module, parts, method)
        first = parts["qweight"]
        found[f"{module}.weight"] = Int4Tensor(
            name=f"{module}.weight", file=first.file, dtype="F16", shape=shape, start=first.start, parts=parts,
            method=method, zero_offset=offset,
        )  # fmt: skip
    return found


def _shape(module: str, parts: Mapping[str, Tensor], method: str) -> tuple[int, int]:
    """Return the shape [out, in] of a weight. Raises if its parts do not fit each other."""
    first = parts["qweight"]
    if absent := [part for part in PARTS[:3] if part not in parts]:
        raise MeshwrightError(f"{first.file} holds {first.name}, and no file of the directory {module}.{absent[0]}")
    rows, columns = first.shape if len(first.shape) == 2 else (0, 0)
    inputs, outputs = (rows * PACK, columns) if method == "gptq" else (rows, columns * PACK)
    groups = parts["scales"].shape[0] if parts["scales"].shape else 0
    wanted = {
        "qweight": first.shape,
        "qzeros": (groups, outputs // PACK),
        "scales": (groups, outputs),
        "g_idx": (inputs,),
    }
    dtypes = {"qweight": ("I32",), "qzeros": ("I32",), "scales": ("F16", "BF16", "F32"), "g_idx": ("I32",)}
    for part, tensor in parts.items():
        is_whole = groups > 0 and inputs % groups == 0 and tensor.shape == wanted[part]
        if not is_whole or tensor.dtype not in dtypes[part]:
            raise MeshwrightError(
                f"{tensor.name} in {tensor.file} is {tensor.dtype} {list(tensor.shape)}; beside a qweight"
                f" {list(first.shape)} of {method} in 4 bits it is {dtypes[part][0]} {list(wanted[part])}"
            )
    if "g_idx" in parts and not 0 <= (index := _open(parts["g_idx"])).min() <= index.max() < groups:
        raise MeshwrightError(
            f"{module}.g_idx in {parts['g_idx'].file} has groups {index.min()} to {index.max()}; there are {groups}"
        )
    return outputs, inputs


_NUMPY: Mapping[str, Any] = {"I32": np.int32}


def _open(tensor: Tensor) -> np.ndarray:
    """Return a part as a read-only memory map."""
    if tensor.dtype not in _NUMPY:
        return tensor.open()
    return np.memmap(tensor.file, _NUMPY[tensor.dtype], mode="r", offset=tensor.start, shape=tensor.shape)
