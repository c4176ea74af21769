"""The data of a chip and its fabric, as read from its TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.description.hardware.dtypes import canonical_dtype
from meshwright.errors import MeshwrightError

MEMORY_HEADROOM = {"tpu": 0.0798, "gpu": 0.0324, "cpu": 0.0}
"""By kind of chip, the 95th percentile of (compiled - predicted) / predicted peak memory of train steps.

From `benchmarks/memory.py`: 21 steps compiled for TPUs and 6 for GPUs. Simulated devices share a machine's memory.
"""


@dataclass(frozen=True, kw_only=True)
class Torus:
    """A network in which a chip is linked to its neighbours along 2 or 3 axes.

    Attributes:
        slices: the shapes of slices, with axes in any order.
        cube: side of a cube: shapes of whole cubes are legal too, and only these wrap, along every axis. None: an axis
            wraps iff it has `wrap_size` chips.
        splits_axes: whether `jax.make_mesh` lets two mesh axes share a physical one.
        core_bytes_per_second: bandwidth between the two devices of a chip.
    """

    link_bytes_per_second: float
    hop_seconds: float
    host: tuple[int, ...]
    max_slice: tuple[int, ...]
    slices: tuple[tuple[int, ...], ...]
    cube: int | None = None
    wrap_size: int | None = None
    splits_axes: bool = False
    core_bytes_per_second: float | None = None

    @property
    def rank(self) -> int:
        """The number of physical axes."""
        return len(self.max_slice)

    @property
    def axis_bytes_per_second(self) -> float:
        """The bandwidth of a ring collective on an axis that wraps: both directions together."""
        return 2 * self.link_bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of a network of switches, which connects `degree` units of the level below.

    link_bytes_per_second: one way, between a unit below and this level. hop_seconds: time to cross the level once.
    """

    name: str
    degree: int
    link_bytes_per_second: float
    hop_seconds: float


@dataclass(frozen=True, kw_only=True)
class Dcn:
    """The data-centre network between slices: one chip's share of the egress, one way, and the time of a hop."""

    bytes_per_second: float
    hop_seconds: float


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The figures of one chip, in decimal units, bandwidths one way.

    Attributes:
        peak_flops: dense matmul flops per second, by canonical dtype.
        hbm_bytes: as sold, for estimates; a program can use `usable_bytes`.
        host_bytes_per_second: between chip and host (PCIe).
        torus, levels: the fabric, one of the two.
        power_share: the power limit over the full power of the die.
        is_shared: whether the figures are a whole machine's, divided among simulated devices.
        cloud_cores: cores per chip in Google Cloud's names: 2 if v5p-512 is 512 TensorCores in 256 chips.
        sources: where figures are from, by table of the TOML file.
    """

    name: str
    title: str
    kind: Literal["tpu", "gpu", "cpu"]
    devices_per_chip: int
    chips_per_host: int
    peak_flops: Mapping[str, float] = field(hash=False)
    hbm_bytes: float
    physical_bytes: float
    runtime_bytes: float
    hbm_bytes_per_second: float
    host_bytes_per_second: float
    torus: Torus | None = None
    levels: tuple[Level, ...] = ()
    dcn: Dcn | None = None
    power_share: float = 1.0
    is_shared: bool = False
    cloud_cores: int = 1
    sources: Mapping[str, str] = field(hash=False)
    file: str | None = field(default=None, compare=False)

    @property
    def usable_bytes(self) -> float:
        """Memory that a program can use: physical bytes less the runtime's own."""
        return self.physical_bytes - self.runtime_bytes

    def peak(self, dtype: str = "bf16") -> float:
        """Return the peak flops per second of matmuls in a dtype. Raises if the chip has none for it."""
        name = canonical_dtype(dtype)
        if name not in self.peak_flops:
            raise MeshwrightError(f"{self.name} has no peak for {name}; it has one for {', '.join(self.peak_flops)}")
        return self.peak_flops[name]
