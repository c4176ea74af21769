"""Load chips from TOML files, the project's own or a user's, and check every field."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

from meshwright.description.hardware.chip import Chip, Dcn, Level, SliceForm, SmallOps, Torus
from meshwright.description.hardware.dtypes import canonical_dtype
from meshwright.description.hardware.table import Table, read_toml
from meshwright.errors import MeshwrightError, did_you_mean, near_names

DATA = Path(__file__).parent / "data"


def chips() -> tuple[Chip, ...]:
    """Return every known chip: TPUs, GPUs, then simulated CPU devices, each kind sorted by name."""
    found = [_chip_named(name) for name in chip_names()]
    kinds = ("tpu", "gpu", "cpu")
    return tuple(sorted(found, key=lambda chip: (kinds.index(chip.kind), chip.name.replace("tpu", "v"))))


@cache
def chip_names() -> tuple[str, ...]:
    """Return the names of the known chips in alphabetical order, without reading their files."""
    return tuple(sorted(path.stem for path in DATA.glob("*.toml") if path.stem != "aliases"))


def load_chip(name: str) -> Chip:
    """Load a chip by name or alias, in any case: `v5p`, `tpu_v5e`, `v5litepod`, `A100`, `TPU v5 lite`.

    The error for an unknown name suggests the nearest known ones.
    """
    normal = normal_name(name)
    if normal in chip_names():
        return _chip_named(normal)
    if normal in _aliases():
        return _chip_named(_aliases()[normal])
    stem = normal.partition("-")[0] if re.fullmatch(r"v\d+[a-z]*-\d+", normal) else normal  # A Cloud name: v2-8.
    near = near_names(stem.partition(":")[0], [*chip_names(), *_aliases()], cutoff=0.5)
    hint = did_you_mean(_aliases().get(other, other) for other in near)
    raise MeshwrightError(
        f"chip {name!r} is not known; {hint}`meshwright chips` lists them; --hardware FILE (hardware=…) has one of"
        f" your own"
    )


def load_hardware(path: str | Path) -> Chip:
    """Load a chip from a user's TOML file, in the format of the project's own files.

    Raises if the file cannot be read, or a field is missing, unknown or invalid; the message names the file, the field,
    the value and the valid values.
    """
    path = Path(path)
    try:
        data = read_toml(path)
    except OSError as error:
        raise MeshwrightError(f"cannot read hardware file {str(path)!r}: {error.strerror}") from None
    except ValueError as error:  # The file is not UTF-8, or not TOML.
        raise MeshwrightError(f"hardware file {str(path)!r} is not TOML: {error}") from None
    chip = _chip(Table(data, file=path.name))
    if chip.name in (*chip_names(), *_aliases()) and chip != load_chip(chip.name):
        raise MeshwrightError(
            f"{path.name}: name = {chip.name!r} is a chip of meshwright's own with other figures; name yours otherwise"
        )
    return replace(chip, file=str(path.resolve()))


def normal_name(name: str) -> str:
    """Return a chip name in lower case, with `-` for `_` and blanks, without a leading `nvidia` or `tpu`."""
    text = "-".join(name.strip().lower().replace("_", " ").split())
    return text.removeprefix("nvidia-").removeprefix("tpu-")


@cache
def _aliases() -> dict[str, str]:
    """Return a map from each alias, as `normal_name` returns it, to the chip's name."""
    return read_toml(DATA / "aliases.toml")


@cache
def _chip_named(name: str) -> Chip:
    path = DATA / f"{name}.toml"
    return _chip(Table(read_toml(path), file=path.name))


def _chip(table: Table) -> Chip:
    peaks, hbm, host = table.table("peak_flops"), table.table("hbm"), table.table("host")
    torus, dcn, levels = table.table("torus"), table.table("dcn"), table.tables("levels")
    power, compiler, small, kernels = (table.table(name) for name in ("power", "compiler", "small_ops", "kernels"))
    if bool(torus.data) == bool(levels):
        raise table.error("fabric", "must be one of [torus] and [[levels]]")
    chip = Chip(
        name=normal_name(table.text("name")),
        title=table.text("title"),
        kind=table.text("kind", ("tpu", "gpu", "cpu")),
        devices_per_chip=table.whole("devices_per_chip"),
        chips_per_host=table.whole("chips_per_host"),
        is_shared=table.flag("is_shared"),
        cloud_cores=table.whole("cloud_cores", 1),
        peak_flops=_peaks(peaks),
        hbm_bytes=hbm.amount("bytes"),
        physical_bytes=hbm.amount("physical_bytes"),
        runtime_bytes=hbm.number("runtime_bytes"),
        hbm_bytes_per_second=hbm.amount("bytes_per_second"),
        host_bytes_per_second=host.amount("bytes_per_second"),
        torus=_torus(torus, compiler) if torus.data else None,
        levels=tuple(
            Level(
                name=level.text("name"),
                degree=level.whole("degree"),
                link_bytes_per_second=level.amount("link_bytes_per_second"),
                hop_seconds=level.number("hop_seconds"),
            )
            for level in levels
        ),
        dcn=Dcn(bytes_per_second=dcn.amount("bytes_per_second"), hop_seconds=dcn.number("hop_seconds"))
        if dcn.data
        else None,
        small_ops=_small_ops(small) if small.data else None,
        attention_head_dim=kernels.whole("attention_head_dim", 128),
        power_share=_power_share(power) if power.data else 1.0,
        sources={
            part.name: part.text("source")
            for part in (peaks, hbm, power, kernels, torus, compiler, small, dcn, host, *levels)
            if part.data
        },
    )
    if (chip.kind == "tpu") != (chip.torus is not None):
        raise table.error("kind", f"= {chip.kind!r}; TPUs have a [torus], and GPUs and CPUs have [[levels]]")
    # Memory as sold and physical memory differ by GB against GiB, and by the bytes for error correction.
    if not 0.9 <= chip.physical_bytes / chip.hbm_bytes <= 2:
        raise hbm.error("physical_bytes", f"= {chip.physical_bytes:g}; it is about bytes = {chip.hbm_bytes:g}")
    if chip.runtime_bytes >= chip.physical_bytes:
        raise hbm.error("runtime_bytes", f"= {chip.runtime_bytes:g}; it must leave some of physical_bytes")
    for part in (table, peaks, hbm, power, kernels, host, torus, compiler, small, dcn, *levels):
        part.close()
    return chip


def _peaks(table: Table) -> dict[str, float]:
    """Return the peak flops per second of matmuls, by canonical dtype."""
    peaks = {}
    for field in table.data:
        if field != "source":
            try:
                dtype = canonical_dtype(field)
            except MeshwrightError as error:
                raise table.error(field, f"is not a dtype: {error}") from None
            if dtype in peaks:
                raise table.error(field, f"is {dtype}, which is there already; leave one out")
            peaks[dtype] = table.amount(field)
    if not peaks:
        raise table.error("bf16", "is missing; give the peak of at least one dtype")
    return peaks


def _power_share(table: Table) -> float:
    """Return the power limit divided by the full power of the die."""
    limit, full = table.number("limit_watts"), table.number("full_watts")
    if limit > full:
        raise table.error("limit_watts", f"= {limit:g}; it must not be above full_watts = {full:g}")
    return limit / full


def _small_ops(table: Table) -> SmallOps:
    read_ahead = table.number("read_ahead")
    if read_ahead > 1:
        raise table.error("read_ahead", f"= {read_ahead:g}; it is a fraction, at most 1")
    return SmallOps(
        least_seconds=table.number("least_seconds"),
        read_ahead=read_ahead,
        reads_experts_ahead=table.flag("reads_experts_ahead"),
    )


def _torus(table: Table, compiler: Table) -> Torus:
    max_slice = table.sizes("max_slice")
    rank = len(max_slice)
    torus = Torus(
        link_bytes_per_second=table.amount("link_bytes_per_second"),
        hop_seconds=table.number("hop_seconds"),
        host=table.sizes("host", rank=rank),
        max_slice=max_slice,
        slices=table.shapes("slices", rank=rank),
        cube=table.whole("cube", None),
        wrap_size=table.whole("wrap_size", None),
        splits_axes=table.flag("splits_axes"),
        core_bytes_per_second=table.amount("core_bytes_per_second", None),
        summed_scatters=compiler.text("summed_scatters", get_args(SliceForm), None),
        summed_gathers=compiler.text("summed_gathers", get_args(SliceForm), None),
        sums_beside_ops=compiler.flag("sums_beside_ops"),
    )
    if (torus.cube is None) == (torus.wrap_size is None):
        raise table.error("wrap_size", "or cube must be there, one of the two: it says which axes wrap")
    return torus
