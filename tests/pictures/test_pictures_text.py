"""The pictures as plain text, and what they leave out to fit."""

import io
import re

import pytest
from rich.console import Console

from meshwright.pictures.answers.pipeline import pipeline
from meshwright.pictures.drawings.arrays import device_text
from meshwright.pictures.showing import show, show_ring
from meshwright.units import show_bytes

GRID = f"""\
  W[D_fsdp, F_tp]   [8, 8]   mesh fsdp=2, tp=2

             tp=0      tp=1
         ┌─────────┬─────────┐
  fsdp=0 │    0    │    1    │    device 0 holds W[0:4, 0:4]
         ├─────────┼─────────┤    4 shards, 1 copy of each, {show_bytes(64)} a device
  fsdp=1 │    2    │    3    │
         └─────────┴─────────┘"""

ROW = f"""\
  A[I_YX]   [8]   mesh X=2, Y=2, Z=2

    Y=0,X=0   Y=0,X=1   Y=1,X=0   Y=1,X=1
  ┌─────────┬─────────┬─────────┬─────────┐
  │   0,1   │   4,5   │   2,3   │   6,7   │    device 0 holds A[0:2]
  └─────────┴─────────┴─────────┴─────────┘    4 shards, 2 copies of each, {show_bytes(4)} a device
                                               copied over Z"""

STACK = f"""\
  A[L_Z, I_X, J_Y, K]   [4, 8, 8, 3]   mesh X=2, Y=2, Z=2

  L 0:2 (Z=0)     L 2:4 (Z=1)
       Y=0 Y=1         Y=0 Y=1
      ┌───┬───┐       ┌───┬───┐
  X=0 │ 0 │ 2 │   X=0 │ 1 │ 3 │
      ├───┼───┤       ├───┼───┤
  X=1 │ 4 │ 6 │   X=1 │ 5 │ 7 │
      └───┴───┘       └───┴───┘

  device 0 holds A[0:2, 0:4, 0:4, 0:3]
  8 shards, 1 copy of each, {show_bytes(192)} a device
  not drawn, whole on every device: K (3)"""


def test_a_matrix_is_a_grid():
    assert str(show("W[D_fsdp, F_tp]", mesh="fsdp=2,tp=2", dims="D=8,F=8", dtype="f32")) == GRID


def test_a_vector_is_a_row_and_the_first_axis_of_a_dim_counts_most():
    assert str(show("A[I_YX]", mesh="X=2,Y=2,Z=2", dims="I=8")) == ROW


def test_labels_are_the_coordinates_of_those_that_hold_a_part():
    header = str(show("A[I_XY]", mesh="X=2,Y=3", dims="I=6")).splitlines()[2]
    assert header.split() == ["X=0,Y=0", "X=0,Y=1", "X=0,Y=2", "X=1,Y=0", "X=1,Y=1", "X=1,Y=2"]


def test_higher_ranks_have_a_grid_for_each_part_of_the_leading_dims():
    assert str(show("A[L_Z, I_X, J_Y, K]", mesh="X=2,Y=2,Z=2", dims="L=4,I=8,J=8,K=3")) == STACK


def test_the_last_two_split_dims_are_drawn_whatever_their_place():
    text = str(show("A[I_X, H_Y, K]", mesh="X=2,Y=4", dims="I=8,H=4,K=64"))
    assert "X=1 │" in text
    assert "Y=3" in text
    assert "not drawn, whole on every device: K (64)" in text


def test_an_unreduced_array_says_that_each_device_has_a_part_of_the_sum():
    text = str(show("C[I, K_Y]{U_X}", mesh="X=2,Y=2", dims="I=4,K=4"))
    assert "each device has its part of a sum over X" in text


def test_a_scalar_is_one_cell():
    assert "│   0-3   │    device 0 holds C" in str(show("C[]", mesh="X=2,Y=2", dims={}))


@pytest.mark.parametrize(
    ("array", "mesh", "dims"),
    [
        ("A[I_X, J_Y]", "X=64,Y=64", "I=64,J=64"),
        ("A[I, J_X]", "X=4096", "I=64,J=4096"),
        ("A[L_Z, I_X, J_Y]", "X=16,Y=16,Z=16", "L=16,I=16,J=16"),
        ("A[I_XYZ]", "X=8,Y=8,Z=8", "I=512"),
    ],
)
def test_a_large_mesh_still_fits_a_screen(array, mesh, dims):
    lines = str(show(array, mesh=mesh, dims=dims)).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 120
    assert any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("devices", "text"),
    [((3,), "3"), ((0, 1), "0,1"), ((0, 1, 2, 3), "0-3"), ((0, 2, 4, 6), "0,2,4,6"), (range(0, 32, 2), "0,2,…,30")],
)
def test_device_numbers_in_short(devices, text):
    assert device_text(list(devices)) == text


def printed(*, colour):
    """What rich prints of the grid to a terminal with colours, or to a file."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=colour, color_system="truecolor" if colour else None, width=100)
    console.print(show("W[D_fsdp, F_tp]", mesh="fsdp=2,tp=2", dims="D=8,F=8", dtype="f32"), soft_wrap=True)
    return out.getvalue()


def test_a_file_gets_the_plain_text():
    assert printed(colour=False) == GRID + "\n"


def test_a_terminal_gets_a_colour_for_each_of_the_four_shards_and_the_same_text():
    coloured = printed(colour=True)
    escapes = {part.split("m")[0] for part in coloured.split("\x1b[")[1:]} - {"0"}
    assert len(escapes) == 4
    plain = "".join(part.split("m", 1)[1] if index else part for index, part in enumerate(coloured.split("\x1b[")))
    assert plain == GRID + "\n"


DRAWINGS = {
    "large grid": lambda: show("A[I_X, J_Y]", mesh="X=64,Y=64", dims="I=64,J=64"),
    "long labels": lambda: show("A[I_XY, J]", mesh="X=12,Y=12", dims="I=144,J=8"),
    "gallery": lambda: show("A[I, J]", mesh="X=2,Y=2,Z=2", dims="I=8,J=8", every=True),
    "torus": lambda: show("A[I_X, J]", mesh="X=16,Y=16", dims="I=16,J=8", on="v6e:16x16"),
    "planes": lambda: show("A[I_X, J]", mesh="X=8,Y=64", dims="I=16,J=8", on="v5p:8x8x8"),
    "ring": lambda: show_ring("all-to-all", range(64), degree=8),
    "pipeline": lambda: pipeline(16, 64, layers=126).picture,
}
"""Each is wider than the narrowest screen."""


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_fits_the_screen_without_cutting_a_number(name, width):
    picture = DRAWINGS[name]()
    text = picture.text(width)
    assert max(map(len, text.splitlines())) <= width
    whole, left_out = re.findall(r"\d+", picture.svg()), re.findall(r"… (\d+) left out", text)
    assert set(re.findall(r"\d+", text)) <= {*whole, *left_out}


@pytest.mark.parametrize("name", DRAWINGS)
def test_ascii_has_the_lines_of_unicode_and_keeps_their_columns(name):
    picture = DRAWINGS[name]()
    text, plain = picture.text(100), picture.text(100, is_ascii=True)
    assert plain.isascii()
    for line, ascii_line in zip(text.splitlines(), plain.splitlines(), strict=True):
        bars = [place for place, character in enumerate(line) if character in "│┆"]
        assert {ascii_line[place] for place in bars} <= {"|"}


def test_a_terminal_without_utf_8_gets_ascii():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=out, force_terminal=True, width=80).print(show("A[I_X]", mesh="X=2", dims="I=8"), soft_wrap=True)
    out.flush()
    assert b"+---------+" in out.buffer.getvalue()
