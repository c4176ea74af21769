"""`meshwright chips`: every chip in a table, one chip with its sources, a user's own file."""

import json
from pathlib import Path

import pytest

import meshwright.description.hardware
from meshwright.cli.main import main
from meshwright.description.hardware.load import chip_names, load_chip

V5E = Path(meshwright.description.hardware.__file__).parent / "data" / "v5e.toml"


def test_the_table_has_a_line_for_every_chip(capsys):
    assert main(["chips"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1 : len(chip_names()) + 1]} == set(chip_names())
    assert all(len(line) <= 100 for line in lines)


def test_a_line_has_peaks_memory_links_and_the_largest_slice(capsys):
    main(["chips"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("v5p"))
    for figure in ("459 Tflop", "918 Top", "96.0 GB", "2.80 TB/s", "3D torus, 90.0 GB/s", "16x20x28"):
        assert figure in line


@pytest.mark.parametrize("name", chip_names())
def test_one_chip_is_shown_with_the_source_of_every_part(name, capsys):
    assert main(["chips", name]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for source in load_chip(name).sources.values():
        assert " ".join(source.split()) in words


def test_json_has_the_figures_and_their_sources(capsys):
    assert main(["chips", "tpu_v5e", "--json"]) == 0
    (chip,) = json.loads(capsys.readouterr().out)["chips"]
    assert chip["name"] == "v5e"
    assert chip["peak_flops"]["bf16"] == 1.97e14
    assert chip["torus"]["max_slice"] == [16, 16]
    assert set(chip["sources"]) == {"peak_flops", "hbm", "torus", "compiler", "small_ops", "dcn", "host"}


def test_json_without_a_name_has_all_chips(capsys):
    assert main(["chips", "--json"]) == 0
    assert {chip["name"] for chip in json.loads(capsys.readouterr().out)["chips"]} == set(chip_names())


def test_a_users_file_is_shown_with_its_own_figures(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(V5E.read_text().replace('"v5e"', '"mine"').replace("8.2e11", "9.9e11"))
    assert main(["chips", "--hardware", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("mine")
    assert "990 GB/s" in printed


@pytest.mark.parametrize(
    ("words", "said"), [(["chips", "v5q"], "chip 'v5q'"), (["chips", "v5e", "--hardware", "x.toml"], "leave 'v5e' out")]
)
def test_a_mistake_is_told_in_one_line(words, said, capsys):
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
