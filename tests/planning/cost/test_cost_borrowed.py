"""Chips whose efficiencies are another's say so: in the record's notes, on the screen, and for a chip of one's own."""

from pathlib import Path

import pytest

import meshwright as mw
import meshwright.description.hardware
from meshwright.cli.main import main
from meshwright.description.hardware.system import parse_system
from meshwright.planning.cost.rates.borrowed import borrowed_figures

DATA = Path(meshwright.description.hardware.__file__).parent / "data"


@pytest.mark.parametrize(
    ("on", "figures"),
    [
        ("h100:8", {}),
        ("v5p:2x2x2", {}),
        ("cpu:8", {}),
        ("a100-80gb:8", {"h100": ("attention kernels",)}),
        ("b200:8", {"h100": ("products", "collectives in a node", "attention kernels")}),
        ("gb200-nvl72:8", {"h100": ("products", "collectives in a node", "attention kernels")}),
        ("v3:4x4", {"v5p": ("products", "attention kernels", "ops of a layer together")}),
        ("v4:2x2x2", {}),
        ("tpu7x:2x2x2", {"v5p": ("ops of a layer together",)}),
    ],
)
def test_what_a_chip_borrows_is_known(on, figures):
    assert borrowed_figures(parse_system(on)) == figures


def test_a_record_says_what_is_borrowed_and_the_screen_too(capsys):
    said = "no efficiencies of b200 for products, collectives in a node and attention kernels: those of h100 are taken"
    plan = mw.plan("llama3-8b", on="b200:8", batch=64, mesh="fsdp=8")
    assert any(note.startswith(said) for note in plan.predicted.notes)
    for words in (
        ["llama3-8b", "--batch", "64"],
        ["llama3-8b", "--serve", "decode"],
        ["resnet18", "--batch", "64", "--compiled", "0"],
    ):
        assert main(["plan", *words, "--on", "b200:8"]) == 0
        assert said in " ".join(capsys.readouterr().out.split())


def test_a_chip_of_ones_own_says_so(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text((DATA / "v5p.toml").read_text().replace('name = "v5p"', 'name = "mine"'))
    plan = mw.plan("llama3-8b", on="mine:2x2x2", batch=64, mesh="fsdp=8", hardware=file)
    assert any("those of v5p are taken" in note for note in plan.predicted.notes)
