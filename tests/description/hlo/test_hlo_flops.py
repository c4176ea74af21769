# ruff: noqa: E501 - HLO prints an instruction in a line
import jax
import jax.numpy as jnp
import pytest
import toy_programs as toys

from meshwright.description.hlo.flops import count_flops
from meshwright.description.hlo.loops import count_executions, sequential_computations
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.text import hlo_text
from meshwright.mesh import MeshShape
from meshwright.proof.simulate.hbm import hbm_bytes

F32 = jnp.float32


def flops_of(lowered):
    return count_flops(parse_hlo(lowered.compile().as_text()))


def count_hbm_bytes(module):
    """The bytes of a step, loop bodies as often as they run."""
    times = count_executions(module).times
    return sum(
        times[name] * hbm_bytes(module, instruction)
        for name in sequential_computations(module)
        for instruction in module.computations[name].instructions.values()
    )


def shaped(*dims):
    return jax.ShapeDtypeStruct(dims, F32)


LOOP_FREE = [
    (lambda a, b: a @ b, [(64, 32), (32, 128)]),
    (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), [(4, 16, 32), (4, 24, 32)]),
    (lambda a, b: jnp.einsum("ijab,jbk->aik", a, b), [(4, 6, 8, 10), (6, 10, 12)]),
    (lambda a, b: a @ b, [(64, 32), (32,)]),
    (lambda a, b: (a @ b) @ b, [(16, 16), (16, 16)]),
]


@pytest.mark.parametrize(("function", "shapes"), LOOP_FREE)
def test_flops_of_loop_free_products_are_those_of_xlas_cost_analysis(function, shapes):
    lowered = jax.jit(function).lower(*(shaped(*dims) for dims in shapes))
    assert flops_of(lowered).total == lowered.compile().cost_analysis()["flops"]


CONVOLUTIONS = [
    {"window_strides": (1,), "padding": [(0, 0)]},
    {"window_strides": (2,), "padding": "SAME"},
    {"window_strides": (1,), "padding": [(3, 1)], "rhs_dilation": (2,)},
    {"window_strides": (1,), "padding": [(2, 2)], "lhs_dilation": (3,)},
    {"window_strides": (2,), "padding": [(2, 3)], "lhs_dilation": (3,), "rhs_dilation": (2,)},
    {"window_strides": (1,), "padding": [(1, 1)], "feature_group_count": 2},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_flops_of_convolutions_count_where_kernel_and_input_meet(options):
    """Against a count over every position, one by one."""
    batch, length, inputs, outputs, kernel = 3, 11, 4, 6, 3
    groups = options.get("feature_group_count", 1)

    def convolve(x, k):
        return jax.lax.conv_general_dilated(x, k, dimension_numbers=("NWC", "WIO", "NWC"), **options)

    x, k = shaped(batch, length, inputs), shaped(kernel, inputs // groups, outputs)
    out_length = jax.eval_shape(convolve, x, k).shape[1]
    stride, holes = options["window_strides"][0], options.get("lhs_dilation", (1,))[0]
    spread, padding = options.get("rhs_dilation", (1,))[0], options["padding"]
    low = (
        jax.lax.padtype_to_pads((length,), (kernel,), (stride,), padding)[0][0] if padding == "SAME" else padding[0][0]
    )
    reads = [o * stride + i * spread - low for o in range(out_length) for i in range(kernel)]
    meetings = sum(0 <= position <= (length - 1) * holes and position % holes == 0 for position in reads)
    text = (
        f"HloModule m\n\nENTRY %main (x: f32[{batch},{length},{inputs}], k: f32[{kernel},{inputs // groups},{outputs}])"
        f" -> f32[{batch},{out_length},{outputs}] {{\n"
        f"  %x = f32[{batch},{length},{inputs}]{{2,1,0}} parameter(0)\n"
        f"  %k = f32[{kernel},{inputs // groups},{outputs}]{{2,1,0}} parameter(1)\n"
        f"  ROOT %c = f32[{batch},{out_length},{outputs}]{{2,1,0}} convolution(%x, %k), window={{size={kernel}"
        f" stride={stride} pad={low}_0 lhs_dilate={holes} rhs_dilate={spread}}}, dim_labels=b0f_0io->b0f\n}}\n"
    )
    assert count_flops(parse_hlo(text)).total == 2 * batch * outputs * (inputs // groups) * meetings


def test_a_convolution_that_the_tpu_compiler_writes_for_a_batched_product_counts_as_the_product():
    """bsgrk,btgk->bgrst of attention: the batch dims are windows that mostly meet padding and holes."""
    text = """HloModule m

ENTRY %main (q: bf16[8,2048,2,128,1], k: bf16[8,2048,2,4,128]) -> bf16[8,2,2048,2048,4] {
  %q = bf16[8,2048,2,128,1]{4,3,2,1,0} parameter(0)
  %k = bf16[8,2048,2,4,128]{4,3,2,1,0} parameter(1)
  ROOT %c = bf16[8,2,2048,2048,4]{4,3,2,1,0} convolution(%q, %k), window={size=8x2x4 stride=7x1x1 pad=0_0x0_0x3_3 lhs_dilate=8x2x1 rhs_reversal=0x0x1}, dim_labels=0b1f2_0o12i->01bf2
}
"""
    assert count_flops(parse_hlo(text)).total == 2 * 8 * 2 * 4 * 2048 * 2048 * 128


TOKENS = toys.BATCH * toys.SEQ_LEN
PRODUCT = 2 * TOKENS * toys.EMBED * toys.MLP  # one matrix, all devices


@pytest.mark.parametrize("layers", [1, 4, 8])
@pytest.mark.parametrize("remat", [False, True])
def test_flops_of_scanned_layers_count_every_trip_and_tell_recomputed_ones_apart(layers, remat):
    mesh = MeshShape(fsdp=2, tp=4)
    flops = flops_of(toys.train_step(toys.cpu_mesh(**mesh.degrees), layers=layers, remat=remat))
    share = layers * PRODUCT // mesh.num_devices
    # Nothing asks for the gradient of the input, which XLA sees where one layer needs no loop. Of the two products of a
    # layer the second need not be made again: no gradient takes its result.
    expected = {"forward": 2 * share, "backward": (3 if layers == 1 else 4) * share}
    expected |= {"recompute": share} if remat else {}
    assert flops.by_phase == expected
    assert flops.total == sum(expected.values())
    assert flops.notes == ()


def test_a_gemm_that_a_library_runs_counts_as_its_product():
    text = """HloModule m

ENTRY %main (a: f32[64,32], b: f32[32,128]) -> f32[64,128] {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,128]{1,0} parameter(1)
  %gemm = (f32[64,128]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %out = f32[64,128]{1,0} get-tuple-element(%gemm), index=0
}
"""
    assert count_flops(parse_hlo(text)).total == 2 * 64 * 32 * 128


KERNEL = """HloModule m

ENTRY %main (a: f32[64,32]) -> f32[64,32] {
  %a = f32[64,32]{1,0} parameter(0)
  %buffer = f32[64,32]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %k = f32[64,32]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"x",COST}}
}
"""


def test_a_kernel_counts_what_its_author_estimated():
    estimate = '"cost_estimate":{"transcendentals":"0","flops":"123456"}'
    assert count_flops(parse_hlo(KERNEL.replace("COST", estimate))).total == 123456


def test_a_kernel_counts_and_moves_what_its_scope_tells():
    text = """HloModule kernel

ENTRY %main (pages: bf16[1000000,128]) -> f32[16,128] {
  pages = bf16[1000000,128]{1,0} parameter(0)
  ROOT call = f32[16,128]{1,0} custom-call(pages), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/flops4096_bytes8192/pallas_call"}
}
"""
    module = parse_hlo(text)
    assert count_flops(module).total == 4096
    assert hbm_bytes(module, module.root("main")) == 8192


@pytest.mark.parametrize(("right", "flops"), [("pad.2", 2 * 16 * 90 * 8), ("plain", 2 * 16 * 96 * 8)])
def test_zeros_that_a_summed_dim_is_padded_with_are_not_counted(right, flops):
    """XLA:GPU pads both operands where it sums parts of a dim apart; padding of one operand adds rows, which count."""
    text = f"""HloModule split

ENTRY %main (x: bf16[16,90]) -> f32[4,16,8] {{
  x = bf16[16,90]{{1,0}} parameter(0)
  w = bf16[90,8]{{1,0}} parameter(1)
  plain = bf16[96,8]{{1,0}} parameter(2)
  zero = bf16[] constant(0)
  pad.1 = bf16[16,96]{{1,0}} pad(x, zero), padding=0_0x0_6
  pad.2 = bf16[96,8]{{1,0}} pad(w, zero), padding=0_6x0_0
  left = bf16[16,4,24]{{2,1,0}} bitcast(pad.1)
  right = bf16[4,24,8]{{2,1,0}} bitcast({right})
  ROOT dot = f32[4,16,8]{{2,1,0}} dot(left, right), lhs_batch_dims={{1}}, lhs_contracting_dims={{2}}, rhs_batch_dims={{0}}, rhs_contracting_dims={{1}}
}}
"""
    assert count_flops(parse_hlo(text)).total == flops


def test_a_kernel_without_an_estimate_is_named():
    flops = count_flops(parse_hlo(KERNEL.replace(",COST", "")))
    assert flops.total == 0
    assert flops.notes == ("1 calls a step of tpu_custom_call have no known flops",)


@pytest.mark.parametrize(("function", "shapes"), LOOP_FREE)
def test_bytes_of_loop_free_products_are_those_of_xlas_cost_analysis(function, shapes):
    compiled = jax.jit(function).lower(*(shaped(*dims) for dims in shapes)).compile()
    found = count_hbm_bytes(parse_hlo(hlo_text(compiled)))
    assert found == compiled.cost_analysis()["bytes accessed"]


ELEMENTWISE = [
    (lambda x: jnp.tanh(x) + 1, [(64, 128)], 2 * 64 * 128),
    (lambda x: x.sum(axis=0), [(64, 128)], 64 * 128 + 128),
    (lambda x, y: (x * y, x + y), [(64, 128), (64, 128)], 6 * 64 * 128),  # XLA:CPU makes two fusions of it
    # Of a slice and an update in place only the part is moved, in and out; the copy of an argument that is not donated
    # is read and written whole.
    (lambda x: jax.lax.slice(x, (0, 0), (8, 128)) * 2, [(64, 128)], 2 * 8 * 128),
    (lambda x: x.at[3].set(0.0) + 0, [(64, 128)], 2 * 64 * 128),
]


@pytest.mark.parametrize(("function", "shapes", "elements"), ELEMENTWISE)
def test_bytes_of_fusions_are_those_of_their_operands_and_results(function, shapes, elements):
    compiled = jax.jit(function).lower(*(shaped(*dims) for dims in shapes)).compile()
    found = count_hbm_bytes(parse_hlo(hlo_text(compiled)))
    assert found == pytest.approx(4 * elements, abs=4 * 128 + 8)  # the row that is set


STACKED = """HloModule m, is_scheduled=true

%sliced (all: f32[8,64,128], i: s32[], x: f32[64,128], old: f32[8,64,128]) -> f32[8,64,128] {
  %all = f32[8,64,128]{2,1,0} parameter(0)
  %flat = f32[8,8192]{1,0} bitcast(%all)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,8192]{1,0} dynamic-slice(%flat, %i, %zero), dynamic_slice_sizes={1,8192}
  %part = f32[64,128]{1,0} bitcast(%row)
  %x = f32[64,128]{1,0} parameter(2)
  %sum = f32[64,128]{1,0} add(%part, %x)
  %new = f32[1,64,128]{2,1,0} bitcast(%sum)
  %old = f32[8,64,128]{2,1,0} parameter(3)
  ROOT %u = f32[8,64,128]{2,1,0} dynamic-update-slice(%old, %new, %i, %zero, %zero)
}

ENTRY %main (all: f32[8,64,128], i: s32[], x: f32[64,128], old: f32[8,64,128]) -> f32[8,64,128] {
  %all = f32[8,64,128]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[64,128]{1,0} parameter(2)
  %old = f32[8,64,128]{2,1,0} parameter(3)
  ROOT %f = f32[8,64,128]{2,1,0} fusion(%all, %i, %x, %old), kind=kLoop, calls=%sliced
}
"""


def test_a_fusion_on_a_stack_of_layers_moves_the_one_layer_that_it_reads_and_writes():
    layer = 4 * 64 * 128
    assert count_hbm_bytes(parse_hlo(STACKED)) == 3 * layer + 4  # read, added, written; and the index


@pytest.mark.parametrize("layers", [2, 6])
def test_flops_and_bytes_count_every_trip_of_a_loop(layers):
    lowered = toys.train_step(toys.cpu_mesh(fsdp=2, tp=4), layers=layers)
    module = parse_hlo(lowered.compile().as_text())
    assert count_flops(module).by_phase["recompute"] == layers * PRODUCT // 8
    # Each product reads its operands and writes its result at least.
    assert count_hbm_bytes(module) > layers * 7 * 4 * toys.EMBED * toys.MLP / 8
