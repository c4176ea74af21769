import pytest

from meshwright.description.hardware.dtypes import canonical_dtype, dtype_bytes
from meshwright.errors import MeshwrightError

SPELLINGS = [
    ("bfloat16", "bf16", 2),
    ("bf16", "bf16", 2),
    ("float32", "f32", 4),
    ("FP32", "f32", 4),
    ("f64", "f64", 8),
    ("fp16", "f16", 2),
    ("float8_e4m3fn", "fp8", 1),
    ("f8e5m2", "fp8", 1),
    ("f8e4m3b11fnuz", "fp8", 1),
    ("float4_e2m1fn", "fp4", 0.5),
    ("f4e2m1fn", "fp4", 0.5),
    ("s8", "int8", 1),
    ("uint8", "int8", 1),
    ("u32", "int32", 4),
    ("int4", "int4", 0.5),
    ("pred", "bool", 1),
]


@pytest.mark.parametrize(("spelling", "name", "size"), SPELLINGS)
def test_a_dtype_is_known_in_the_spellings_of_numpy_jax_and_hlo(spelling, name, size):
    assert canonical_dtype(spelling) == name
    assert dtype_bytes(spelling) == size


@pytest.mark.parametrize("name", ["", "bf17", "int3", "float", "u", "e4m3"])
def test_an_unknown_dtype_is_refused_with_the_known_ones(name):
    with pytest.raises(MeshwrightError, match=r"is not known; the dtypes are f64, f32, bf16"):
        dtype_bytes(name)
