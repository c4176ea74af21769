"""A mesh on a torus: every chip has the mesh coordinates that JAX gives it."""

import colorsys
import itertools
from dataclasses import dataclass

import pytest
from jax.experimental import mesh_utils

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError
from meshwright.pictures.colours import device_fill
from meshwright.pictures.drawings.torus import device_coordinates, torus_sketch
from meshwright.pictures.showing import Picture, show

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
    """The devices of a slice, as JAX numbers them: x fastest, then y and z; the devices of a chip together."""
    x, y, z = (*shape, 1)[:3]
    chips = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    return [Device(n, c, core, kind) for n, (c, core) in enumerate(itertools.product(chips, range(cores)))]


def degrees_of(product):
    """Every way to write a product as three degrees, outermost first."""
    divisors = [d for d in range(1, product + 1) if product % d == 0]
    return [(a, b, product // a // b) for a in divisors for b in divisors if product // a % b == 0]


@pytest.mark.parametrize(
    ("name", "kind", "cores"),
    [
        ("v4:4x4x4", "TPU v4", 1),
        ("v5p:2x4x4", "TPU v5p", 1),
        ("v5p:2x2x2", "TPU v5p", 1),
        ("v5p:2x2x1", "TPU v5p", 1),
        ("v5e:2x2", "TPU v5 lite", 1),
        ("v5e:2x4", "TPU v5 lite", 1),
        ("v5e:4x2", "TPU v5 lite", 1),
        ("v5e:4x4", "TPU v5 lite", 1),
        ("v5e:8x16", "TPU v5 lite", 1),
        ("v6e:2x4", "TPU v6 lite", 1),
        ("v6e:4x4", "TPU v6 lite", 1),
        ("v6e:16x16", "TPU v6 lite", 1),
        ("tpu7x:2x2x1", "TPU7x", 2),
        ("tpu7x:2x2x2", "TPU7x", 2),
        ("tpu7x:2x2x4", "TPU7x", 2),
        ("tpu7x:4x4x4", "TPU7x", 2),
        ("v3:2x2", "TPU v3", 2),
        ("v3:4x4", "TPU v3", 2),
    ],
)
def test_each_device_has_the_coordinates_that_jax_gives_it(name, kind, cores):
    system = parse_system(name)
    devices = described_devices(system.shape, kind, cores)
    for degrees in degrees_of(system.num_devices):
        # JAX refuses the split of a physical axis unless it is allowed; the layout is then the same.
        mesh = mesh_utils.create_device_mesh(degrees, devices, allow_split_physical_axes=True)
        expected = {
            (0, *device.coords, device.core_on_chip): dict(zip(AXES, index, strict=True))
            for index in itertools.product(*map(range, degrees))
            for device in [mesh[index]]
        }
        assert device_coordinates(lay_mesh(system, dict(zip(AXES, degrees, strict=True)))) == expected, degrees


def test_over_slices_the_outermost_axis_counts_them_first():
    places = device_coordinates(lay_mesh(parse_system("2*v5e:4x4"), {"dp": 4, "tp": 8}))
    assert {place.slice for place, at in places.items() if at["dp"] < 2} == {0}
    assert {place.slice for place, at in places.items() if at["dp"] >= 2} == {1}
    assert len({tuple(at.values()) for at in places.values()}) == 32


def test_slices_laid_by_hand_are_each_laid_so():
    one = device_coordinates(lay_mesh(parse_system("v5e:2x4"), {"tp": 8}))
    two = device_coordinates(lay_mesh(parse_system("2*v5e:2x4"), {"dp": 2, "tp": 8}))
    assert two == {
        place._replace(slice=number): {"dp": number, **at} for number in range(2) for place, at in one.items()
    }


def test_idle_devices_have_no_coordinates():
    places = device_coordinates(lay_mesh(parse_system("v5p:4x4x4"), {"tp": 16}))
    assert sorted(at["tp"] for at in places.values() if at) == list(range(16))
    assert sum(not at for at in places.values()) == 48


FLAT = """\
  mesh X=16, Y=16 on v6e:16x16

          Y=0    Y=1    Y=2    Y=3    Y=4    Y=5    Y=6    Y=7     …     Y=13   Y=14   Y=15
           ┆      ┆      ┆      ┆      ┆      ┆      ┆      ┆      ┆      ┆      ┆      ┆
  X=0   ╌  0  ──  1  ──  2  ──  3  ──  4  ──  5  ──  6  ──  7  ──  …  ──  13 ──  14 ──  15  ╌
           │      │      │      │      │      │      │      │      │      │      │      │
  X=1   ╌  16 ──  17 ──  18 ──  19 ──  20 ──  21 ──  22 ──  23 ──  …  ──  29 ──  30 ──  31  ╌
"""
OPEN = """\
        Y=0   Y=1   Y=2   Y=3
  X=0    0  ── 1  ── 2  ── 3
          │     │     │     │
  X=1    4  ── 5  ── 6  ── 7
"""


def picture(name, degrees):
    return str(Picture((torus_sketch(parse_system(name), degrees),)))


def test_links_that_wrap_are_dotted_at_both_ends():
    text = picture("v6e:16x16", {"X": 16, "Y": 16})
    assert text.startswith(FLAT)
    assert "dotted links close x, y into rings" in text


def test_the_first_axis_runs_down_and_each_wraps_on_its_own():
    lines = picture("v5e:8x16", {"X": 8, "Y": 16}).splitlines()
    rows = [line for line in lines if line.startswith("  X=")]
    assert len(rows) == 8
    assert all(row.count("╌") == 2 for row in rows)
    assert not any("┆" in line for line in lines)
    assert "  dotted links close y into rings" in lines


def test_a_part_of_a_pod_has_no_links_that_wrap():
    text = picture("v5e:4x4", {"X": 4, "Y": 4})
    assert OPEN in text
    assert "no axis wraps around" in text
    assert "╌" not in text


def test_a_third_axis_makes_planes():
    text = picture("v5p:4x4x4", {"dp": 4, "tp": 16})
    assert [f"z={z} (dp={z})" in text for z in range(5)] == [True] * 4 + [False]
    assert "dp: ICI z: ring of 4" in text
    assert "z from the last plane to the first" in text


def test_a_small_slice_says_that_jax_lays_it_by_hand():
    text = picture("v5e:4x4", {"X": 16})
    assert "JAX lays out by hand" in text
    assert "x=0    0  ── 15 ── 14 ── 13" in text
    assert "x=1    1     6  ── 7     12" in text  # a ring through all, without the links beside it


def test_switches_are_no_torus():
    with pytest.raises(MeshwrightError, match="h100:8 has switches between its devices and no torus to draw"):
        torus_sketch(parse_system("h100:8"), {"X": 8})


def test_of_one_axis_only_its_own_links_are_drawn():
    sketch = torus_sketch(parse_system("v5e:4x4"), {"X": 4, "Y": 4}, axes=("Y",))
    text = str(Picture((sketch,)))
    assert "X=0    0  ── 1  ── 2  ── 3" in text
    assert "│" not in text
    assert "lines are the links of Y; other links are faint" in text
    assert "X:" not in text


def test_chips_between_the_neighbours_of_an_axis_carry_it_too():
    """Y goes 0, 1, 2, 3 in a zigzag, in which 1 and 2 are no neighbours."""
    text = picture("v5e:2x4", {"X": 2, "Y": 4})
    assert "X=0    0:0 ── 1:1\n          │      │\n  X=0    2:2 ── 3:3" in text


def test_a_device_has_one_colour_and_one_number_in_the_array_and_on_the_torus():
    array, torus = show("A[I_X, J_Y]", mesh="X=4,Y=4", dims="I=8,J=8", on="v5e:4x4").sketches
    cells = [{cell.text: cell.fill for row in sketch.panels[0].cells for cell in row} for sketch in (array, torus)]
    assert cells[0] == cells[1]
    assert len(set(cells[0].values())) == 16


def test_what_devices_share_has_their_hue_or_is_grey():
    degrees = {"X": 2, "Y": 4}
    hues = [colorsys.rgb_to_hls(*bytes.fromhex(device_fill(at, degrees)[1:])) for at in (
        {"X": 1, "Y": 0}, {"X": 1, "Y": 3}, {"X": 1}, {"Y": 3}, {"X": 0, "Y": 3})]  # fmt: skip
    (first, light, _), (second, dark, _), (common, middle, _), (_, grey, saturation), (other, _, _) = hues
    assert first == pytest.approx(second, abs=0.01) == pytest.approx(common, abs=0.01)
    assert abs(first - other) > 0.3
    assert light > middle > dark == pytest.approx(grey, abs=2)
    assert saturation == pytest.approx(0, abs=0.01)
