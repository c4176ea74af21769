# ruff: noqa: E501 - HLO prints an instruction in a line
"""The time of a GPU's matmuls and attention kernels that read narrow weights or a narrow cache."""

import pytest

import meshwright as mw
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.kernel_cost import KernelCost, cost_of
from meshwright.description.hlo.parser import parse_hlo
from meshwright.planning.cost.rates.efficiency import launch_seconds
from meshwright.planning.cost.rates.narrow_values import cached_seconds, weight_conversion_seconds
from meshwright.proof.simulate.op_seconds import op_seconds

H100 = parse_system("h100:1")
FUSION = """HloModule narrow

%converting (w: s8[4096,14336]) -> bf16[4096,14336] {
  w = s8[4096,14336]{1,0} parameter(0)
  ROOT wide = bf16[4096,14336]{1,0} convert(w)
}

%product (x: bf16[64,4096], w: STORED[4096,14336]) -> f32[64,14336] {
  x = bf16[64,4096]{1,0} parameter(0)
  w = STORED[4096,14336]{1,0} parameter(1)
  wide = bf16[4096,14336]{1,0} convert(w)
  ROOT dot = f32[14336,64]{0,1} dot(wide, x), lhs_contracting_dims={0}, rhs_contracting_dims={1}
}

ENTRY %main (x: bf16[64,4096], w: s8[4096,14336]) -> f32[14336,64] {
  x = bf16[64,4096]{1,0} parameter(0)
  w = s8[4096,14336]{1,0} parameter(1)
  wide = bf16[4096,14336]{1,0} fusion(w), kind=kLoop, calls=%converting
  ROOT product = f32[14336,64]{0,1} fusion(x, READ), kind=kCustom, calls=%product
}
"""


def kernel(cost: KernelCost, *operands: str):
    """A Triton kernel that states its cost, in a program of its own."""
    lines = [f"  p{number} = {shape} parameter({number})" for number, shape in enumerate(operands)]
    names = ", ".join(f"p{number}" for number in range(len(operands)))
    call = f'  ROOT call = f32[64,14336] custom-call({names}), custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="jit(f)/{cost.scope}/pallas_call"}}'
    module = parse_hlo("\n".join(["HloModule kernel", "", "ENTRY %main () -> f32[64,14336] {", *lines, call, "}"]))
    assert cost_of(module.root("main")) == cost
    return op_seconds(module, module.root("main"), H100).seconds


def test_a_matmul_that_converts_its_weight_takes_as_long_as_plans_have_it():
    module = parse_hlo(FUSION.replace("STORED", "s8").replace("READ", "w"))
    converting = weight_conversion_seconds("int8", 4096 * 14336, 64)
    assert op_seconds(module, module.root("main"), H100).seconds == pytest.approx(launch_seconds(H100) + converting)


def test_a_weight_that_another_op_converts_is_not_converted_twice():
    module = parse_hlo(FUSION.replace("STORED", "bf16").replace("READ", "wide"))
    seconds = op_seconds(module, module.root("main"), H100).seconds
    whole = (2 * 4096 * 14336 + 2 * 64 * 4096 + 4 * 64 * 14336) / H100.hbm_bytes_per_second
    assert whole < seconds < 1.3 * (whole + launch_seconds(H100))


def test_a_kernel_converts_the_weights_that_it_states():
    """Two int4 values share a byte; each is converted once, and costs a little for each of the 64 rows."""
    cost = KernelCost(2 * 64 * 4096 * 14336, 30 << 20, weights=4096 * 14336)
    seconds = kernel(cost, "bf16[64,4096]", "u8[1,32,64,14336]", "bf16[1,32,14336]")
    assert seconds == launch_seconds(H100) + weight_conversion_seconds("int4", cost.weights, 64)
    assert kernel(cost, "bf16[64,4096]", "bf16[1,4096,14336]") < 0.7 * seconds


@pytest.mark.parametrize(("stored", "dtype"), [("f8e4m3fn", "fp8"), ("s8", "int8"), ("bf16", "bf16")])
def test_a_kernel_reads_or_converts_the_cached_elements_that_it_states(stored, dtype):
    """Heads of 96 are padded to 128: a third more elements than bytes."""
    elements, width = 64 * 2048 * 8 * 256, {"bf16": 2}.get(dtype, 1)
    cost = KernelCost(1 << 20, elements * 3 // 4 * width, cached=elements)
    assert kernel(cost, "bf16[64,32,96]", f"{stored}[131072,1536]") == cached_seconds(dtype, elements, H100)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "weight_dtype", "kv_dtype"),
    [
        ("llama3-8b", "int8", "bf16"), ("llama3-8b", "fp8", "bf16"), ("llama3-8b", "int4", "fp8"),
        ("llama3-8b", "bf16", "int8"), ("mixtral-8x7b", "fp8", "bf16"),
    ],
)  # fmt: skip
def test_a_compiled_decode_step_with_narrow_values_takes_the_planned_time(model, weight_dtype, kv_dtype):
    """By bytes alone the matmuls of int4 weights took 0.43 of the planned time; a loop over experts 2.7 times as long."""
    pytest.importorskip("jax_cuda13_plugin")
    found = mw.verify(
        model, serve="decode", on="h100:1", mesh="dp=1", batch=64, num_layers=4, prompt_len=1984, output_len=64,
        weight_dtype=weight_dtype, kv_dtype=kv_dtype,
    )  # fmt: skip
    rows = {row.quantity: row for row in found.rows}
    assert 0.95 < rows["step"].compiled / rows["step"].predicted < 1.05
    assert rows["flops"].is_equal
