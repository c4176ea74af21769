"""Check how the weights of a config.json are quantised.

GPTQ and AWQ in 4 bits, block-wise fp8 and gpt-oss's MXFP4 are dequantised on loading; others raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from meshwright.description.families.fields import Fields
from meshwright.description.step.weight_formats import WHOLE_COLUMN
from meshwright.errors import MeshwrightError


def check_quantization(fields: Fields) -> None:
    """Raise if weights are quantised in a form that is not supported."""
    found = fields.mapping("quantization_config")
    if not found:
        return
    method = found.get("quant_method")
    if method == "mxfp4" and fields.family == "gpt_oss":
        return
    if method in ("gptq", "awq"):
        if found.get("bits", found.get("w_bit")) != 4:
            raise fields.refusal("quantization_config", f"{method} is read in 4 bits, not {found.get('bits')!r}")
        if method == "awq" and str(found.get("version", "gemm")).lower() != "gemm":
            raise fields.refusal("quantization_config", f"awq is read as version 'gemm', not {found.get('version')!r}")
        layout = found.get("checkpoint_format", "gptq")
        if method == "gptq" and layout not in ("gptq", "gptq_v2"):
            raise fields.refusal("quantization_config", f"gptq is read as 'gptq' and 'gptq_v2', not {layout!r}")
        return
    if method != "fp8":
        raise fields.refusal(
            "quantization_config",
            f"weights of quant_method {method!r} are not read; those of 'gptq' and 'awq' in 4 bits are, of 'fp8' in"
            " blocks, and of 'mxfp4' in gpt_oss",
        )
    if found.get("fmt", "e4m3") != "e4m3" or fp8_block(found) is None:
        raise fields.refusal(
            "quantization_config", "fp8 is read as fmt 'e4m3' with a weight_block_size of two whole numbers from 1"
        )


def quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `quantization_config` of a config.json, or else of its `text_config`; empty if neither has one."""
    return config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}


class PublishedWeights(NamedTuple):
    """The weights of a quantised checkpoint that a server can keep: their format, and how they are grouped.

    group: inputs of a group, or `WHOLE_COLUMN`; None for the format's. has_scattered_groups: whether the inputs of a
    group do not follow each other.
    """

    dtype: Literal["int4", "fp8"]
    group: int | None
    has_zeros: bool = False
    has_scattered_groups: bool = False


def published_weights(config: Mapping[str, Any]) -> PublishedWeights | None:
    """Return how a config.json's weights are quantised; None if they are not, or in MXFP4."""
    found = quantization(config)
    if found.get("quant_method") in ("gptq", "awq"):
        size = found.get("group_size", found.get("q_group_size"))
        group = None if not isinstance(size, int) else size if size > 0 else WHOLE_COLUMN
        # With `static_groups`, weights are quantised in another order, but groups are those of successive inputs.
        is_in_order = not found.get("desc_act") or found.get("static_groups") or group == WHOLE_COLUMN
        return PublishedWeights("int4", group, has_zeros=True, has_scattered_groups=not is_in_order)
    block = fp8_block(found)
    return None if block is None else PublishedWeights("fp8", block[1])


def scattered_groups(what: str) -> MeshwrightError:
    """Return the error that a server cannot keep weights in int4, whose groups are not of successive inputs."""
    return MeshwrightError(
        f"{what} has groups of inputs that do not follow each other (g_idx, of desc_act); they are not multiplied in"
        f" int4: use int8, or leave weight_dtype out, which dequantises them"
    )


def fp8_block(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the (outputs, inputs) of a block of fp8 weights with one scale; None if the file does not state them."""
    match quantization.get("weight_block_size"):
        case [int(rows), int(columns)] if rows >= 1 and columns >= 1:
            return rows, columns
    return None
