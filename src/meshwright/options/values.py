"""Parse values of options, given as text or objects: counts, shares, prices, meshes and hardware."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.description.hardware.chip import MEMORY_HEADROOM
from meshwright.description.hardware.system import System, parse_system
from meshwright.description.step.model import largest
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape, parse_mesh
from meshwright.support.field_types import check_value
from meshwright.units import parse_count, parse_number, show_mesh

SystemLike = str | System
"""A system, or its text: `v5p:4x4x4`."""

MeshLike = str | MeshShape | Mapping[str, int]
"""A mesh as text, `1,-1,4,1` or `fsdp=-1,tp=4`, as a shape, or as degrees by axis."""

Count = int | str
"""A whole number, or its text: `4096`, `64k`, `4M`."""


def read_system(
    on: SystemLike, hardware: str | Path | None = None, memory_headroom: float | str | None = None
) -> System:
    """Parse a system and set its memory headroom, the fraction added to predicted memory before it must fit.

    Args:
        on: the system, or its text.
        hardware: a TOML file that describes a custom chip, which `on` may then name.
        memory_headroom: a number or text, 0.1 or "10%"; None for the system's own, or else the default of its chip's
            kind.

    Raises:
        MeshwrightError: the text is not a chip with a slice shape or a device count.
    """
    match on:
        case System():
            pass
        case str():
            on = parse_system(on, hardware_file=hardware)
        case _:
            raise MeshwrightError(
                f"on is {on!r}; it is a chip and a slice shape or a device count, as 'v5p:4x4x4', 'h100:64' or 'cpu:8'"
            )
    if memory_headroom is not None:
        return replace(on, memory_headroom=read_share(memory_headroom))
    usual = MEMORY_HEADROOM[on.chip.kind]
    return on if on.memory_headroom is not None else replace(on, memory_headroom=usual)


def read_share(value: float | str) -> float:
    """Return a share, from 0 to below 1, given as a number or text: 0.1, "0.1" or "10%". Raises for others."""
    text = str(value).strip()
    try:
        share = parse_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except MeshwrightError:
        share = -1.0
    if not 0 <= share < 1:
        raise MeshwrightError(f"memory_headroom is {value!r}; it is a share from 0 to below 1, as 0.1 or 10%")
    return share


def read_mesh(mesh: MeshLike, num_devices: int) -> MeshShape:
    """Return the shape of a mesh of `num_devices` devices, given as text, a mapping or a shape.

    Raises:
        MeshwrightError: the mesh is invalid, or has another number of devices.
    """
    match mesh:
        case MeshShape():
            if mesh.num_devices != num_devices:
                raise MeshwrightError(f"mesh {mesh} has {mesh.num_devices} devices; the hardware has {num_devices}")
            return mesh
        case Mapping():
            text = show_mesh(mesh)
            return parse_mesh(text, num_devices=num_devices)
        case str():
            return parse_mesh(mesh, num_devices=num_devices)
        case _:
            raise MeshwrightError(f"mesh is {mesh!r}; it is text, as 'fsdp=-1,tp=4' or '1,-1,4,1', or a MeshShape")


def read_compared(texts: Sequence[MeshLike], num_devices: int) -> list[MeshShape]:
    """Return the meshes to compare. Raises if there are none or if one is in the list twice."""
    if isinstance(texts, str) or not texts:
        raise MeshwrightError(f"compare is {texts!r}; it is a list of meshes, as ['fsdp=8', 'fsdp=2,tp=4']")
    check_value("compare", texts, Sequence[MeshLike])
    meshes = [read_mesh(text, num_devices) for text in texts]
    for mesh in meshes:
        if meshes.count(mesh) > 1:
            raise MeshwrightError(f"compare has {mesh} twice; leave one out")
    return meshes


def read_count(name: str, value: Count) -> int:
    """Return the whole number that a number or a text is. name: the option, which determines the maximum.

    Raises:
        MeshwrightError: the value is not a whole number from 1 to this maximum.
    """
    try:
        number = parse_count(value) if isinstance(value, str) else operator.index(value)
    except (MeshwrightError, TypeError):
        number = 0
    if number < 1 or isinstance(value, bool):
        raise MeshwrightError(f"{name} is {value!r}; it is a whole number from 1, as 4096, 64k, 128Ki or 4M")
    if number > (most := 10**18 if name.removeprefix("--") == "tokens" else largest(name)):
        raise MeshwrightError(f"{name} is {value!r}; the most is {most:,}")
    return number


MOST_PRICE = 1e9
"""The highest accepted price of a chip-hour."""


def read_price_of(value: float | str, chip: str) -> float:
    """Return the price of an hour of `chip`, from one price or from `h100=2.5,v5e=1.2`. Raises if the chip has none."""
    if isinstance(value, str) and "=" in value:
        prices = dict(part.split("=", 1) for part in value.split(",") if "=" in part)
        if chip not in prices:
            raise MeshwrightError(f"price {value!r} has none for {chip}; add {chip}=AMOUNT, as {chip}=4.2")
        return read_price(prices[chip])
    return read_price(value)


def read_price(value: float | str) -> float:
    """Return the price of a chip-hour, from 0 to `MOST_PRICE`, given as a number or text. Raises for others."""
    try:
        price = parse_number(str(value))
    except MeshwrightError:
        price = -1.0
    if not 0 <= price <= MOST_PRICE:
        raise MeshwrightError(f"price {value!r} is not an amount; it is what a chip costs an hour, as 4.2")
    return price
