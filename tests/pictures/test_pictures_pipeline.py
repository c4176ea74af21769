"""The picture of a schedule shows every unit in its slot and every wait."""

import itertools
from xml.etree import ElementTree

import pytest

from meshwright.description.step.passes.schedule import Schedule
from meshwright.errors import MeshwrightError
from meshwright.pictures.answers.pipeline import pipeline
from meshwright.pictures.colours import device_fill
from meshwright.pictures.drawings.pipeline import LENGTHS, textbook_cells

SVG = "{http://www.w3.org/2000/svg}"

GPIPE = """\
  GPipe: 3 microbatches, 2 stages

  stage 0  F0  F1  F2  ·   ·   ·   B2 ──   B1 ──   B0 ──
  stage 1  ·   F0  F1  F2  B2 ──   B1 ──   B0 ──   ·   ·

  time to the right; F0 is microbatch 0 forward, B0 its backward, which takes twice as long
  work: m / (m + p - 1) = 3 / (3 + 2 - 1) = 75.0% of all time; the bubble is the other 25.0%
  the same bubble is (p - 1) / m = 33.3% of the time of work
  a device keeps the inputs of at most 3 of 3 for backward"""

ALTERNATING = """\
  1F1B in lockstep, as meshwright runs it: 4 microbatches, 2 stages

  stage 0  F0  F1  ·   ·   F2  B0 ──   F3  B1 ──   ·   B2 ──   B3 ──
  stage 1  ·   F0  B0 ──   F1  B1 ──   F2  B2 ──   F3  B3 ──   ·   ·

  time to the right; F0 is microbatch 0 forward, B0 its backward, which takes twice as long
  work: m / (m + p - 1) = 4 / (4 + 2 - 1) = 80.0% of all time; the bubble is the other 20.0%
  the same bubble is (p - 1) / m = 25.0% of the time of work
  a device keeps the inputs of at most 2 of 4 for backward; GPipe, which takes as long, of all
  of 3 inputs that wait for stage 0's backward, stage 1 stores 1

  1F1B as published: 4 microbatches, 2 stages

  stage 0  F0  F1  ·   ·   B0 ──   F2  B1 ──   F3  B2 ──   ·   B3 ──
  stage 1  ·   F0  B0 ──   F1  B1 ──   F2  B2 ──   F3  B3 ──   ·   ·

  each stage begins as soon as its input is there, and prefers a backward to another forward
    (arXiv:2104.04473)
  as long as in lockstep: (m + p - 1) (1 + 2) = 15 times a forward"""


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (pipeline(2, 3, schedule="gpipe"), GPIPE),
        (pipeline(2, 4), ALTERNATING),
    ],
)
def test_a_schedule_is_time_across_and_stages_down(found, text):
    assert str(found) == str(found.picture) == text


def test_chunks_have_letters_and_what_is_long_goes_on_below():
    picture = pipeline(4, 8, virtual_stages=2)
    lines = str(picture).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("  stage 3") for line in lines) == 4
    assert "B7b" in str(picture)


@pytest.mark.parametrize(
    ("layers", "virtual_stages", "rows"),
    [
        (5, 1, ["stage 0 (0-2)", "stage 1 (3-4)"]),
        (6, 2, ["stage 0 (0-1, 4)", "stage 1 (2-3, 5)"]),
    ],
)
def test_each_stage_has_its_layers_beside_it(layers, virtual_stages, rows):
    picture = pipeline(2, 2, virtual_stages=virtual_stages, schedule="gpipe", layers=layers)
    assert [line.split(")")[0].strip() + ")" for line in str(picture).splitlines() if "stage " in line[:9]] == rows


def test_the_svg_says_what_each_cell_is():
    svg = pipeline(2, 2, virtual_stages=2).svg()
    assert "microbatch 1 backward in chunk 1" in svg
    assert svg.count("waits") == 2 * (1 + 2)


def test_a_schedule_too_long_to_draw_is_refused_at_once():
    with pytest.raises(MeshwrightError, match="100,000,000, too many to draw"):
        str(pipeline(1_000, 100_000))


def test_a_long_schedule_leaves_its_middle_out():
    text = str(pipeline(16, 64))
    assert len(text.splitlines()) < 2 * 80
    assert "left out" in text
    assert "B63" in text


def test_a_backward_is_twice_as_wide_because_it_takes_twice_as_long():
    root = ElementTree.fromstring(pipeline(2, 12).svg())
    widths = {"forward": set(), "backward": set()}
    for group in root.iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is not None and title.text.startswith("microbatch"):
            widths[title.text.split()[2]].add(float(rect.get("width")))
    (forward,), (backward,) = widths.values()
    assert backward == pytest.approx(2 * forward, rel=1e-3)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (3, 3), (4, 8), (4, 2), (5, 13)])
def test_1f1b_as_published_takes_as_long_as_in_lockstep_and_keeps_its_order(stages, microbatches):
    works = textbook_cells(Schedule(stages=stages, microbatches=microbatches))
    ends = {(w.stage, w.microbatch, w.phase): start + LENGTHS[w.phase] for w, start in works}
    assert len(ends) == len(works) == 2 * stages * microbatches
    assert max(ends.values()) == 3 * (microbatches + stages - 1)
    for work, start in works:
        before = work.stage - 1 if work.phase == "forward" else work.stage + 1
        assert start >= ends.get((before, work.microbatch, work.phase), 0)
        assert work.phase == "forward" or start >= ends[work.stage, work.microbatch, "forward"]
    for stage in range(stages):
        mine = sorted((start, start + LENGTHS[work.phase]) for work, start in works if work.stage == stage)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(mine))
        kept = [
            sum(ends[stage, m, "forward"] <= at < ends[stage, m, "backward"] for m in range(microbatches))
            for at, _ in mine
        ]
        assert max(kept) <= stages - stage


def test_the_bubble_is_a_share_of_all_time_and_of_work():
    found = pipeline(4, 8)
    assert (found.efficiency, found.idle_share, found.bubble) == pytest.approx((8 / 11, 3 / 11, 3 / 8))
    assert pipeline(4, 8, virtual_stages=2).efficiency == pytest.approx(8 / (8 + 3 / 2))
    assert "m / (m + (p - 1) / v) = 8 / (8 + 3 / 2) = 84.2% of all time" in str(pipeline(4, 8, virtual_stages=2))


def test_a_stage_has_the_colour_of_its_device():
    svg = pipeline(2, 2).svg()
    assert all(device_fill({"pp": stage}, {"pp": 2}) in svg for stage in range(2))
