"""Data types by the short name this project uses, and the bytes an element takes."""

from __future__ import annotations

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
"""The bytes of one element, by canonical name; two elements of a 4-bit type share a byte."""

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
    """The short name of a dtype: `bfloat16` is `bf16`, `float8_e4m3fn` and HLO's `f8e4m3fn` are `fp8`, `s8` is `int8`.

    Raises where the name is not a dtype of `DTYPE_BYTES` in NumPy's, JAX's or HLO's spelling.
    """
    name = dtype.strip().lower()
    if name in DTYPE_BYTES:
        return name
    if name in _ALIASES:
        return _ALIASES[name]
    # The exponent and mantissa of small floats and the sign of integers do not change the size.
    stem = name.partition("_")[0].partition("e")[0] if name[:2] in ("f8", "f4") or "_e" in name else name
    if stem in _ALIASES:
        return _ALIASES[stem]
    for prefix in ("uint", "u", "s", "i"):
        integer = f"int{name.removeprefix(prefix)}"
        if name.startswith(prefix) and integer in DTYPE_BYTES:
            return integer
    raise MeshwrightError(f"dtype {dtype!r} is not known; the dtypes are {', '.join(DTYPE_BYTES)}")


def dtype_bytes(dtype: str) -> float:
    """The bytes of one element of a dtype, in any spelling `canonical_dtype` takes; 0.5 for 4-bit types."""
    return DTYPE_BYTES[canonical_dtype(dtype)]
