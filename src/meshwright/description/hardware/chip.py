"""The data of a chip and its network, as read from its TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.description.hardware.dtypes import canonical_dtype
from meshwright.errors import MeshwrightError

SliceForm = Literal["square", "solid", "wrapped"]
"""Forms of a slice: square, of at least 4 x 4 chips; longer than 1 along all three axes; closed along every axis."""

MEMORY_HEADROOM = {"tpu": 0.0581, "gpu": 0.0324, "cpu": 0.0}
"""By kind of chip, the 95th percentile of (compiled - predicted) / predicted peak memory of train steps.

From `benchmarks/memory.py`: 21 steps compiled for TPUs and 6 for GPUs. It is 0 for simulated CPU devices, which share
one machine's memory.
"""


@dataclass(frozen=True, kw_only=True)
class Torus:
    """A network in which a chip is linked to its neighbours along 2 or 3 axes.

    Attributes:
        link_bytes_per_second: bandwidth of one link, one way.
        hop_seconds: latency of one link.
        host: number of chips of one host along each axis.
        max_slice: the largest slice (the full pod).
        slices: the legal shapes of slices, with axes in any order.
        cube: side of a cube of chips. Slices of whole cubes are legal too; they wrap along every axis, and no other
            slice does. None: an axis wraps iff it has `wrap_size` chips.
        splits_axes: whether `jax.make_mesh` lets two mesh axes share a physical one.
        core_bytes_per_second: bandwidth between the two devices of a chip; None: that of a link.
        summed_scatters: the slices over whose chips, all together, the compiler runs a reduce-scatter as an all-reduce.
        summed_gathers: the same for all-gathers, which become all-reduces of shards in zeros.
        sums_beside_ops: whether ops run beside these all-reduces.
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
    summed_scatters: SliceForm | None = None
    summed_gathers: SliceForm | None = None
    sums_beside_ops: bool = False

    @property
    def rank(self) -> int:
        """The number of physical axes."""
        return len(self.max_slice)

    @property
    def axis_bytes_per_second(self) -> float:
        """The bandwidth of a ring collective on an axis that wraps: both directions together."""
        return 2 * self.link_bytes_per_second


@dataclass(frozen=True, kw_only=True)
class SmallOps:
    """The compiler's estimates for the ops of a decode step, of which most have little to compute.

    least_seconds: the time of the smallest op. read_ahead: the fraction of the layers' weights whose reading is hidden
    behind such ops. reads_experts_ahead: whether those of experts are among them.
    """

    least_seconds: float
    read_ahead: float
    reads_experts_ahead: bool


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of a network of switches. It connects `degree` units: devices, or groups of the level below.

    link_bytes_per_second: bandwidth between a unit and this level, one way. hop_seconds: latency of one crossing.
    """

    name: str
    degree: int
    link_bytes_per_second: float
    hop_seconds: float


@dataclass(frozen=True, kw_only=True)
class Dcn:
    """The data-centre network between slices: each chip's share of its slice's bandwidth, one way, and the latency."""

    bytes_per_second: float
    hop_seconds: float


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The figures of one chip, in decimal units, bandwidths one way.

    Attributes:
        peak_flops: dense matmul flops per second, by canonical dtype.
        devices_per_chip: JAX devices of one chip.
        hbm_bytes: memory as sold, for estimates; a program can use `usable_bytes`.
        physical_bytes: memory before the runtime takes `runtime_bytes` of it.
        host_bytes_per_second: bandwidth between chip and host (PCIe).
        torus: the network of a TPU; None on switches.
        levels: the levels of a network of switches, innermost first; empty on a torus.
        dcn: the network between slices; None if the chip has none.
        small_ops: what small ops take on a TPU; None if it is not known.
        attention_head_dim: the widest heads of cuDNN's fused attention, in training too.
        power_share: the chip's power limit divided by the full power of its die.
        is_shared: whether the figures are those of a machine that all simulated devices share.
        cloud_cores: cores per chip in Google Cloud's names: 2 if v5p-512 is 512 TensorCores in 256 chips.
        sources: the source of the figures, by table of the TOML file.
        file: the user's TOML file; None for the project's own chips.
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
    small_ops: SmallOps | None = None
    attention_head_dim: int = 128
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
