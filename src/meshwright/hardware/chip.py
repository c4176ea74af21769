"""What is known of a chip and the fabric it stands on, as read from its TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.errors import MeshwrightError
from meshwright.hardware.dtypes import canonical_dtype

MEMORY_HEADROOM = {"tpu": 0.104, "gpu": 0.0324, "cpu": 0.0}
"""By kind of chip, how far a compiled peak of memory is above the predicted one: the 95th percentile of train steps.

Of the steps in `benchmarks/memory.py`, 18 compiled for TPUs and 6 for GPUs; simulated devices share a machine's memory.
"""


@dataclass(frozen=True, kw_only=True)
class Torus:
    """A network in which a chip is linked to its neighbours along 2 or 3 axes.

    slices: the shapes one can have, as they are written; the axes may be in any order. Where `cube` is set, every
    shape of whole cubes is legal too, and only those wrap, along every axis; otherwise an axis wraps iff it has
    `wrap_size` chips. splits_axes: `jax.make_mesh` lets two mesh axes share a physical one. core_bytes_per_second:
    between the two devices of a chip.
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
        """Both directions of one axis together: what a collective on a ring, an axis that wraps, can use."""
        return 2 * self.link_bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of a network of switches: it joins `degree` units of the level below.

    link_bytes_per_second: one way, between a unit below and this level; hop_seconds: to cross it once.
    """

    name: str
    degree: int
    link_bytes_per_second: float
    hop_seconds: float


@dataclass(frozen=True, kw_only=True)
class Dcn:
    """The data-centre network between slices: egress of one chip's share, one way, and the time of a hop."""

    bytes_per_second: float
    hop_seconds: float


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The figures of one chip, decimal units, bandwidths one way.

    peak_flops: by canonical dtype, dense. hbm_bytes: as sold, the figure of back-of-the-envelope sums; what a program
    can have is `usable_bytes`. host_bytes_per_second: between chip and host (PCIe). torus or levels: the fabric, one of
    the two. power_share: its power limit, of the power that the die is otherwise sold with. is_shared: the figures are
    a whole machine's, divided among simulated devices. cloud_cores: what Google Cloud's names count of a chip: 2 where
    v5p-512 is 512 TensorCores in 256 chips. sources: by table of the TOML file.
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
        """The memory a program can have: the physical bytes without what the runtime keeps for itself."""
        return self.physical_bytes - self.runtime_bytes

    def peak(self, dtype: str = "bf16") -> float:
        """The operations a second of products in a dtype. Raises where the chip has no figure for it."""
        name = canonical_dtype(dtype)
        if name not in self.peak_flops:
            raise MeshwrightError(f"{self.name} has no peak for {name}; it has one for {', '.join(self.peak_flops)}")
        return self.peak_flops[name]
