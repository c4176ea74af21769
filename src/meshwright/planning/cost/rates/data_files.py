"""The data files of this package, each with its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

DATA = Path(__file__).parent / "data"


class GpuProduct(TypedDict):
    """Constants of a measured GPU's matmuls: see `efficiency.GpuFigures`."""

    peak_share: float
    tile_start: float
    tile_reuse: float
    hbm_share: float
    launch_seconds: float


class GpuLinks(TypedDict):
    """Constants of a measured GPU's links: see `links.LinkFigures`."""

    start_seconds: float
    share: float


class GpuDecode(TypedDict):
    """Times of kernels in the decode steps of a measured GPU, used for all GPUs.

    kernel_seconds: the time of a kernel with little to compute. value_seconds, value_row_seconds: time for a value of a
    narrow weight, and for it and each row that is multiplied with it, by dtype. cached_value_seconds: the time of a
    narrow key's or value's element. What is narrow is converted before it is multiplied, which takes longer than
    reading it.
    """

    kernel_seconds: float
    value_seconds: Mapping[str, float]
    value_row_seconds: Mapping[str, float]
    cached_value_seconds: Mapping[str, float]


class GpuProducts(TypedDict):
    """Content of data/gpu_products.json, by chip.

    dequantised_value_seconds: the time for a value of a frozen weight, by format: what a train step of an H200 took
    longer with an nf4 base (`benchmarks/gpu_train_step.py`, rows lora and qlora), over its values in two passes. It is
    too long now: `quantised.weights.dequantised` then read an array for each value of the table.
    """

    multiprocessors: Mapping[str, int]
    sustained_share: Mapping[str, float]
    fp8_share: Mapping[str, float]
    products: Mapping[str, GpuProduct]
    links: Mapping[str, GpuLinks]
    decode: GpuDecode
    dequantised_value_seconds: Mapping[str, float]


class TpuCycles(TypedDict):
    """A TPU's estimated cycles for matmuls [m, k] @ [k, n] on a grid of sizes, flattened with n innermost."""

    flops_per_cycle: int
    cycles: list[int]


class TpuProducts(TypedDict):
    """Content of data/tpu_products.json: cycles by chip, and the grid's sizes by dim (m, k, n)."""

    chips: Mapping[str, TpuCycles]
    grid: Mapping[str, list[int]]


class BestKernel(TypedDict):
    """The best published rates of attention on a GPU, in TFLOP/s, and the H100 kernel whose curve is scaled to them."""

    kernel: str
    forward: float
    backward: float


class Attention(TypedDict):
    """Content of data/attention.json: the rates of attention on GPUs.

    curves: TFLOP/s on H100 at each length of `seq_lens`, by kernel, head size and pass. best: by the first letters of a
    chip's name.
    """

    seq_lens: list[int]
    curves: Mapping[str, Mapping[str, Mapping[str, list[float]]]]
    best: Mapping[str, BestKernel]


@cache
def gpu_products() -> GpuProducts:
    """Return constants of GPU matmuls and links, fitted to measured times (`benchmarks/gpu_products.py`)."""
    return _read("gpu_products")


@cache
def tpu_products() -> TpuProducts:
    """Return the cycles of TPU matmuls, as the TPU compiler estimates them (`benchmarks/tpu_products.py`)."""
    return _read("tpu_products")


@cache
def tpu_layer_shares() -> Mapping[str, Mapping[str, float]]:
    """Return by chip the speed of a layer's `attention` and of its other ops (`rest`), relative to ops compiled alone.

    The file is written by `benchmarks/tpu_layers.py`.
    """
    return _read("tpu_layers")["chips"]


@cache
def tpu_attention_shares() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Return attention kernels' fractions of peak, by chip, head size and kernel (`benchmarks/tpu_attention.py`)."""
    return _read("tpu_attention")["shares"]


@cache
def gpu_attention() -> Attention:
    """Return the published rates of fused attention kernels on GPUs."""
    return _read("attention")


def _read(name: str) -> Any:
    """Return the content of a data file."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
