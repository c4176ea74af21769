"""Rooflines of one device: worked examples of the scaling book (jax-ml.github.io/scaling-book)."""

import math

import pytest

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.planning.cost.rates.collective import gather_bytes_per_second
from meshwright.planning.cost.roofline import (
    critical_batch,
    hardware_intensity,
    intensity,
    matmul_bytes,
    network_intensity,
    op_seconds,
)

V5E, V5P, H100 = parse_system("v5e:1x1"), parse_system("v5p:1x1x1"), parse_system("h100:1")


def alpha(system, axes, **mesh):
    """C / W of a collective over some axes of a mesh."""
    parsed = parse_system(system)
    return network_intensity(parsed, gather_bytes_per_second(lay_mesh(parsed, mesh).placement(axes)))


# gpus, quiz 1, question 7: adding two fp32[N]
@pytest.mark.parametrize(("size", "expected"), [(65536, 2.34756e-07), (2**30, 0.00384624)])
def test_adding_vectors_takes_the_time_of_their_bytes(size, expected):
    time = op_seconds(size, 12 * size, H100, dtype="f32")
    assert time.seconds == pytest.approx(expected, rel=1e-5)
    assert time.bound == "memory"
    assert intensity(size, 12 * size) == pytest.approx(0.0833333, rel=1e-5)


# roofline, problem 4: int8[B, D] . int8[B, D, F] -> int8[B, F], a matrix for each row
def test_a_matrix_for_each_row_has_intensity_two_at_any_batch():
    for batch in (1, 64, 4096):
        dim = 8192
        nbytes = batch * matmul_bytes(1, dim, dim, weight_dtype="int8", activation_dtype="int8")
        assert intensity(2 * batch * dim * dim, nbytes) == pytest.approx(2.0, rel=1e-3)


# roofline, network communication rooflines: D over two chips, 4.5e10 bytes/s between them
def test_two_chips_that_split_the_contraction_are_compute_bound_from_8755():
    link = V5E.chip.torus.link_bytes_per_second  # pyright: ignore[reportOptionalMemberAccess]
    # Each chip does B D F flops and sends 2 B F bytes, so its intensity is D / 2.
    assert 2 * network_intensity(V5E, link) == pytest.approx(8755.56, rel=1e-5)


# roofline, problems 1 to 3
CRITICAL = [
    ({"weight_dtype": "int8", "activation_dtype": "int8"}, 240.244),
    ({"weight_dtype": "int8", "activation_dtype": "bf16"}, 120.122),
    ({"weight_dtype": "bf16", "activation_dtype": "bf16"}, 240.244),
    ({"weight_dtype": "int8", "activation_dtype": "bf16", "dims": (4096, 4096)}, 136.086),
    ({"weight_dtype": "int8", "activation_dtype": "bf16", "dims": (1024, 1024)}, 226.315),
]


@pytest.mark.parametrize(("arguments", "expected"), CRITICAL)
def test_the_critical_batch_of_v5e(arguments, expected):
    assert critical_batch(V5E, **arguments) == pytest.approx(expected, rel=1e-5)


def test_v5e_does_480_int8_operations_a_byte_of_memory():
    assert hardware_intensity(V5E, dtype="int8") == pytest.approx(480.488, rel=1e-5)


@pytest.mark.parametrize(("arguments", "_expected"), CRITICAL)
def test_at_the_critical_batch_arithmetic_and_memory_take_as_long(arguments, _expected):
    dims = arguments.get("dims", (2**40, 2**40))
    batch = critical_batch(V5E, **arguments)
    dtypes = {key: arguments[key] for key in ("weight_dtype", "activation_dtype")}
    nbytes = matmul_bytes(batch, *dims, **dtypes)
    time = op_seconds(2 * batch * math.prod(dims), nbytes, V5E, dtype=arguments["activation_dtype"])
    assert time.flops_seconds == pytest.approx(time.memory_seconds)


def test_a_product_too_thin_for_its_activations_has_no_critical_batch():
    assert critical_batch(V5E, dims=(64, 64)) == math.inf


# training, data parallelism: tokens a chip on TPU v5p with 1, 2 and 3 axes, and of a whole pod
@pytest.mark.parametrize(
    ("axes", "expected"), [(("x",), 2550), (("x", "y"), 1275), (("x", "y", "z"), 850)], ids=["1", "2", "3"]
)
def test_data_parallelism_on_v5p_hides_its_communication(axes, expected):
    assert alpha("v5p:16x20x28", axes, x=28, y=20, z=16) == pytest.approx(expected)


def test_a_whole_v5p_pod_needs_seven_and_a_half_million_tokens():
    assert 8960 * alpha("v5p:16x20x28", "fsdp", fsdp=8960) == pytest.approx(7616000)


# training, scaling across pods; v6e is printed with 9.2e14 flops/s
@pytest.mark.parametrize(
    ("chip", "expected", "rel"), [("v5p", 73440, 1e-5), ("v5e", 63040, 1e-5), ("v6e", 73600, 3e-3)]
)
def test_data_parallelism_between_slices_needs_so_many_tokens_a_slice(chip, expected, rel):
    system = parse_system(f"2*{chip}:16")
    (crossing,) = lay_mesh(system, {"dp": 2, "fsdp": 16}).placement("dp").crossings
    # A slice computes and sends with all its chips, so its tokens are those of one chip's share.
    a_chip = crossing.link_bytes_per_second / 16
    assert network_intensity(system, a_chip) == pytest.approx(expected, rel=rel)


# gpus, quiz 5, question 1, and data parallelism
@pytest.mark.parametrize(
    ("system", "mesh", "expected"),
    [
        ("b200:64", {"dp": 8, "tp": 8}, {"tp": 2500, ("dp", "tp"): 5625}),
        ("gb200:576", {"dp": 8, "tp": 72}, {"tp": 2500, ("dp", "tp"): 2500}),
        ("h100:64", {"dp": 8, "tp": 8}, {"tp": 989 / 0.450, ("dp", "tp"): 989 / 0.400}),
    ],
)
def test_gpus_need_so_many_tokens_in_a_node_and_across(system, mesh, expected):
    assert {axes: alpha(system, axes, **mesh) for axes in expected} == pytest.approx(expected)


def test_the_network_between_nvl72_racks_alone_would_need_625_tokens():
    system = parse_system("gb200:576")
    assert network_intensity(system, system.chip.levels[1].link_bytes_per_second) == pytest.approx(625)


def test_an_op_that_moves_nothing_has_infinite_intensity():
    assert intensity(1.0, 0) == math.inf


# tpus, question 4: int8[16384, 4096] times int8[B, 4096] is bound by arithmetic from a batch of 271, in the book's
# rounded figures (8.1e11 bytes/s, 1.3e8 flops a row)
def test_a_larger_batch_turns_a_product_from_memory_to_compute_bound():
    def bound(batch):
        nbytes = matmul_bytes(batch, 4096, 16384, weight_dtype="int8", activation_dtype="int8")
        return op_seconds(2 * batch * 4096 * 16384, nbytes, V5E, dtype="int8").bound

    critical = critical_batch(V5E, weight_dtype="int8", activation_dtype="int8", dims=(4096, 16384))
    assert critical == pytest.approx(271, rel=0.05)
    assert (bound(critical * 0.99), bound(critical * 1.01)) == ("memory", "compute")
