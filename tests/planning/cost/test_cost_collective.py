"""Times of collectives: worked examples of the scaling book (jax-ml.github.io/scaling-book), and what must hold."""

import math

import pytest

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.planning.cost.rates.collective import collective_seconds, gather_bytes_per_second
from meshwright.record import KINDS, wire_bytes


def place(system, axes, **mesh):
    return lay_mesh(parse_system(system), mesh).placement(axes)


def seconds(kind, nbytes, system, axes, **mesh):
    return collective_seconds(kind, nbytes, place(system, axes, **mesh))


# sharding, problem 2.1: AllGather_X([B_X, D_Y]) bf16, B = 1024, D = 4096, on TPU v4p 4x4x4 with X = Y = Z = 4
def test_an_all_gather_on_a_full_ring_takes_the_bytes_over_both_links():
    time = seconds("all-gather", 1024 * 4096 * 2 / 4, "v4:4x4x4", "X", X=4, Y=4, Z=4)
    assert time.seconds == pytest.approx(2.33017e-05, rel=1e-5)
    assert time.regime == "bandwidth"
    assert time.binds == "ICI z: ring of 4"


# sharding, problem 3: AllGather_X([B_X]) bf16 with B = 128
def test_a_small_all_gather_takes_its_hops():
    time = seconds("all-gather", 256, "v4:4x4x4", "X", X=4, Y=4, Z=4)
    assert time.seconds == pytest.approx(2e-6)
    assert time.regime == "latency"
    assert time.binds == "hop latency of ICI z: ring of 4"


# sharding, pop quiz 2: AllGather_Y([E_Y, F]) bf16, E = 2048, F = 8192, on TPU v5e {X: 8, Y: 4}; measured 680 us
def test_an_all_gather_on_a_line_is_a_lower_bound_of_the_measured_time():
    time = seconds("all-gather", 2048 * 8192 * 2, "v5e:8x4", "Y", X=8, Y=4)
    assert time.seconds == pytest.approx(3 * 2048 * 8192 * 2 / 4 / 4.5e10)
    assert 0.75 * 680e-6 < time.seconds <= 680e-6
    assert time.binds == "ICI y: line of 4"
    small = seconds("all-gather", 256 * 256 * 2, "v5e:8x4", "Y", X=8, Y=4)
    assert small.seconds == pytest.approx(3e-6)


# sharding, problem 2.2: AllGather_XY([B_X, D_Y]) on TPU v4p 4x4x4: both axes' links, one after another as fast
def test_two_rings_gather_twice_as_fast_as_one():
    nbytes = 1024 * 4096 * 2
    both = seconds("all-gather", nbytes, "v4:4x4x4", ("X", "Y"), X=4, Y=4, Z=4)
    one = seconds("all-gather", nbytes, "v4:4x4x4", "X", X=4, Y=4, Z=4)
    assert both.asymptotic_seconds == pytest.approx(nbytes / 2 / 9e10)
    assert both.asymptotic_seconds == one.asymptotic_seconds / 2
    assert both.latency_seconds == pytest.approx(4e-6)


# tpus, question 6: int8[128k, 128k] of a v5e 4x4 gathered to a corner chip, which has two links
def test_the_corner_of_an_open_slice_gathers_through_two_links():
    time = seconds("all-gather", 2**34, "v5e:4x4", ("X", "Y"), X=4, Y=4)
    assert time.seconds == pytest.approx(0.178957, rel=1e-5)


# gpus, pop quiz 1: AllGather(bf16[1024_X, 16384]) over 8 H100
def test_an_all_gather_in_a_node():
    time = seconds("all-gather", 33554432, "h100:8", "X", X=8)
    assert time.seconds == pytest.approx(6.52447e-05, rel=1e-5)
    assert time.asymptotic_seconds == pytest.approx(7.45654e-05, rel=1e-5)
    assert time.binds == "node: 8 units"


# gpus, in network reductions: 1 GB over 8 H100; in theory SHARP takes the bytes once over the link
def test_an_all_reduce_in_a_node():
    time = seconds("all-reduce", 1e9, "h100:8", "X", X=8)
    assert time.seconds == pytest.approx(0.00388889, rel=1e-5)
    assert time.asymptotic_seconds == pytest.approx(0.00444444, rel=1e-5)
    with_sharp = seconds("all-gather", 1e9, "h100:8", "X", X=8).asymptotic_seconds
    assert with_sharp == pytest.approx(0.00222222, rel=1e-5)


# gpus, pop quiz 3: AllGather_X(bf16[D_X, F_Y]) over a scalable unit of 256 GPUs, D = 8192, F = 32768, Y inner.
# The book takes (D_i - 1) / D_i as 1 for Y = 64.
def test_an_inner_axis_helps_the_outer_one_by_the_nodes_it_spans():
    nbytes = 2 * 8192 * 32768
    eight = seconds("all-gather", nbytes / 8, "h100:256", "X", X=32, Y=8)
    assert eight.seconds == pytest.approx(0.00130023, rel=1e-5)
    many = seconds("all-gather", nbytes / 64, "h100:256", "X", X=4, Y=64)
    assert many.asymptotic_seconds == pytest.approx(0.000167772, rel=1e-5)
    assert many.seconds == pytest.approx(0.000167772 * 3 / 4, rel=1e-5)


# gpus, quiz 4, question 5: 1 GB over exactly two nodes
def test_over_two_nodes_the_node_binds_and_not_the_network():
    time = seconds("all-gather", 1e9, "h100:16", "X", X=16)
    assert {term.link: term.seconds for term in time.terms} == {
        "node": pytest.approx(0.00194444, rel=1e-5),
        "leaf": pytest.approx(0.00125, rel=1e-5),
    }
    assert time.seconds == pytest.approx(0.00194444, rel=1e-5)
    assert time.binds == "node: 8 units"


# gpus, cross-node collectives: 413 GB/s over four scalable units
def test_over_a_superpod_the_leaf_level_binds():
    time = seconds("reduce-scatter", 1e9, "h100:1024", "X", X=1024)
    rates = {term.link: 1e9 / term.seconds for term in time.terms}
    assert rates == {
        "node": pytest.approx(514.286e9, rel=1e-5),
        "leaf": pytest.approx(412.903e9, rel=1e-5),
        "spine": pytest.approx(17066.7e9, rel=1e-5),
    }
    assert time.binds.startswith("leaf")


# gpus, cross-node: other collectives: B / (8 x 450e9) in a node, B / (2 x 400e9) over two
def test_an_all_to_all_suffers_from_the_second_node():
    nbytes = 1e9
    one = seconds("all-to-all", nbytes / 8, "h100:8", "X", X=8)
    two = seconds("all-to-all", nbytes / 16, "h100:16", "X", X=16)
    assert one.seconds == pytest.approx(nbytes * 7 / (64 * 450e9))
    assert two.seconds == pytest.approx(nbytes / (4 * 400e9))
    assert two.asymptotic_seconds / one.asymptotic_seconds == pytest.approx(4.5)


# sharding, AllToAll: a quarter of an all-gather on a ring
@pytest.mark.parametrize(("system", "size"), [("v5p:4x4x4", 4), ("v5p:8x8x8", 8), ("v6e:16x16", 16)])
def test_an_all_to_all_on_a_ring_takes_a_quarter_of_an_all_gather(system, size):
    nbytes = 1e9
    mesh = {"rest": parse_system(system).num_devices // size, "X": size}
    gather = seconds("all-gather", nbytes, system, "X", **mesh)
    exchange = seconds("all-to-all", nbytes / size, system, "X", **mesh)
    assert exchange.seconds == pytest.approx(gather.seconds / 4)


def test_an_all_to_all_on_a_torus_is_bound_by_its_longest_axis():
    """V max(A, B, C) / (4 N W), with V over all devices: here N operands of 1 MB."""
    time = seconds("all-to-all", 1e6, "v5p:4x4x8", "X", X=128)
    assert time.seconds == pytest.approx(128e6 * 8 / (4 * 128 * 1.8e11))
    assert time.binds == "ICI z: ring of 8"


def test_an_all_to_all_through_the_middle_of_a_line():
    """Two chips on either side of the middle link each send half of their operand over it."""
    time = seconds("all-to-all", 1e9, "v5e:4x4", "X", X=4)
    assert time.seconds == pytest.approx(2 * 0.5 * 1e9 / 4.5e10)


# gpus, pipeline parallelism: 1e6 tokens of bf16[8192], 8 microbatches, 4 stages, between nodes


def test_a_permute_goes_over_one_link_and_adds_its_hop():
    time = seconds("collective-permute", 1e9, "v5p:4x4x4", "X", X=4, Y=16)
    assert time.seconds == pytest.approx(1e9 / 9e10 + 1e-6)


def test_slices_exchange_with_all_their_chips():
    """A gradient shard of every chip crosses the network at 3.125 GB/s a chip (TPU v5e)."""
    time = seconds("all-reduce", 1e9, "2*v5e:16x16", "dp", dp=2, fsdp=256)
    assert time.seconds == pytest.approx(2 * 0.5 * 1e9 / 3.125e9)
    assert time.binds == "DCN: 2 units, 256 groups share each link"


def test_a_collective_over_slices_and_in_them_overlaps_its_levels():
    time = seconds("all-gather", 1e9, "2*v5e:16x16", ("dp", "fsdp"), dp=2, fsdp=256)
    assert {term.link: term.asymptotic_seconds for term in time.terms} == {
        "ICI": pytest.approx(1e9 / 1.8e11),
        "DCN": pytest.approx(1e9 / (256 * 3.125e9)),
    }


def test_the_devices_of_a_tpu7x_chip_exchange_over_the_link_between_them():
    pair = seconds("all-gather", 1e9, "tpu7x:4x4x4", "tp", fsdp=64, tp=2)
    assert pair.seconds == pytest.approx(0.5 * 1e9 / 5.4e11)
    assert pair.binds == "chip: 2 units"


def test_the_devices_of_a_tpu7x_chip_share_its_links_between_groups():
    """Gathering over both devices of each chip brings the bytes to it once, over one of them twice."""
    together = place("tpu7x:4x4x4", "fsdp", fsdp=128)
    apart = place("tpu7x:4x4x4", "fsdp", fsdp=64, tp=2)
    assert gather_bytes_per_second(together) == 2 * gather_bytes_per_second(apart)


def test_simulated_devices_share_the_memory():
    eight = seconds("all-gather", 1e6, "cpu:8", "X", X=8)
    assert eight.bandwidth_seconds == pytest.approx(8 * wire_bytes("all-gather", 1e6, 8) / 5e9)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_communicated_over_an_axis_of_one(kind):
    time = seconds(kind, 1e9, "v5e:4x4", "tp", fsdp=16, tp=1)
    assert (time.seconds, time.terms, time.binds) == (0.0, (), "")
    assert gather_bytes_per_second(place("v5e:4x4", "tp", fsdp=16, tp=1)) == math.inf


SYSTEMS = [
    ("v5e:4x4", {"fsdp": 4, "tp": 4}),
    ("v6e:16x16", {"fsdp": 64, "tp": 4}),
    ("v5p:4x4x4", {"fsdp": 32, "tp": 2}),
    ("2*v5p:4x4x4", {"dp": 4, "fsdp": 8, "tp": 4}),
    ("tpu7x:4x4x4", {"dp": 2, "fsdp": 8, "tp": 8}),
    ("h100:64", {"dp": 2, "fsdp": 4, "tp": 8}),
    ("gb200:128", {"fsdp": 4, "tp": 32}),
    ("cpu:8", {"fsdp": 4, "tp": 2}),
]


@pytest.mark.parametrize(("system", "mesh"), SYSTEMS)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(system, mesh):
    for nbytes in (1e3, 1e9):
        for axes in (*mesh, tuple(mesh)):
            parts = [seconds(kind, nbytes, system, axes, **mesh) for kind in ("reduce-scatter", "all-gather")]
            whole = seconds("all-reduce", nbytes, system, axes, **mesh)
            assert whole.seconds == pytest.approx(sum(part.seconds for part in parts))


@pytest.mark.parametrize(("system", "mesh"), SYSTEMS)
@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_take_longer_and_rules_of_thumb_are_not_faster(system, mesh, kind):
    for axes in (*mesh, tuple(mesh)):
        times = [seconds(kind, nbytes, system, axes, **mesh) for nbytes in (0, 1e3, 1e6, 1e9)]
        assert [t.seconds for t in times] == sorted(t.seconds for t in times)
        assert times[0].seconds == times[0].latency_seconds > 0
        assert all(t.asymptotic_seconds >= t.bandwidth_seconds for t in times)


@pytest.mark.parametrize(("system", "mesh"), SYSTEMS)
def test_a_device_does_not_receive_faster_than_all_its_links(system, mesh):
    """No all-gather beats the bytes a device must receive over everything it is wired to."""
    parsed = parse_system(system)
    chip, torus = parsed.chip, parsed.chip.torus
    if torus:
        links = 2 * torus.rank * torus.link_bytes_per_second + (torus.core_bytes_per_second or 0)
        links += chip.dcn.bytes_per_second if chip.dcn else 0
    else:
        links = chip.levels[0].link_bytes_per_second
        links += chip.levels[1].link_bytes_per_second / chip.levels[0].degree if len(chip.levels) > 1 else 0
    for axes in (*mesh, tuple(mesh)):
        placement = place(system, axes, **mesh)
        received = wire_bytes("all-gather", 1e9, placement.degree)
        assert collective_seconds("all-gather", 1e9, placement).seconds >= received / links
