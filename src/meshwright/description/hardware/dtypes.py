"""Canonical names of dtypes, and their bytes per element."""

from __future__ import annotations

import re

from meshwright.errors import MeshwrightError

DTYPE_BYTES: dict[str, float] = {
    "f64": 8,
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "fp8": 1,
    "fp4": 0.5,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "int4": 0.5,
    "bool": 1,
}
"""Bytes per element by canonical name; two elements of a 4-bit dtype share a byte."""

_ALIASES = {
    "float64": "f64",
    "float32": "f32",
    "fp32": "f32",
    "tf32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "fp16": "f16",
    "f8": "fp8",
    "float8": "fp8",
    "f4": "fp4",
    "float4": "fp4",
    "pred": "bool",
}


def canonical_dtype(dtype: str) -> str:
    """Return the canonical name of a dtype: `bf16` for `bfloat16`, `fp8` for `float8_e4m3fn` and HLO's `f8e4m3fn`.

    Raises if NumPy, JAX and HLO have no dtype of this name, or `DTYPE_BYTES` lacks it.
    """
    name = dtype.strip().lower()
    if name in DTYPE_BYTES:
        return name
    if name in _ALIASES:
        return _ALIASES[name]
    # Only the size counts: the exponent and mantissa of small floats and the signedness of integers are dropped.
    if small := re.fullmatch(r"(?:float|fp|f)([84])_?e\d+m\d+\w*", name):
        return f"fp{small[1]}"
    for prefix in ("uint", "u", "s", "i"):
        integer = f"int{name.removeprefix(prefix)}"
        if name.startswith(prefix) and integer in DTYPE_BYTES:
            return integer
    raise MeshwrightError(f"dtype {dtype!r} is not known; the dtypes are {', '.join(DTYPE_BYTES)}")


def dtype_bytes(dtype: str) -> float:
    """Return the bytes per element of a dtype, by any name that `canonical_dtype` knows; 0.5 for 4-bit dtypes."""
    return DTYPE_BYTES[canonical_dtype(dtype)]
