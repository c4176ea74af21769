"""The chips that come with the project: figures of the scaling book (jax-ml.github.io/scaling-book) and of libtpu."""

import subprocess
import sys

import pytest

from meshwright.description.hardware.load import chip_names, chips, load_chip
from meshwright.errors import MeshwrightError

GIB = 2**30

# tpus: table of chips. name, HBM bytes, HBM bytes/s, bf16, int8, link bytes/s one way, max slice, host
BOOK_TPUS = [
    ("tpu_v3", 32e9, 9.0e11, 1.4e14, 1.4e14, 1e11, (32, 32), (4, 2)),
    ("tpu_v4p", 32e9, 1.2e12, 2.75e14, 2.75e14, 4.5e10, (16, 16, 16), (2, 2, 1)),
    ("tpu_v5p", 96e9, 2.8e12, 4.59e14, 9.18e14, 9e10, (16, 20, 28), (2, 2, 1)),
    ("tpu_v5e", 16e9, 8.2e11, 1.97e14, 3.94e14, 4.5e10, (16, 16), (4, 2)),
    ("tpu_v6e", 32e9, 1.6e12, 9.2e14, 1.84e15, 9e10, (16, 16), (4, 2)),
    ("tpu_7x", 192e9, 7.4e12, 2.30e15, 4.61e15, 9e10, (4, 4, 576), (2, 2, 1)),
]
# gpus: summary of GPU specs, and nodes.
# name, HBM bytes, HBM bytes/s, bf16, fp8 or int8, devices a node, egress of a GPU and of a node
BOOK_GPUS = [
    ("a100", 80e9, 2.0e12, 3.1e14, 6.2e14, 8, 300e9, 200e9),
    ("h100", 80e9, 3.4e12, 9.9e14, 2.0e15, 8, 450e9, 400e9),
    ("h200", 141e9, 4.8e12, 9.9e14, 2.0e15, 8, 450e9, 400e9),
    ("b200", 192e9, 8.0e12, 2.3e15, 4.5e15, 8, 900e9, 400e9),
    ("gb200_nvl72", 192e9, 8.0e12, 2.3e15, 4.5e15, 72, 900e9, 3600e9),
]
# What libtpu 0.0.42.1 calls available when it refuses a program for its memory, GiB a device.
LIBTPU_GIB = {"v3": 15.48, "v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}

ALIASES = [
    ("TPU_V5E", "v5e"),
    ("v5litepod", "v5e"),
    ("TPU v5 lite", "v5e"),  # jax.Device.device_kind
    ("TPU v5", "v5p"),
    ("TPU v6 lite", "v6e"),
    ("TPU7x", "tpu7x"),
    ("v7x", "tpu7x"),
    ("Ironwood", "tpu7x"),
    ("a100", "a100-80gb"),
    ("H100", "h100"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("gb200", "gb200-nvl72"),
]


def test_every_chip_that_is_promised_is_there():
    tpus = ["v3", "v4", "v5e", "v5p", "v6e", "tpu7x"]
    gpus = ["a100-40gb", "a100-80gb", "b200", "gb200-nvl72", "gb300-nvl72", "h100", "h100-96gb-500w", "h200"]
    assert [chip.name for chip in chips()] == [*tpus, *gpus, "cpu"]
    assert sorted(chip_names()) == sorted([*tpus, *gpus, "cpu"])


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.name)
def test_every_table_of_a_chip_names_its_source(chip):
    tables = {"peak_flops", "hbm", "host", *({"torus", "dcn"} if chip.torus else ())}
    tables |= {"power"} if chip.power_share < 1 else set()
    tables |= {"kernels"} if chip.attention_head_dim > 128 else set()
    tables |= {"compiler"} if chip.torus and (chip.torus.summed_scatters or chip.torus.summed_gathers) else set()
    tables |= {"small_ops"} if chip.small_ops else set()
    tables |= {f"levels.{index}" for index in range(len(chip.levels))}
    assert set(chip.sources) == tables
    assert all(len(source) > 10 for source in chip.sources.values())


@pytest.mark.parametrize(("name", "hbm", "hbm_rate", "bf16", "int8", "link", "pod", "host"), BOOK_TPUS)
def test_a_tpu_has_the_figures_of_the_scaling_book(name, hbm, hbm_rate, bf16, int8, link, pod, host):
    chip = load_chip(name)
    assert chip.torus is not None
    assert chip.hbm_bytes == hbm
    assert chip.hbm_bytes_per_second == pytest.approx(hbm_rate, rel=0.01)
    assert chip.peak("bf16") == pytest.approx(bf16, rel=0.01)
    assert chip.peak("int8") == pytest.approx(int8, rel=0.01)
    assert chip.torus.link_bytes_per_second == link
    assert chip.torus.axis_bytes_per_second == 2 * link
    assert (chip.torus.max_slice, chip.torus.host) == (pod, host)


@pytest.mark.parametrize(
    ("name", "hbm", "hbm_rate", "bf16", "eight_bit", "node", "gpu_egress", "node_egress"), BOOK_GPUS
)
def test_a_gpu_has_the_figures_of_the_scaling_book(name, hbm, hbm_rate, bf16, eight_bit, node, gpu_egress, node_egress):
    chip = load_chip(name)
    assert chip.hbm_bytes == hbm
    assert chip.hbm_bytes_per_second == pytest.approx(hbm_rate, rel=0.03)
    assert chip.peak("bf16") == pytest.approx(bf16, rel=0.03)
    assert chip.peak("int8") == pytest.approx(eight_bit, rel=0.03)
    levels = [(level.name, level.link_bytes_per_second) for level in chip.levels]
    assert levels[:2] == [("node", gpu_egress), ("leaf", node_egress)]
    assert chip.levels[0].degree == node


@pytest.mark.parametrize(("name", "gib"), LIBTPU_GIB.items())
def test_a_program_can_have_what_libtpu_gives_it(name, gib):
    chip = load_chip(name)
    assert chip.usable_bytes / chip.devices_per_chip / GIB == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.name)
def test_no_chip_gives_a_program_all_of_its_memory(chip):
    assert 0.8 * chip.hbm_bytes < chip.usable_bytes < chip.physical_bytes


def test_v6e_multiplies_918_teraflops_over_180_gigabytes_a_second():
    chip = load_chip("v6e")
    assert chip.torus is not None
    assert chip.peak("bf16") / chip.torus.axis_bytes_per_second == 5100


def test_the_fat_tree_of_h100_gives_400_gigabytes_a_second_a_node_at_every_level():
    """Scaling book, gpus: 12.8 TB/s out of a scalable unit of 32 nodes."""
    leaf, spine = load_chip("h100").levels[1:]
    assert spine.link_bytes_per_second == 12.8e12 == leaf.degree * leaf.link_bytes_per_second


@pytest.mark.parametrize(("alias", "name"), ALIASES)
def test_a_chip_answers_to_its_other_names(alias, name):
    assert load_chip(alias).name == name


def test_an_unknown_chip_is_refused_with_the_nearest():
    with pytest.raises(
        MeshwrightError, match=r"chip 'v5q' is not known; did you mean v5[ep].*\? `meshwright chips` lists"
    ):
        load_chip("v5q")
    with pytest.raises(MeshwrightError, match="did you mean h100"):
        load_chip("h1000")


@pytest.mark.parametrize("name", ["aliases", "../data/v5e", "data/v5e", "v5e.toml", ""])
def test_a_name_is_not_a_path(name):
    with pytest.raises(MeshwrightError, match="is not known"):
        load_chip(name)


def test_a_dtype_without_a_peak_is_refused_with_those_that_have_one():
    with pytest.raises(MeshwrightError, match="v5e has no peak for fp8; it has one for bf16, f32, int8"):
        load_chip("v5e").peak("float8_e4m3fn")


def test_chips_can_be_keys():
    assert len({load_chip("v5e"), load_chip("tpu_v5e"), load_chip("v5p")}) == 2


def test_chips_are_read_without_jax_or_numpy():
    code = (
        "import sys; from meshwright.description.hardware.load import chips; chips();"
        " print({'jax', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
