"""The fraction of peak flops that a device reaches in a matmul, by the matmul's size.

GPUs: a model of tiles and waves with five constants per chip, fitted to measured times (`benchmarks/gpu_products.py`,
data/gpu_products.json). TPUs: the estimates of the TPU compiler itself, interpolated between sizes
(`benchmarks/tpu_products.py`, data/tpu_products.json). Simulated devices: the roofline.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.rates.data_files import gpu_products, tpu_layer_shares, tpu_products
from meshwright.planning.cost.roofline import matmul_bytes

TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (64, 64))
SPLITS = (1, 2, 4)
"""Tiles and splits that a GPU library chooses from.

A tile is the part of the result that a multiprocessor computes. A split divides the contraction if tiles alone would
not occupy all multiprocessors.
"""

_OVERLAP = 4
"""Order of the norm that combines compute time and memory time: they overlap, but not fully if both are long."""


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """Parameters of the model of GPU matmul times, explained in `gpu_product_seconds`."""

    multiprocessors: int
    peak_share: float
    sustained_share: float
    fp8_share: float
    tile_start: float
    tile_reuse: float
    hbm_share: float
    launch_seconds: float


@lru_cache(maxsize=1 << 16)
def product_efficiency(
    system: System, m: float, k: float, n: float, *, dtype: str = "bf16", moved_bytes: float | None = None
) -> float:
    """Return the fraction of peak, 0 to 1, of a local matmul [m, k] @ [k, n] on one device.

    It is never above the roofline of compute and memory. GPUs and TPUs without figures of their own use those of a
    related chip (`gpu_figures`, `_tpu_table`). A TPU's estimates are for bf16; other dtypes use the same fraction of
    their own peak within their roofline.

    moved_bytes: traffic to and from memory, for convolutions; by default each operand and the result once.

    Raises:
        MeshwrightError: a dim is empty.
    """
    if min(m, k, n) < 1:
        raise MeshwrightError(
            f"a product of [{m}, {k}] and [{k}, {n}] has an empty dim; sizes are whole numbers from 1"
        )
    flops_seconds = 2 * m * k * n / system.peak(dtype)
    if moved_bytes is None:
        moved_bytes = matmul_bytes(m, k, n, weight_dtype=dtype, activation_dtype=dtype)
    if system.chip.kind == "gpu":
        figures = gpu_figures(system.chip.name)
        seconds = gpu_product_seconds(figures, system, m, k, n, dtype=dtype, moved_bytes=moved_bytes)
        return min(1.0, flops_seconds / seconds)
    roofline = min(1.0, flops_seconds * system.hbm_bytes_per_second / moved_bytes)
    if system.chip.kind == "cpu":
        return roofline
    return min(roofline, _tpu_table(system.chip.name).share(m, k, n))


def gpu_product_seconds(
    figures: GpuFigures,
    system: System,
    m: float,
    k: float,
    n: float,
    *,
    dtype: str = "bf16",
    moved_bytes: float | None = None,
) -> float:
    """Return the seconds of a matmul [m, k] @ [k, n] on a GPU, with the tile and split that the model finds fastest.

    A multiprocessor computes one tile after the other, so the time is a whole number of waves of tiles
    (docs.nvidia.com/deeplearning/performance, matrix multiplication background). The constants in `figures` are:

    - peak_share: fraction of peak flops in a short measurement, times sustained_share if many matmuls follow each
      other, times fp8_share in fp8, times the chip's `power_share` under a power limit. A B200 at 750 of 1000 W reaches
      0.77 of its rate (8,192^3, cuBLAS: github.com/facebookexperimental/triton/pull/854,
      github.com/pytorch/ao/pull/2427), a GB300 at 500 of 1400 W 0.28 to 0.39 (triton/pull/2023).
    - tile_start: starting a tile costs as much time as this many elements of the contraction.
    - tile_reuse: small tiles reuse operands less. The rate of a tile [a, b] is r / (r + tile_reuse) with
      r = a b / (a + b), relative to the largest tile.
    - hbm_share: fraction of the memory bandwidth that is reached.
    - launch_seconds: time to launch the kernel, which is added.
    """
    share = figures.peak_share * figures.sustained_share * system.chip.power_share
    share *= figures.fp8_share if dtype == "fp8" else 1.0
    rate = system.peak(dtype) * share / figures.multiprocessors
    bandwidth = system.hbm_bytes_per_second * figures.hbm_share
    if moved_bytes is None:
        moved_bytes = matmul_bytes(m, k, n, weight_dtype=dtype, activation_dtype=dtype)
    best = math.inf
    for split in SPLITS:
        # The partial results of a split contraction are written and read back as float32.
        memory = ((moved_bytes + (8 * m * n * split if split > 1 else 0)) / bandwidth) ** _OVERLAP
        depth = k / split + figures.tile_start
        for (rows, columns), reuse in _tile_reuse(figures.tile_reuse):
            waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * split / figures.multiprocessors)
            products = waves * 2 * rows * columns * depth / (rate * reuse)
            best = min(best, products**_OVERLAP + memory)
    return figures.launch_seconds + best ** (1 / _OVERLAP)


@cache
def _tile_reuse(half: float) -> tuple[tuple[tuple[int, int], float], ...]:
    """Return each tile (rows, columns) with its rate, relative to the largest tile; half: `GpuFigures.tile_reuse`."""
    reuse = [a * b / (a + b) for a, b in TILES]
    most = max(reuse) / (max(reuse) + half)
    return tuple((tile, r / (r + half) / most) for tile, r in zip(TILES, reuse, strict=True))


@cache
def launch_seconds(system: System) -> float:
    """Return the seconds of launching a matmul, a lower bound of its time on a GPU; 0 on other chips."""
    return gpu_figures(system.chip.name).launch_seconds if system.chip.kind == "gpu" else 0.0


def small_kernel_seconds(system: System) -> float:
    """Return the time of a kernel with little to compute, in a program that a GPU runs as a whole; 0 on other chips.

    It is that of an H200 for all GPUs (`GpuDecode`).
    """
    return gpu_products()["decode"]["kernel_seconds"] if system.chip.kind == "gpu" else 0.0


def gpu_figures(name: str) -> GpuFigures:
    """Return the constants of a GPU by name. Constants that were not measured are those of a related GPU."""
    data = gpu_products()
    return GpuFigures(
        multiprocessors=data["multiprocessors"].get(name, data["multiprocessors"]["h100"]),
        sustained_share=data["sustained_share"].get(name, data["sustained_share"]["h100"]),
        fp8_share=data["fp8_share"].get(name, data["fp8_share"]["h100"]),
        **data["products"][related_gpu(name)],
    )


def related_gpu(name: str) -> str:
    """Return the GPU whose measured constants (data/gpu_products.json) are used for a GPU.

    It is the A100 for all A100s, and the H100 for all other GPUs.
    """
    return "a100-80gb" if name.startswith("a100") else "h100"


@dataclass(frozen=True)
class _Table:
    """Fractions of peak flops for matmuls [m, k] @ [k, n] on a grid of sizes.

    sizes: the grid's sizes of m, k and n. logs: their logarithms. log_odds: log(f / (1 - f)) of each fraction f, with n
    innermost.
    """

    logs: tuple[tuple[float, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    log_odds: tuple[float, ...]

    def share(self, m: float, k: float, n: float) -> float:
        """Return the fraction of peak at a size, by interpolating log-odds linearly in the logarithms of sizes.

        A small fraction is then proportional to the size, and a large one approaches 1. Below the grid a matmul takes
        as long as at the grid's edge, because arrays are padded; above the grid the fraction is that of the edge.
        """
        padding, corners = 1.0, [(0, 1.0)]
        for size, sizes, logs in zip((m, k, n), self.sizes, self.logs, strict=True):
            padding *= min(1.0, size / sizes[0])
            size = min(max(size, sizes[0]), sizes[-1])
            low = min(bisect_right(sizes, size), len(sizes) - 1) - 1
            part = (math.log(size) - logs[low]) / (logs[low + 1] - logs[low])
            corners = [
                (index * len(sizes) + low + step, weight * share)
                for index, weight in corners
                for step, share in ((0, 1 - part), (1, part))
                if share
            ]
        odds = math.exp(math.fsum(weight * self.log_odds[index] for index, weight in corners))
        return padding * odds / (1 + odds)


@cache
def _tpu_table(name: str) -> _Table:
    """Return the fractions of peak of a TPU by name; TPUs without a table (v3, custom chips) use v5p's."""
    data = tpu_products()
    chip = data["chips"].get(name, data["chips"]["v5p"])
    sizes = tuple(tuple(data["grid"][dim]) for dim in "mkn")
    flops = (2 * m * k * n for m in sizes[0] for k in sizes[1] for n in sizes[2])
    shares = [f / (cycles * chip["flops_per_cycle"]) for f, cycles in zip(flops, chip["cycles"], strict=True)]
    logs = tuple(tuple(map(math.log, axis)) for axis in sizes)
    return _Table(logs, sizes, tuple(math.log(share / (1 - share)) for share in shares))


@cache
def layer_shares(system: System) -> Mapping[str, float]:
    """Return the speed of ops inside a compiled layer, relative to the same ops compiled alone.

    Keys: `attention`, for attention that writes its scores to memory, and `rest`, for all other ops. On TPUs the values
    are the compiler's estimates for a layer of Llama 2 (`benchmarks/tpu_layers.py`), where norms and reductions are
    fused into matmul kernels and weights are copied to other layouts. On other chips both are 1: kernels run one by
    one. The matmuls of a traced function take the value of `rest`.
    """
    if system.chip.kind != "tpu":
        return {"attention": 1.0, "rest": 1.0}
    chips = tpu_layer_shares()
    return chips.get(system.chip.name, chips["v5p"])
