"""The picture of a schedule shows every unit in its slot and every wait."""

from xml.etree import ElementTree

import pytest

from meshwright.description.step.passes.schedule import Schedule
from meshwright.errors import MeshwrightError
from meshwright.pictures.showing import show_pipeline

GPIPE = """\
  GPipe: 3 microbatches, 2 stages

  stage 0  F0  F1  F2  ·   ·   B2  B1  B0
  stage 1  ·   F0  F1  F2  B2  B1  B0  ·

  time to the right; F0 is microbatch 0 forward, B0 its backward
  idle: 25% of all time; 33% of the time of work, (p - 1) / (v m)
  a device keeps the inputs of at most 3 of 3 for backward"""

ALTERNATING = """\
  1F1B in lockstep: 4 microbatches, 2 stages

  stage 0  F0  F1  ·   F2  B0  F3  B1  ·   B2  B3
  stage 1  ·   F0  B0  F1  B1  F2  B2  F3  B3  ·

  time to the right; F0 is microbatch 0 forward, B0 its backward
  idle: 20% of all time; 25% of the time of work, (p - 1) / (v m)
  a device keeps the inputs of at most 2 of 4 for backward"""


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Schedule(stages=2, microbatches=3, kind="gpipe"), GPIPE),
        (Schedule(stages=2, microbatches=4), ALTERNATING),
    ],
)
def test_a_schedule_is_time_across_and_stages_down(schedule, text):
    assert str(show_pipeline(schedule)) == text


def test_chunks_have_letters_and_what_is_long_goes_on_below():
    picture = show_pipeline(Schedule(stages=4, microbatches=8, virtual_stages=2))
    lines = str(picture).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("  stage 3") for line in lines) == 3
    assert "B7b" in str(picture)


@pytest.mark.parametrize(
    ("layers", "virtual_stages", "rows"),
    [
        (5, 1, ["stage 0 (0-2)", "stage 1 (3-4)"]),
        (6, 2, ["stage 0 (0-1, 4)", "stage 1 (2-3, 5)"]),
    ],
)
def test_each_stage_has_its_layers_beside_it(layers, virtual_stages, rows):
    picture = show_pipeline(Schedule(stages=2, microbatches=2, virtual_stages=virtual_stages), num_layers=layers)
    assert [line.split(")")[0].strip() + ")" for line in str(picture).splitlines() if "stage " in line[:9]] == rows


def test_the_svg_says_what_each_cell_is():
    svg = show_pipeline(Schedule(stages=2, microbatches=2, virtual_stages=2)).svg()
    assert "microbatch 1 backward in chunk 1" in svg
    assert svg.count("waits") == 2 * 2


def test_a_schedule_too_long_to_draw_is_refused_at_once():
    with pytest.raises(MeshwrightError, match="100,000,000, too many to draw"):
        show_pipeline(Schedule(stages=1_000, microbatches=100_000))


def test_a_long_schedule_leaves_its_middle_out():
    text = str(show_pipeline(Schedule(stages=16, microbatches=64)))
    assert len(text.splitlines()) < 80
    assert "left out" in text
    assert "B63" in text


def test_all_slots_are_equally_wide_because_they_take_the_same_time():
    root = ElementTree.fromstring(show_pipeline(Schedule(stages=2, microbatches=12)).svg())
    assert len({rect.get("width") for rect in root.iter("{http://www.w3.org/2000/svg}rect")} - {"100%"}) == 1
