"""The share of the peak that products and links reach: against the data it is made of, and data it has not seen."""

import json
import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.cost.rates.data_files import tpu_products
from meshwright.planning.cost.rates.efficiency import gpu_figures, gpu_product_seconds, product_efficiency
from meshwright.planning.cost.rates.links import collective_efficiency

TABLES = tpu_products()
HELD_OUT = json.loads((Path(__file__).parents[2] / "data" / "tpu_products_held_out.json").read_text())["chips"]
SYSTEMS = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}

# Measured medians of github.com/microsoft/vidur, commit 7d47513, data/profiling: (tokens, contraction, columns, ms).
MEASURED = {
    "a100-80gb": [
        (4096, 8192, 10240, 2.872),
        (4096, 8192, 57344, 15.94),
        (2048, 28672, 8192, 4.022),
        (1024, 8192, 8192, 0.647),
        (256, 8192, 28672, 0.564),
        (1, 28672, 8192, 0.29),
    ],
    "h100": [
        (4096, 8192, 10240, 0.983),
        (4096, 8192, 57344, 5.668),
        (2048, 28672, 8192, 1.280),
        (512, 8192, 28672, 0.386),
        (128, 8192, 57344, 0.327),
        (1, 28672, 8192, 0.171),
    ],
}
# The same: all-reduce inside a node, (devices, bytes, ms).
REDUCED = {
    "a100-80gb": [(2, 67108864, 0.43), (4, 34471936, 0.323), (8, 67108864, 0.675), (8, 4980736, 0.107)],
    "h100": [(2, 67108864, 0.245), (4, 34471936, 0.171), (8, 67108864, 0.322), (8, 4980736, 0.056)],
}


def share_of_estimate(chip, m, k, n, cycles):
    return 2 * m * k * n / (cycles * TABLES["chips"][chip]["flops_per_cycle"])


def roofline(system, m, k, n):
    return 2 * m * k * n / system.peak() / (2 * (m * k + k * n + m * n) / system.hbm_bytes_per_second)


@pytest.mark.parametrize("chip", SYSTEMS)
def test_the_sizes_of_the_table_come_out_as_they_are_there(chip):
    system = parse_system(SYSTEMS[chip])
    grid = product(*(TABLES["grid"][dim] for dim in "mkn"))
    for (m, k, n), cycles in zip(grid, TABLES["chips"][chip]["cycles"], strict=True):
        estimate = share_of_estimate(chip, m, k, n, cycles)
        assert product_efficiency(system, m, k, n) == pytest.approx(min(estimate, roofline(system, m, k, n)), rel=1e-9)


@pytest.mark.parametrize(("chip", "mean", "most"), [
    ("v4", 0.03, 0.15), ("v5e", 0.03, 0.1), ("v5p", 0.03, 0.1), ("v6e", 0.07, 0.2), ("tpu7x", 0.07, 0.2)
])  # fmt: skip
def test_sizes_between_those_of_the_table_are_within_a_stated_error(chip, mean, most):
    system, errors = parse_system(SYSTEMS[chip]), []
    for m, k, n, cycles in HELD_OUT[chip]:
        estimate = min(share_of_estimate(chip, m, k, n, cycles), roofline(system, m, k, n))
        errors.append(abs(product_efficiency(system, m, k, n) / estimate - 1))
    assert statistics.fmean(errors) < mean
    assert max(errors) < most


@pytest.mark.parametrize("chip", SYSTEMS)
def test_no_estimate_of_the_compiler_is_faster_than_the_peak_and_the_best_is_near_it(chip):
    grid = product(*(TABLES["grid"][dim] for dim in "mkn"))
    shares = [
        share_of_estimate(chip, m, k, n, cycles)
        for (m, k, n), cycles in zip(grid, TABLES["chips"][chip]["cycles"], strict=True)
    ]
    assert 0.85 < max(shares) < 1


def test_beyond_the_largest_sizes_the_share_is_that_of_the_edge():
    system = parse_system("v5e:1x1")
    edge = product_efficiency(system, 16384, 16384, 28672)
    assert product_efficiency(system, 65536, 32768, 57344) == edge


def test_a_few_rows_take_as_long_as_the_least_of_the_table():
    system = parse_system("v5p:1x1x1")
    assert product_efficiency(system, 16, 8192, 8192) == pytest.approx(
        product_efficiency(system, 128, 8192, 8192) / 8, rel=1e-9
    )


def test_a_tpu_without_a_table_has_that_of_a_relative():
    assert product_efficiency(parse_system("v3:2x2"), 8192, 8192, 8192) > 0.8


@pytest.mark.parametrize(
    ("chip", "m", "k", "n", "ms"), [(chip, *row) for chip, rows in MEASURED.items() for row in rows]
)
def test_a_measured_gpu_product_is_within_15_percent(chip, m, k, n, ms):
    """At the clock of a burst: each was measured a few times with pauses, so no power limit was felt."""
    figures = replace(gpu_figures(chip), sustained_share=1.0)
    predicted = gpu_product_seconds(figures, parse_system(f"{chip}:1"), m, k, n)
    assert predicted == pytest.approx(ms / 1e3, rel=0.15)


@pytest.mark.parametrize(("chip", "most"), [("a100-80gb", 258), ("h200", 755), ("b200", 1440)])
def test_products_in_a_row_stay_below_the_best_that_was_sustained(chip, most):
    """That of the best of many shapes: github.com/stas00/ml-engineering, compute/accelerator."""
    system = parse_system(f"{chip}:1")
    reached = product_efficiency(system, 16384, 16384, 16384) * system.peak("bf16")
    assert 0.85 * most < reached / 1e12 < most


def test_a_chip_with_less_power_is_slower_at_products_alone():
    full, less = parse_system("h100:1"), parse_system("h100-96gb-500w:1")
    assert less.peak("bf16") == full.peak("bf16")
    large = product_efficiency(less, 8192, 8192, 8192) / product_efficiency(full, 8192, 8192, 8192)
    assert large == pytest.approx(less.chip.power_share, rel=0.05)


def test_a_wave_that_is_not_full_costs_as_much_as_a_full_one():
    """144 tiles are one wave more than an H100's 132 multiprocessors take."""
    system, figures = parse_system("h100:1"), gpu_figures("h100")
    one, two = (gpu_product_seconds(figures, system, 128 * tiles, 16384, 256 * 12) for tiles in (11, 12))
    assert two / one > 1.2 > 12 / 11


@pytest.mark.parametrize("name", ["v5p:1x1x1", "v6e:1x1", "a100-80gb:1", "h100:1", "b200:1", "cpu:1"])
def test_shares_lie_between_nothing_and_the_roofline(name):
    system = parse_system(name)
    for m, k, n in product((1, 100, 3000, 50_000), (64, 5120), (77, 13824)):
        assert 0 < product_efficiency(system, m, k, n) <= min(1, roofline(system, m, k, n)) * (1 + 1e-12)


def test_wider_elements_move_more_bytes():
    system = parse_system("v5e:1x1")
    assert product_efficiency(system, 256, 8192, 128, dtype="f32") < product_efficiency(system, 256, 8192, 128)


@pytest.mark.parametrize("dims", [(0, 8, 8), (8, 0, 8), (8, 8, -1)])
def test_an_empty_product_is_refused(dims):
    with pytest.raises(MeshwrightError, match="empty dim"):
        product_efficiency(parse_system("v5e:1x1"), *dims)


def all_reduce(name, degree, nbytes):
    system = parse_system(name)
    return system, collective_seconds("all-reduce", nbytes, lay_mesh(system, {"X": degree}).placement("X"))


@pytest.mark.parametrize(
    ("chip", "degree", "nbytes", "ms"), [(chip, *row) for chip, rows in REDUCED.items() for row in rows]
)
def test_a_measured_all_reduce_in_a_node_is_within_20_percent(chip, degree, nbytes, ms):
    system, ideal = all_reduce(f"{chip}:{degree}", degree, nbytes)
    predicted = ideal.bandwidth_seconds / collective_efficiency(system, ideal)
    assert predicted == pytest.approx(ms / 1e3, rel=0.2)


def test_links_reach_more_of_their_rate_the_more_bytes_there_are():
    shares = [collective_efficiency(*all_reduce("h100:8", 8, nbytes)) for nbytes in (1e4, 1e6, 1e8, 1e10)]
    assert shares == sorted(shares)
    assert shares[0] < 0.01
    assert 0.7 < shares[-1] < 0.8


def test_across_nodes_a_large_array_reaches_what_the_network_does():
    """370 GB/s of bus bandwidth were measured where 400 are sold (github.com/NVIDIA/nccl-tests/issues/290)."""
    assert collective_efficiency(*all_reduce("h100:256", 256, 1e11)) == pytest.approx(0.94, abs=0.01)


def test_a_ring_of_more_nodes_takes_longer_for_a_small_array():
    """A step for each member, where bytes are too few to fill the steps."""
    few, many = (
        ideal.bandwidth_seconds / collective_efficiency(system, ideal)
        for system, ideal in (all_reduce(f"h100:{8 * nodes}", 8 * nodes, 1e7) for nodes in (4, 64))
    )
    assert many > 1.2 * few


def test_a_torus_reaches_what_the_book_measured_and_one_device_all():
    assert collective_efficiency(*all_reduce("v5e:4x4", 16, 1e8)) == 0.95
    assert collective_efficiency(*all_reduce("v5e:4x4", 1, 1e8)) == 1
