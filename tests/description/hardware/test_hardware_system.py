import pytest

from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError

# text, as it prints, chips, devices, hosts
SYSTEMS = [
    ("v5p:4x4x4", "v5p:4x4x4", 64, 64, 16),
    ("V5P : 4 X 4 x 4", "v5p:4x4x4", 64, 64, 16),
    ("tpu_v5e:16", "v5e:4x4", 16, 16, 2),
    ("v6e:16x16", "v6e:16x16", 256, 256, 32),
    ("v6e:4x2", "v6e:4x2", 8, 8, 1),
    ("2*v5e:16x16", "2*v5e:16x16", 512, 512, 64),
    ("v5p:128", "v5p:4x4x8", 128, 128, 32),
    ("v5p:4096", "v5p:16x16x16", 4096, 4096, 1024),
    ("v5p:8960", "v5p:16x20x28", 8960, 8960, 2240),
    ("v4:8", "v4:2x2x2", 8, 8, 2),
    ("v4:4", "v4:2x2x1", 4, 4, 1),
    ("v5p:4x2x2", "v5p:4x2x2", 16, 16, 4),
    ("tpu7x:2x2x1", "tpu7x:2x2x1", 4, 8, 1),
    ("v3:8x8", "v3:8x8", 64, 128, 16),
    ("h100:64", "h100:64", 64, 64, 8),
    ("h100:4", "h100:4", 4, 4, 1),
    ("gb200:128", "gb200-nvl72:128", 128, 128, 32),
    ("cpu:8", "cpu:8", 8, 8, 1),
]

# scaling book, tpus: wraparound
WRAPS = [
    ("v5e:4x4", (False, False)),
    ("v5e:8x16", (False, True)),
    ("v5e:16x16", (True, True)),
    ("v6e:8x8", (False, False)),
    ("v5p:2x2x1", (False, False, False)),
    ("v5p:2x2x4", (False, False, False)),
    ("v5p:4x4x4", (True, True, True)),
    ("v5p:4x4x8", (True, True, True)),
    ("v4:12x12x24", (True, True, True)),
    ("tpu7x:4x4x8", (True, True, True)),
    ("h100:16", ()),
]

MISTAKES = [
    ("v5p", "is not a chip and a shape or count, as v5p:4x4x4"),
    ("v5p:", "is not a chip and a shape or count"),
    ("v5p:4x4x", "is not a chip and a shape or count"),
    ("v5p:-4", "is not a chip and a shape or count"),
    ("v5e:0x4", "has a size 0; sizes are whole numbers from 1"),
    ("0*v5e:4x4", "has a size 0"),
    ("v5p:4x4", "v5p:4x4 has 2 axes; a v5p slice has 3: 2x4x4"),
    ("v5e:5x5", "v5e:5x5 is not a slice; slices are 1x1, 2x2, 2x4, .*16x16, axes in any order"),
    ("v5p:4x4x6", "v5p:4x4x6 is not a slice; .* and whole cubes of 4x4x4, up to 8960 chips"),
    ("v6e:32x16", r"has 512 chips; the largest slice is 16x16 = 256, beyond it use several: 2\*v6e:16x16"),
    ("v5e:12", "v5e:12 is not a slice; the nearest have 8 or 16 chips"),
    ("v5p:100", "v5p:100 is not a slice; the nearest have 64 or 128 chips"),
    ("h100:8x8", "h100 takes a number of devices, not slices or shapes: h100:64"),
    ("2*h100:8", "h100 takes a number of devices, not slices or shapes: h100:16"),
    ("h100:13", "h100:13 does not fill its nodes of 8 evenly; use 8 or 16"),
]


@pytest.mark.parametrize(("text", "printed", "chips", "devices", "hosts"), SYSTEMS)
def test_a_system_is_read_and_printed(text, printed, chips, devices, hosts):
    system = parse_system(text)
    assert str(system) == printed
    assert (system.num_chips, system.num_devices, system.num_hosts) == (chips, devices, hosts)
    assert parse_system(str(system)) == system


@pytest.mark.parametrize(("text", "wraps"), WRAPS)
def test_axes_wrap_by_the_rule_of_the_chip(text, wraps):
    assert parse_system(text).wraps == wraps


@pytest.mark.parametrize(("text", "error"), MISTAKES)
def test_a_system_that_is_not_there_is_refused_with_what_is(text, error):
    with pytest.raises(MeshwrightError, match=error):
        parse_system(text)


@pytest.mark.parametrize(
    ("text", "chips", "resized"),
    [
        ("2*v5p:8x8x8", 512, "v5p:8x8x8"),
        ("2*v5p:8x8x8", 2048, "4*v5p:8x8x8"),
        ("2*v5p:8x8x8", 256, "v5p:4x8x8"),
        ("2*v5e:4x4", 40, None),
        ("v5p:4x4x4", 128, "v5p:4x4x8"),
    ],
)
def test_a_system_of_more_or_fewer_chips_has_whole_slices_where_it_can(text, chips, resized):
    system = parse_system(text)
    if resized is None:
        with pytest.raises(MeshwrightError):
            system.resized(chips)
    else:
        assert str(system.resized(chips)) == resized


def test_a_device_of_tpu7x_is_half_a_chip():
    system = parse_system("tpu7x:4x4x4")
    assert system.peak("bf16") == 2.307e15 / 2
    assert system.hbm_bytes == 96e9
    assert system.hbm_bytes_per_second == 3.69e12


def test_simulated_devices_share_one_machine():
    one, eight = parse_system("cpu:1"), parse_system("cpu:8")
    assert eight.peak("f32") * 8 == one.peak("f32")
    assert eight.usable_bytes * 8 == one.usable_bytes
    assert eight.hbm_bytes_per_second * 8 == one.hbm_bytes_per_second


def test_a_v5p_pod_has_the_figures_of_the_scaling_book():
    """tpus, question 2: 8960 chips on 2240 hosts, 4.1e18 flops/s and 860 TB."""
    pod = parse_system("v5p:16x20x28")
    assert pod.num_devices * pod.peak("bf16") == pytest.approx(4.11264e18)
    assert pod.num_devices * pod.hbm_bytes == pytest.approx(860.16e12)


def test_systems_can_be_keys():
    assert len({parse_system("v5e:16"), parse_system("v5e:4x4"), parse_system("v5e:8x8")}) == 2
