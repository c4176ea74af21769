"""What a step of a ResNet takes of a device."""

from dataclasses import replace

import pytest

from meshwright.description.hardware.system import parse_system
from meshwright.description.step.images import RESNETS, ImageWorkload, image_step
from meshwright.description.step.ir import Matmul
from meshwright.mesh import MeshShape
from meshwright.planning.cost.flops import matmul_flops
from meshwright.planning.cost.images import (
    image_collectives,
    image_flops,
    image_memory,
    image_ops,
    image_step_flops,
    image_update_seconds,
)
from meshwright.planning.cost.rates.achieved import product_seconds

RESNET50 = ImageWorkload(model=RESNETS["resnet50"], batch=256)
A100 = parse_system("a100-80gb:8")
KERNELS = 25_557_032 - 2 * 26_560 - 1000
"""The parameters but the 26,560 channels' scales and shifts and the bias of 1,000 classes."""


def amounts(workload, mesh):
    return {(c.kind, c.axes, c.phase): c.bytes for c in image_collectives(workload, mesh)}


def test_a_step_is_three_products_a_convolution_and_two_in_the_stem():
    """4.09 G multiply-adds an image, of which 118 M in the stem, whose images want no gradient."""
    assert image_flops(RESNET50) == 256 * (3 * 8_178_368_512 - 2 * 118_013_952)


def products():
    """The products of a step on eight devices by path and role, with their times."""
    ops = image_ops(RESNET50, MeshShape(dp=8), A100)
    return {(op.name, op.role): (op, seconds) for op, seconds, _ in ops if isinstance(op, Matmul)}


@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(dp=8), MeshShape(dp=2, fsdp=4), MeshShape(fsdp=8)], ids=str)
def test_devices_share_the_flops(mesh):
    assert image_step_flops(RESNET50, mesh).total * mesh.num_devices == image_flops(RESNET50)


def test_each_product_of_a_convolution_has_its_flops_but_that_of_the_images_gradient():
    extents = image_step(RESNET50, MeshShape(dp=8)).extents
    found = {place: matmul_flops(op, extents) for place, (op, _) in products().items()}
    stem = 32 * 2 * 112**2 * 7**2 * 3 * 64
    assert {role: flops for (name, role), flops in found.items() if name == "stem"} == {
        "result": stem, "weight_gradient": stem
    }  # fmt: skip
    strided = 32 * 2 * 28**2 * 3**2 * 128 * 128
    assert [found["stage2.block1.conv2", role] for role in ("result", "input_gradient", "weight_gradient")] == [
        strided
    ] * 3


def test_data_parallelism_sums_every_gradient_once():
    """Kernels in bf16 and vectors in float32, over dp alone; one device communicates nothing."""
    assert amounts(RESNET50, MeshShape(dp=8)) == {("all-reduce", ("dp",), "backward"): 2 * KERNELS + 4 * 54_120}
    assert amounts(RESNET50, MeshShape()) == {}


def test_fsdp_gathers_kernels_in_both_passes_and_scatters_their_gradients():
    found = amounts(RESNET50, MeshShape(dp=2, fsdp=4))
    assert found["all-gather", ("fsdp",), "forward"] == 2 * KERNELS
    assert found["all-gather", ("fsdp",), "backward"] == 2 * KERNELS
    assert found["reduce-scatter", ("fsdp",), "backward"] == 2 * KERNELS
    assert found["all-reduce", ("dp",), "backward"] == 2 * KERNELS // 4
    assert found["all-reduce", ("dp", "fsdp"), "backward"] == 4 * 54_120


def test_synchronised_norms_sum_two_statistics_a_channel_each_way():
    synced = replace(RESNET50, syncs_norms=True)
    more = [c for c in image_collectives(synced, MeshShape(dp=8)) if "batch norms" in c.array]
    assert [(c.phase, c.count, c.bytes) for c in more] == [(phase, 53, 8 * 26_560) for phase in ("forward", "backward")]


def test_memory_is_states_and_activations():
    """Parameters, momentum and gradients in float32; two values kept for each one that a convolution makes, less the
    shortcuts' sums, and the two pools' results, 41.9 MB an image in bf16."""
    memory = image_memory(RESNET50, MeshShape(dp=8))
    assert memory["parameters"] == memory["optimizer"] == memory["gradients"] == 4 * 25_557_032
    assert sum(size for name, size in memory.items() if name != "peak") == memory["peak"]
    assert memory["activations"] / 32 == 2 * (2 * 11_114_984 - 1_505_280 - 1000 + 200_704 + 2048)
    sharded = image_memory(RESNET50, MeshShape(fsdp=8))
    assert sharded["parameters"] == 4 * (KERNELS // 8 + 54_120)
    assert sharded["activations"] == memory["activations"]


def test_sharded_parameters_are_updated_in_less_time():
    copies, shards = (image_update_seconds(RESNET50, mesh, A100) for mesh in (MeshShape(dp=8), MeshShape(fsdp=8)))
    assert copies == pytest.approx(8 * shards, rel=0.02)  # Vectors, a fifth of a percent, are kept whole.


@pytest.mark.parametrize("hardware", ["a100-80gb:8", "h100:8", "v5p:2x2x2", "v5e:4x4", "cpu:8"])
def test_no_op_is_faster_than_the_peaks(hardware):
    system = parse_system(hardware)
    dtype = "f32" if hardware.startswith("cpu") else "bf16"
    for _, seconds, ideal in image_ops(replace(RESNET50, compute_dtype=dtype), MeshShape(dp=8), system):
        assert seconds >= ideal.seconds * (1 - 1e-12)


def test_a_convolution_reads_each_pixel_once():
    """A 3x3 convolution is faster than the product of its own sizes, in which each pixel stands nine times."""
    _, seconds = products()["stage1.block1.conv2", "result"]
    assert seconds < product_seconds(32 * 56 * 56, 576, 64, system=A100, dtype="bf16")


def test_a_filter_that_skips_pixels_does_not_read_them():
    """The shortcut of the second stage looks at one pixel of four."""
    timed = {op.name: ideal for op, _, ideal in image_ops(RESNET50, MeshShape(), A100) if isinstance(op, Matmul)}
    moved = timed["stage2.block1.shortcut"].memory_seconds * A100.hbm_bytes_per_second
    assert moved == pytest.approx(2 * (256 * 28**2 * (256 + 512) + 256 * 512))


def test_the_gradient_of_a_small_kernel_is_cut_over_the_images():
    """[64, 100352] @ [100352, 256] makes two tiles for 108 multiprocessors; in parts it makes many."""
    _, cut = products()["stage1.block1.conv3", "weight_gradient"]
    assert cut < product_seconds(64, 32 * 56 * 56, 256, system=A100, dtype="bf16") / 2


def test_one_by_one_norms_and_relus_take_longer():
    def seconds(workload):
        return sum(op.seconds for op in image_ops(workload, MeshShape(), A100))

    assert seconds(RESNET50) < seconds(replace(RESNET50, fuses=False))
