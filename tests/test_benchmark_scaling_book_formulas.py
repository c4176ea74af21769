"""Serving and layouts in closed form: the book's own examples are in test_benchmark_scaling_book.py."""

import sys
from pathlib import Path

import pytest

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.load import load_chip
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.rates.collective import collective_seconds, gather_bytes_per_second
from meshwright.planning.cost.roofline import network_intensity

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from scaling_book_formulas import (  # pyright: ignore[reportMissingImports]
    best_fsdp_degree,
    critical_tokens_data,
    critical_tokens_fsdp_tp,
    critical_tokens_moe,
    decode_seconds,
    decode_tokens_per_second,
    free_bytes,
    largest_batch,
    pipeline_transfer_seconds,
    power_of_two,
    prefill_seconds,
    smallest_system,
    training_seconds,
)

V5E = parse_system("v5e:4x4")


def test_a_decode_step_reads_weights_until_the_batch_is_critical():
    """Half the flops per byte of the chip, for weights of one byte: 120 sequences (scaling book, inference)."""
    arguments = {"num_parameters": 30e9, "cache_bytes": 0.0, "weight_dtype": "int8"}
    below, above = (decode_seconds(V5E, batch=batch, **arguments) for batch in (119, 122))
    assert below.seconds == below.weights_seconds
    assert above.seconds == above.flops_seconds > above.weights_seconds


def test_caches_are_read_whatever_binds_the_products():
    with_caches = decode_seconds(V5E, num_parameters=30e9, batch=256, cache_bytes=8.2e8)
    assert with_caches.cache_seconds == pytest.approx(256 * 8.2e8 / (16 * 8.2e11))
    assert with_caches.seconds == with_caches.cache_seconds + with_caches.flops_seconds


def test_throughput_levels_off_at_the_rate_of_the_caches():
    """Per sequence a step reads its cache, so N W / KV bounds the tokens a second."""
    times = {b: decode_seconds(V5E, num_parameters=1e9, batch=b, cache_bytes=8.2e8) for b in (1, 100, 10_000)}
    rates = [decode_tokens_per_second(time, batch=batch) for batch, time in times.items()]
    assert rates == sorted(rates)
    assert rates[-1] < 16 * 8.2e11 / 8.2e8


def test_a_prefill_is_a_third_of_the_training_of_its_tokens():
    prefill = prefill_seconds(V5E, num_parameters=70e9, tokens=8192, mfu=0.4)
    assert training_seconds(V5E, num_parameters=70e9, tokens=8192, mfu=0.4) == pytest.approx(3 * prefill)


def test_no_batch_fits_where_the_weights_do_not():
    assert free_bytes(V5E, weight_bytes=300e9) < 0
    assert largest_batch(V5E, weight_bytes=300e9, cache_bytes=1e9) == 0
    assert largest_batch(V5E, weight_bytes=250e9, cache_bytes=1e9) == 6


@pytest.mark.parametrize(
    ("chip", "nbytes", "system"),
    [
        ("v5e", 1, "v5e:1x1"),
        ("v5e", 35e9, "v5e:2x2"),
        ("v5e", 212e9, "v5e:4x4"),
        ("h100", 640e9, "h100:8"),
        ("h100", 641e9, "h100:10"),
        ("h100", 960e9, "h100:12"),
    ],
)
def test_the_smallest_system_is_a_legal_one(chip, nbytes, system):
    assert str(smallest_system(load_chip(chip), nbytes)) == system


def test_what_no_slice_holds_is_refused():
    with pytest.raises(MeshwrightError, match=r"no v5e slice holds 5e\+12 bytes; the largest has 4.1e\+12"):
        smallest_system(load_chip("v5e"), 5e12)


def test_two_replicas_need_half_the_tokens_of_many():
    assert critical_tokens_data(2550, degree=2) == critical_tokens_data(2550) / 2
    assert critical_tokens_data(2550, links=3) == 850


def test_the_best_split_balances_what_fsdp_and_tensor_parallelism_send():
    """At X_opt both take as long: 4 D F / (Y M_X) = 4 B D / (X M_Y)."""
    tokens, ffw, chips = 3e6, 13824, 4096
    fsdp = best_fsdp_degree(tokens, num_devices=chips, ffw_dim=ffw)
    assert ffw / (chips / fsdp * 2) == pytest.approx(tokens / (fsdp * 1))


@pytest.mark.parametrize(("degree", "most", "power"), [(1333, 4096, 1024), (1500, 4096, 2048), (0.3, 8, 1), (99, 8, 8)])
def test_a_degree_becomes_the_nearest_power_of_two(degree, most, power):
    assert power_of_two(degree, at_most=most) == power


def test_no_degree_is_refused():
    with pytest.raises(MeshwrightError, match="not positive"):
        power_of_two(0, at_most=8)


def alpha(system, axes, **mesh):
    """C / W of a collective over some axes of a mesh."""
    parsed = parse_system(system)
    return network_intensity(parsed, gather_bytes_per_second(lay_mesh(parsed, mesh).placement(axes)))


# training, figure of 16x16x16: all strategies are communication bound below 400 k tokens with F = 4 x 8192
def test_fsdp_with_tensor_parallelism_needs_a_smaller_batch():
    one_axis = alpha("v5p:16x16x16", "x", x=16, y=16, z=16)
    assert one_axis == pytest.approx(2550)
    assert critical_tokens_fsdp_tp(one_axis, num_devices=4096, ffw_dim=32768) == pytest.approx(406406, rel=1e-5)


# gpus, data parallelism, MoE: E = 128, k = 4 between H100 nodes; printed with 9.9e14 flops/s
def test_a_mixture_of_experts_needs_more_tokens():
    dense = alpha("h100:64", ("dp", "tp"), dp=8, tp=8)
    assert critical_tokens_moe(dense, num_experts=128, num_active=4) == pytest.approx(79200, rel=2e-3)


def test_more_active_experts_than_there_are_is_refused():
    with pytest.raises(MeshwrightError, match="9 active of 8 experts; the active are from 1 to all of them"):
        critical_tokens_moe(1.0, num_experts=8, num_active=9)


def test_activations_travel_through_a_pipeline():
    microbatch = 2 * 1e6 * 8192 / 8
    placement = lay_mesh(parse_system("h100:32"), {"pp": 4, "tp": 8}).placement("pp")
    hop = collective_seconds("collective-permute", microbatch / 8, placement)
    transfer = pipeline_transfer_seconds(hop.bandwidth_seconds, num_microbatches=8, num_stages=4)
    assert transfer == pytest.approx(0.0512)
    assert hop.seconds == pytest.approx(hop.bandwidth_seconds + 5e-6)
