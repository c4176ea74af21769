"""Serving and layouts in closed form: the book's own examples are in test_benchmark_scaling_book.py."""

import math

import pytest

from meshwright.cost import (
    best_fsdp_degree,
    critical_ffw_dim_experts,
    critical_tensor_degree,
    critical_tokens_data,
    decode_seconds,
    decode_tokens_per_second,
    free_bytes,
    largest_batch,
    power_of_two,
    prefill_seconds,
    smallest_system,
    training_seconds,
)
from meshwright.errors import MeshwrightError
from meshwright.hardware import load_chip, parse_system

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


def test_tensor_parallelism_is_bound_by_the_mlp_and_not_by_the_batch():
    """F = 28,672 on v5p: 11 ways over one axis (scaling book, training: F / 2550)."""
    assert math.floor(critical_tensor_degree(2550, ffw_dim=28672)) == 11
    assert math.floor(critical_tensor_degree(2550, ffw_dim=28672, links=2)) == 22


def test_experts_need_width_only_across_nodes():
    """Over very many devices 8 alpha, whatever k (scaling book, gpus: expert parallelism)."""
    assert critical_ffw_dim_experts(2475, degree=8, num_active=4) == 0
    assert critical_ffw_dim_experts(2475, degree=16, num_active=4) == 2475 * 8 / 4
    assert critical_ffw_dim_experts(2475, degree=10**6, num_active=4) == pytest.approx(8 * 2475, rel=1e-4)


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
