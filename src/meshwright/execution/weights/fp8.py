"""Weights in fp8 with a scale for each block, as DeepSeek-V3 publishes them (arXiv:2412.19437, section 3.3.2).

A weight [out, in] comes with `NAME_scale_inv` [out / rows, in / columns], both rounded up; its value is the fp8 value
times the block's scale.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from meshwright.description.families.quantization import fp8_block
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.directory import DTYPES, Scale, Tensor

SUFFIX = "_scale_inv"


def with_fp8(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a directory with each `NAME_scale_inv` attached to the tensor NAME as its `scale`.

    Raises:
        MeshwrightError: a scale has no weight, or another shape or dtype than the blocks of its weight, or config.json
          gives no block size.
    """
    scales = {name.removesuffix(SUFFIX): tensor for name, tensor in tensors.items() if name.endswith(SUFFIX)}
    if not scales:
        return tensors
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    block = fp8_block(config.get("quantization_config") or {})
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(SUFFIX)}
    for name, scale in scales.items():
        if block is None:
            raise MeshwrightError(
                f"{scale.file} holds {scale.name}, and config.json has no quantization_config with a weight_block_size"
            )
        if name not in found:
            raise MeshwrightError(f"{scale.file} holds {scale.name}, and no {name} that it would scale")
        weight = found[name]
        wanted = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=False))
        if scale.shape != wanted or scale.dtype not in DTYPES:
            raise MeshwrightError(
                f"{scale.name} in {scale.file} is {scale.dtype} {list(scale.shape)}; blocks of {block[0]} x {block[1]}"
                f" of {name} {list(weight.shape)} have {list(wanted)}, in {', '.join(DTYPES)}"
            )
        found[name] = replace(weight, scale=Scale(scale, block))
    return found
