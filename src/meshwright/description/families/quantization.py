"""Quantised weights in a config.json: block-wise fp8 and gpt-oss's MXFP4 are dequantised on loading; others raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.description.families.fields import Fields


def check_quantization(fields: Fields) -> None:
    """Raise if weights are quantised in a form that is not supported."""
    found = fields.mapping("quantization_config")
    if not found:
        return
    method = found.get("quant_method")
    if method == "mxfp4" and fields.family == "gpt_oss":
        return
    if method != "fp8":
        raise fields.refusal(
            "quantization_config",
            f"weights of quant_method {method!r} are not read; those of 'fp8' in blocks are, and of 'mxfp4' in gpt_oss",
        )
    if found.get("fmt", "e4m3") != "e4m3" or fp8_block(found) is None:
        raise fields.refusal(
            "quantization_config", "fp8 is read as fmt 'e4m3' with a weight_block_size of two whole numbers from 1"
        )


def fp8_block(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the size [outputs, inputs] of the blocks that have one scale each; None if the file does not state it."""
    match quantization.get("weight_block_size"):
        case [int(rows), int(columns)] if rows >= 1 and columns >= 1:
            return rows, columns
    return None
