"""Run a collective on JAX's devices with small numbers, and draw the values before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.pictures.colours import device_fill
from meshwright.pictures.panels import Cell, Panel, Sketch
from meshwright.record import KINDS, Kind

Values = tuple[int, ...]

DIGITS: Values = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 1, 2)
"""The array of MinText's tutorial 1 (github.com/sshkhr/MinText): four numbers on each of four devices."""


def small_values(degree: int) -> Values:
    """Return small numbers that can be split over `degree` devices, and each device's part again over all devices."""
    return DIGITS if len(DIGITS) % degree**2 == 0 else tuple(range(degree**2))


JAX_NAMES: dict[Kind, str] = {
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "all-reduce": "psum",
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
"""Each collective's name in `jax.lax`."""


@dataclass(frozen=True)
class CollectiveRun:
    """The values on each device before and after a collective."""

    kind: Kind
    before: tuple[Values, ...]
    after: tuple[Values, ...]


def run_collective(kind: Kind, values: Sequence[int] = DIGITS, *, degree: int = 4) -> CollectiveRun:
    """Run a collective under `shard_map` on `degree` devices; return their values before and after.

    Values are split evenly over devices; a permute sends each device's part to the next. Raises an error if the values
    cannot be split evenly, or there are too few devices.
    """
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    before = split_values(kind, values, degree)
    devices = jax.devices()[:degree]
    if len(devices) < degree:
        raise MeshwrightError(
            f"{degree} devices are needed, there are {len(devices)}; simulated ones come with"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={degree}, set before JAX starts"
        )
    mesh = jax.make_mesh((degree,), ("X",), devices=devices)
    options: dict[Kind, dict[str, Any]] = {
        "all-reduce": {},
        "all-to-all": {"split_axis": 0, "concat_axis": 0, "tiled": True},
        "collective-permute": {"perm": [(device, (device + 1) % degree) for device in range(degree)]},
    }
    exchange = partial(getattr(jax.lax, JAX_NAMES[kind]), axis_name="X", **options.get(kind, {"tiled": True}))
    body = jax.shard_map(exchange, mesh=mesh, in_specs=P("X"), out_specs=P("X"))
    placed = jax.device_put(np.asarray(values, np.int32), jax.NamedSharding(mesh, P("X")))
    result = jax.jit(body)(placed)
    parts = {shard.device: tuple(np.asarray(shard.data).tolist()) for shard in result.addressable_shards}
    return CollectiveRun(kind, before, tuple(parts[device] for device in mesh.devices))


def split_values(
    kind: Kind, values: Sequence[int], degree: int, *, cut_again: tuple[Kind, ...] = ("reduce-scatter", "all-to-all")
) -> tuple[Values, ...]:
    """Return the values of each of `degree` devices before a collective. Raises if they cannot be split evenly.

    cut_again: the kinds that split the values of each device again over all devices.
    """
    if kind not in KINDS:
        raise MeshwrightError(f"{kind!r} is not a collective; the collectives are {', '.join(KINDS)}")
    if degree < 1:
        raise MeshwrightError(f"a collective runs over 1 device or more, not {degree}")
    unit = degree * degree if kind in cut_again else degree
    if not values or len(values) % unit:
        raise MeshwrightError(
            f"{len(values)} values cannot be cut evenly by {kind} over {degree} devices; give a multiple of {unit}"
        )
    size = len(values) // degree
    return tuple(tuple(values[start : start + size]) for start in range(0, len(values), size))


def neighbour_permute(values: Sequence[int] = DIGITS, *, degree: int = 4) -> CollectiveRun:
    """Return a permute in which each device sends its part to the next, without running it."""
    before = split_values("collective-permute", values, degree)
    return CollectiveRun("collective-permute", before, (*before[-1:], *before[:-1]))


def collective_sketch(exchange: CollectiveRun, members: Mapping[int, str] | None = None) -> Sketch:
    """Draw the values before and after a collective: a row for each device, in the colours of the devices.

    After the collective, values that were moved unchanged have the colour of the device that they come from.

    members: the colour of each device of the group, by its number; by default the group is the whole mesh.
    """
    degree, kind = len(exchange.before), exchange.kind
    members = members or dict(enumerate(ring_fills(degree)))
    fills = tuple(members.values())
    num_parts = degree if kind in ("all-gather", "all-to-all") else 1
    rows = []
    for device, (before, after) in enumerate(zip(exchange.before, exchange.after, strict=True)):
        size = len(after) // num_parts
        row = [Cell(values_text(before), fills[device]), Cell("→")]
        for part in range(num_parts):
            source = (device - 1) % degree if kind == "collective-permute" else part
            text = values_text(after[part * size : (part + 1) * size])
            row.append(Cell(text, None if kind in ("all-reduce", "reduce-scatter") else fills[source]))
        rows.append(tuple(row))
    panel = Panel(
        cells=tuple(rows),
        rows=tuple(f"device {device}" for device in members),
        row_fills=fills,
        columns=("before", " ", "after", *[""] * (num_parts - 1)),
        frame="table",
    )
    return Sketch(title=f"{kind} over {degree} devices   jax.lax.{JAX_NAMES[kind]}", panels=(panel,))


def ring_fills(degree: int) -> tuple[str, ...]:
    """Return the colours of the devices along one mesh axis."""
    return tuple(device_fill({"X": device}, {"X": degree}) for device in range(degree))


def values_text(values: Values) -> str:
    """Return values as text, separated by spaces."""
    return " ".join(map(str, values))
