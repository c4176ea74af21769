"""A user's own TOML file: read like the project's, and refused field by field."""

import pytest

from meshwright.description.hardware.load import DATA, load_chip, load_hardware
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError

V5E = (DATA / "v5e.toml").read_text()
H100 = (DATA / "h100.toml").read_text()

# the file to start from, what to replace, by what, and the error
MISTAKES = [
    (V5E, "bytes = 16e9", 'bytes = "16 GB"', r"mine.toml: \[hbm\] bytes = '16 GB'; it takes a positive number"),
    (V5E, "bytes = 16e9", "bytes = -16e9", r"mine.toml: \[hbm\] bytes = -16000000000.0; it takes a positive number"),
    (V5E, "bytes = 16e9", "bytes = true", r"\[hbm\] bytes = True; it takes a positive number"),
    (V5E, "bytes = 16e9", "bytes = inf", r"\[hbm\] bytes = inf; it takes a positive number"),
    (V5E, "bytes = 16e9", "byts = 16e9", r"mine.toml: \[hbm\] bytes is missing"),
    (V5E, "[hbm]", "[hbm]\nbyte_rate = 1", r"\[hbm\] byte_rate is not a field; "),
    (V5E, "[hbm]", "[hbm]\nbytes_per_secnd = 1", r"bytes_per_secnd is not a field; did you mean bytes_per_second\?"),
    (V5E, 'kind = "tpu"', 'kind = "npu"', r"mine.toml: kind = 'npu'; it takes one of tpu, gpu, cpu"),
    (V5E, 'title = "TPU v5e"', 'title = ""', r"title = ''; it takes a text"),
    (V5E, "devices_per_chip = 1", "devices_per_chip = 1.5", r"devices_per_chip = 1.5; it takes a whole number from 1"),
    (V5E, "devices_per_chip = 1", "devices_per_chip = 0", r"devices_per_chip = 0; it takes a whole number from 1"),
    (V5E, "bf16 =", "bf17 =", r"\[peak_flops\] bf17 is not a dtype"),
    (V5E, "host = [4, 2]", "host = [4, 2, 1]", r"\[torus\] host = \[4, 2, 1\]; it takes 2 numbers, as max_slice has"),
    (V5E, "host = [4, 2]", "host = 8", r"\[torus\] host = 8; it takes whole numbers from 1, such as \[4, 4\]"),
    (V5E, "slices = [[1, 1], ", "slices = [[1], ", r"\[torus\] slices = \[1\]; it takes 2 numbers"),
    (V5E, "wrap_size = 16", "", r"\[torus\] wrap_size or cube must be there, one of the two"),
    (V5E, "splits_axes = true", 'splits_axes = "yes"', r"\[torus\] splits_axes = 'yes'; it takes true or false"),
    (V5E, "read_ahead = 0.75", "read_ahead = 76", r"\[small_ops\] read_ahead = 76; it is a fraction, at most 1"),
    (V5E, '= "square"', '= "round"', r"\[compiler\] summed_scatters = 'round'; it takes one of square, solid, wrapped"),
    (
        H100,
        "[host]",
        "[compiler]\nsource = 'us'\nsummed_gathers = 'wrapped'\n[host]",
        r"\[compiler\] summed_gathers is not a field",
    ),
    (V5E, "runtime_bytes = 268435456", "runtime_bytes = 18e9", r"\[hbm\] runtime_bytes = 1.8e\+10; it must leave"),
    (V5E, "bytes = 16e9", "bytes = 16", r"\[hbm\] bytes = 16; that is a figure in GB or TB"),
    (V5E, "bytes_per_second = 8.2e11", "bytes_per_second = 820", r"\[hbm\] bytes_per_second = 820; that is a figure"),
    (V5E, "bf16 = 1.97e14", "bf16 = 197", r"\[peak_flops\] bf16 = 197; that is a figure in GB or TB"),
    (V5E, "int8 = 3.94e14", "bfloat16 = 3.94e14", r"\[peak_flops\] bfloat16 is bf16, which is there already"),
    (V5E, "int8 =", "f8_exact =", r"\[peak_flops\] f8_exact is not a dtype"),
    (V5E, "int8 =", "float32_extra =", r"\[peak_flops\] float32_extra is not a dtype"),
    (V5E, "= 17179869184", "= 171798691840", r"physical_bytes = 1.71799e\+11; it is about bytes = 1.6e\+10"),
    (V5E, "= 17179869184", "= 8e9", r"physical_bytes = 8e\+09; it is about bytes = 1.6e\+10"),
    (V5E, "bf16 = 1.97e14", "bf16 = 2e14", "name = 'v5e' is a chip of meshwright's own with other figures"),
    (H100, 'name = "h100"', 'name = "a100"', "name = 'a100' is a chip of meshwright's own"),
    (H100, 'kind = "gpu"', 'kind = "tpu"', r"kind = 'tpu'; TPUs have a \[torus\]"),
    (V5E, 'kind = "tpu"', 'kind = "gpu"', r"kind = 'gpu'; TPUs have a \[torus\]"),
    (V5E, "[dcn]", "[dnc]", r"mine.toml: dnc is not a field; did you mean dcn\?"),
    (V5E, "[torus]", "[toruses]", r"fabric must be one of \[torus\] and \[\[levels\]\]"),
    (V5E, 'name = "v5e"', "name = v5e", "mine.toml' is not TOML"),
    (H100, "degree = 8", "degree = 0", r"mine.toml: \[levels.0\] degree = 0; it takes a whole number from 1"),
    (H100, "degree = 32", "", r"\[levels.1\] degree is missing"),
]


@pytest.mark.parametrize(("text", "old", "new", "error"), MISTAKES)
def test_a_mistake_in_a_file_is_told_by_field(tmp_path, text, old, new, error):
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(MeshwrightError, match=error):
        load_hardware(path)


def test_a_missing_source_is_told(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(V5E.rpartition("source")[0])
    with pytest.raises(MeshwrightError, match=r"mine.toml: \[host\] source is missing"):
        load_hardware(path)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(MeshwrightError, match=r"cannot read hardware file .*nowhere\.toml': No such file"):
        load_hardware(tmp_path / "nowhere.toml")


def test_a_file_of_ones_own_is_read_like_the_projects(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(V5E)
    assert load_hardware(path) == load_chip("v5e")


def test_a_system_is_of_the_chip_in_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(H100.replace('name = "h100"', 'name = "Cloud_H100"').replace("4.0e11", "1.0e11"))
    mine = parse_system("cloud-h100:16", hardware_file=path)
    assert str(mine) == "cloud-h100:16"
    assert mine.chip.levels[1].link_bytes_per_second == 1e11
    for other in ("v5e:4", "other:4"):  # The file would change nothing.
        with pytest.raises(MeshwrightError, match=r"mine\.toml describes cloud-h100"):
            parse_system(other, hardware_file=path)
