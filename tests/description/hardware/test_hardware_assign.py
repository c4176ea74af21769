"""The physical axes a mesh axis takes are those that JAX gives it."""

import itertools
import math
from dataclasses import dataclass

import pytest
from jax.experimental import mesh_utils

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system

AXES = ("dp", "fsdp", "tp")


@dataclass(frozen=True)
class Device:
    """What JAX looks at in a device of a TPU slice."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"


def described_devices(shape, kind, cores):
    """The devices of a slice, as JAX numbers them: x fastest, then y and z; the cores of a chip together."""
    x, y, z = (*shape, 1)[:3]
    chips = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    return [Device(n, c, core, kind) for n, (c, core) in enumerate(itertools.product(chips, range(cores)))]


def degrees_of(product):
    """Every way to write a product as three degrees, outermost first."""
    divisors = [d for d in range(1, product + 1) if product % d == 0]
    return [(a, b, product // a // b) for a in divisors for b in divisors if product // a % b == 0]


def devices_along(layout, axis):
    """The coordinates, with the device of the chip, that one axis of a layout runs over."""
    steps = {dim: [0] for dim in ("x", "y", "z", "core")}
    for piece in layout.factors:
        if piece.axis == axis:
            steps[piece.dim] = [at + piece.stride * i for at in steps[piece.dim] for i in range(piece.size)]
    return set(itertools.product(*steps.values()))


@pytest.mark.parametrize(
    ("system", "kind", "cores"),
    [
        ("v4:4x4x4", "TPU v4", 1),
        ("v5p:4x4x8", "TPU v5p", 1),
        ("v5p:2x4x4", "TPU v5p", 1),
        ("v5e:8x16", "TPU v5e", 1),
        ("v6e:16x16", "TPU v6e", 1),
        ("tpu7x:4x4x4", "TPU7x", 2),
    ],
)
def test_each_mesh_axis_runs_over_the_devices_that_jax_gives_it(system, kind, cores):
    system = parse_system(system)
    devices = described_devices(system.shape, kind, cores)
    for degrees in degrees_of(system.num_devices):
        layout = lay_mesh(system, dict(zip(AXES, degrees, strict=True)))
        try:
            mesh = mesh_utils.create_device_mesh(degrees, devices)
        except NotImplementedError:
            assert layout.is_split, degrees
            mesh = mesh_utils.create_device_mesh(degrees, devices, allow_split_physical_axes=True)
        else:
            assert not layout.is_split, degrees
        for index, axis in enumerate(AXES):
            along = mesh[tuple(slice(None) if i == index else 0 for i in range(3))]
            assert devices_along(layout, axis) == {(*d.coords, d.core_on_chip) for d in along}, (degrees, axis)


def test_the_parts_of_every_layout_make_up_the_mesh_and_the_slice():
    system = parse_system("v5p:8x8x16")
    for degrees in degrees_of(system.num_devices):
        layout = lay_mesh(system, dict(zip(AXES, degrees, strict=True)))
        for axis, degree in zip(AXES, degrees, strict=True):
            assert math.prod(piece.size for piece in layout.factors if piece.axis == axis) == degree
        for dim, size in zip("xyz", system.shape, strict=True):
            assert math.prod(piece.size for piece in layout.factors if piece.dim == dim) == size


@pytest.mark.parametrize(
    ("name", "kind", "cores"),
    [
        ("v5e:4x4", "TPU v5 lite", 1),
        ("v6e:2x2", "TPU v6 lite", 1),
        ("v5p:2x2x2", "TPU v5p", 1),
        ("tpu7x:2x2x2", "TPU7x", 2),
    ],
)
def test_a_ring_laid_by_hand_goes_from_neighbour_to_neighbour_as_jax_lays_it(name, kind, cores):
    """One mesh axis of all devices; the devices of a chip come together."""
    system = parse_system(name)
    layout = lay_mesh(system, {"fsdp": system.num_devices})
    mesh = mesh_utils.create_device_mesh((system.num_devices,), described_devices(system.shape, kind, cores))
    assert [device.id for device in mesh] == list(layout.order)
    chips = [device.coords for device in mesh[::cores]]
    size = 4 if name.startswith("tpu7x") else len(chips)
    for start in range(0, len(chips), size):
        ring = chips[start : start + size]
        hops = [
            sum(abs(a - b) for a, b in zip(here, there, strict=True))
            for here, there in zip(ring, ring[1:] + ring[:1], strict=True)
        ]
        assert hops == [1] * size
