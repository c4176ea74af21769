"""The data files of this package, each with its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

DATA = Path(__file__).parent / "data"


class GpuProduct(TypedDict):
    """The constants of a measured GPU's products: see `efficiency.GpuFigures`."""

    peak_share: float
    tile_start: float
    tile_reuse: float
    hbm_share: float
    launch_seconds: float


class GpuLinks(TypedDict):
    """The constants of a measured GPU's links: see `links.LinkFigures`."""

    start_seconds: float
    share: float


class GpuProducts(TypedDict):
    """data/gpu_products.json, by chip."""

    multiprocessors: Mapping[str, int]
    sustained_share: Mapping[str, float]
    fp8_share: Mapping[str, float]
    products: Mapping[str, GpuProduct]
    links: Mapping[str, GpuLinks]


class TpuCycles(TypedDict):
    """Estimated cycles of a matmul on a chip, on a grid of sizes; those of n are adjacent."""

    flops_per_cycle: int
    cycles: list[int]


class TpuProducts(TypedDict):
    """data/tpu_products.json: chips by name, and the sizes of each dim (m, k, n)."""

    chips: Mapping[str, TpuCycles]
    grid: Mapping[str, list[int]]


class BestKernel(TypedDict):
    """The best that another chip than H100 reaches, in TFLOP/s, and the kernel of H100 whose curve is scaled to it."""

    kernel: str
    forward: float
    backward: float


class Attention(TypedDict):
    """data/attention.json: TFLOP/s at the lengths of `seq_lens`, by kernel, width of a head, and pass."""

    seq_lens: list[int]
    curves: Mapping[str, Mapping[str, Mapping[str, list[float]]]]
    best: Mapping[str, BestKernel]


@cache
def gpu_products() -> GpuProducts:
    """Products and links of GPUs, fitted on measured times (`benchmarks/gpu_products.py`)."""
    return _read("gpu_products")


@cache
def tpu_products() -> TpuProducts:
    """Products of TPUs, as their compiler estimates them (`benchmarks/tpu_products.py`)."""
    return _read("tpu_products")


@cache
def tpu_layer_shares() -> Mapping[str, Mapping[str, float]]:
    """Speed of a layer in one program, as a fraction of its ops' speeds alone, by chip (`benchmarks/tpu_layers.py`)."""
    return _read("tpu_layers")["chips"]


@cache
def tpu_attention_shares() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Fraction of peak of attention kernels, by chip, head size and kernel (`benchmarks/tpu_attention.py`)."""
    return _read("tpu_attention")["shares"]


@cache
def gpu_attention() -> Attention:
    """The rates of fused attention kernels on GPUs, as published."""
    return _read("attention")


def _read(name: str) -> Any:
    """The content of a data file."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
