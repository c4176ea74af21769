"""What fused attention, collectives of many members and elementwise passes take, against what was measured."""

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.elementwise import pass_of, softmax_passes
from meshwright.planning.cost.rates.attention import (
    attention_share,
    fused_attention_time,
    tpu_block,
    tpu_kernel,
    tpu_kernel_share,
)
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.cost.rates.efficiency import layer_shares
from meshwright.planning.cost.rates.links import RINGS, TREE, collective_efficiency

H100 = parse_system("h100:8")


def rates(kernel, seq_len, head_dim, system=H100):
    """TFLOP/s forward and backward."""
    time = fused_attention_time(1e15, seq_len, head_dim, head_dim, kernel, system)
    return 1e3 / time.forward, 2.5e3 / time.backward


def test_forward_rates_are_those_of_the_paper():
    """FlashAttention-2 and cuDNN, causal, heads of 128, on an H100 (arXiv:2407.08608, figure 5)."""
    assert rates("flash", 16384, 128)[0] == pytest.approx(335, rel=0.1)
    assert rates("cudnn", 16384, 128)[0] > 1.4 * rates("flash", 16384, 128)[0]


@pytest.mark.parametrize(
    ("length", "kernel"),
    [
        (128, "splash"),
        (65_536, "splash"),
        (65_664, "flash"),
        (1 << 20, "flash"),
        (100, "blockwise"),
        (192, "blockwise"),
    ],
)
def test_a_tpu_takes_splash_for_whole_sequences_it_can_be_traced_for(length, kernel):
    assert tpu_kernel(length) == kernel


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_longer_sequences_and_wider_heads_are_faster_and_backward_is_slower(kernel):
    forward = [rates(kernel, seq_len, 128)[0] for seq_len in (256, 1024, 3000, 8192, 1 << 20)]
    assert forward == sorted(forward)
    assert rates(kernel, 4096, 64)[0] < rates(kernel, 4096, 128)[0]
    assert rates(kernel, 4096, 128)[1] < rates(kernel, 4096, 128)[0]


def test_attention_is_no_faster_than_products_under_the_power_limit():
    limited = parse_system("h100-96gb-500w:8")
    assert rates("cudnn", 16384, 128, limited)[0] < rates("cudnn", 16384, 128)[0]
    assert attention_share(limited) <= attention_share(H100)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p", "tpu7x"])
def test_a_tpu_makes_whole_blocks_of_scores_so_that_longer_sequences_are_faster(chip):
    system = parse_system(f"{chip}:4")
    forward = [rates("flash", n * tpu_block(128), 128, system)[0] for n in (1, 2, 8, 64)]
    assert forward == sorted(forward)
    assert forward[0] == pytest.approx(forward[-1] * (1 / 2) / (64 / 65))


def test_wide_matrix_units_are_half_idle_in_heads_of_128():
    """Contractions over 128 fill half of v6e's units of 256 x 256 and all of v5e's of 128 x 128."""
    v5e, v6e = (parse_system(chips) for chips in ("v5e:4", "v6e:4"))
    assert tpu_kernel_share(v6e, "fwd", 128, 128) < 0.5
    assert tpu_kernel_share(v5e, "fwd", 128, 128) > 0.5
    assert tpu_kernel_share(v6e, "fwd", 256, 256) > tpu_kernel_share(v6e, "fwd", 128, 128)


def test_the_kernels_of_a_measured_layer_take_about_as_long():
    """Splash attention of tokamax on v6e, 3 x 8,192 tokens, 32 heads of 128: 6.0 ms forward, 13.5 ms backward.

    github.com/vlasenkoalexey/tpu_performance_autoresearch_wiki, Qwen3-8B; its backward is one kernel of five products.
    """
    time = fused_attention_time(2 * 3 * 32 * 8192**2 * 128, 8192, 128, 128, "flash", parse_system("v6e:8"))
    assert time.forward == pytest.approx(6.0e-3, rel=0.25)
    assert time.backward == pytest.approx(13.5e-3, rel=0.3)


def test_op_by_op_moves_more_than_fused():
    step = train_step(Workload(model=PRESETS["llama3-8b"], batch=8, seq_len=2048, remat="none"), MeshShape())
    passes = [op for op in step.ops.elementwise if op.region.name == "layers"]

    def moved(*, fuses):
        each = ((op, pass_of(op.kind, fuses=fuses)) for op in passes)
        return sum(
            (one.forward_bytes if op.phase == "forward" else one.backward_bytes)
            * sum(step.extents.local(array) for array in op.arrays)
            for op, one in each
        )

    fused, alone = moved(fuses=True), moved(fuses=False)
    assert alone > 2 * fused
    masked, plain = (
        sum(each.forward_bytes for each in softmax_passes(fuses=True, dropout=dropout)) for dropout in (True, False)
    )
    assert masked > plain


def test_small_arrays_take_a_step_for_each_member_and_a_tree_fewer():
    """NCCL takes what is faster, so small arrays grow less than their members."""

    def seconds(num_devices, nbytes):
        system = parse_system(f"h100:{num_devices}")
        ideal = collective_seconds("all-reduce", nbytes, lay_mesh(system, {"X": num_devices}).placement("X"))
        return ideal.bandwidth_seconds / collective_efficiency(system, ideal)

    assert RINGS
    assert TREE
    assert seconds(512, 1e5) < 4 * seconds(16, 1e5)
    assert seconds(512, 1e9) < 1.5 * seconds(16, 1e9)


def test_a_layer_in_one_program_of_a_tpu_reaches_less_than_its_ops():
    shares = layer_shares(parse_system("v5e:4x4"))
    assert 0.5 < shares["attention"] < shares["rest"] < 1
    assert layer_shares(parse_system("v6e:4x4"))
    assert layer_shares(H100) == {"attention": 1.0, "rest": 1.0}
