"""`meshwright show pipeline`: the picture of a schedule, its SVG and its data, and mistakes."""

import json
from xml.etree import ElementTree

import pytest

from meshwright.cli.main import main
from meshwright.pictures.answers.pipeline import pipeline

ASKED = ["show", "pipeline", "--stages", "2", "--microbatches", "4"]


def test_the_command_prints_the_picture_and_the_other_schedule(capsys):
    assert main([*ASKED, "--virtual-stages", "2", "--layers", "6"]) == 0
    picture, end = capsys.readouterr().out.rsplit("\n\n", 1)
    assert picture == str(pipeline(2, 4, virtual_stages=2, layers=6))
    said = "--stages 2 --microbatches 4 --virtual-stages 2 --schedule gpipe"
    assert end == f" next   meshwright show pipeline {said}\n"


def test_it_is_also_written_as_svg(tmp_path, capsys):
    path = tmp_path / "pipeline.svg"
    assert main([*ASKED, "--svg", str(path)]) == 0
    assert ElementTree.parse(path).getroot().get("role") == "img"
    assert f"wrote  {path}" in capsys.readouterr().out


def test_json_has_every_unit_of_work_and_the_layers_of_the_slots(capsys):
    assert main([*ASKED, "--json", "--layers", "3"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ticks"], data["bubble"], data["kept"], len(data["cells"])) == (5, 0.25, 2, 2 * 2 * 4)
    assert data["cells"][0] == {"slot": 0, "stage": 0, "microbatch": 0, "chunk": 0, "phase": "forward"}
    assert data["layers"] == [0, 1, 2, None]
    assert data["as_published"][0] == {
        "stage": 0,
        "microbatch": 0,
        "chunk": 0,
        "phase": "forward",
        "start": 0,
        "end": 1,
    }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--stages", "2", "--virtual-stages", "2", "--microbatches", "3"], "groups of pp=2: 3 % 2 = 1"),
        ([*ASKED[2:], "--layers", "1"], "1 layers cannot fill the 2 chunks"),
        (["--stages", "0", "--microbatches", "4"], "a pipeline of 0 stages"),
    ],
)
def test_a_schedule_that_cannot_be_is_one_clear_error(more, message, capsys):
    assert main(["show", "pipeline", *more]) == 2
    assert message in capsys.readouterr().err
