"""All shardings of an array on a mesh."""

import pytest

from meshwright.description.notation.array_parser import parse_array
from meshwright.description.notation.legality import Sizes
from meshwright.errors import MeshwrightError
from meshwright.pictures.drawings.arrays import every_sharding
from meshwright.pictures.drawings.holdings import holdings_of
from meshwright.pictures.showing import show

ELEVEN = [
    "A[I, J]",
    "A[I_X, J]",
    "A[I, J_X]",
    "A[I_Y, J]",
    "A[I, J_Y]",
    "A[I_XY, J]",
    "A[I_X, J_Y]",
    "A[I, J_XY]",
    "A[I_YX, J]",
    "A[I_Y, J_X]",
    "A[I, J_YX]",
]


def texts(array, degrees, dims):
    return [str(found) for found in every_sharding(parse_array(array), Sizes(degrees=degrees, dims=dims))]


def test_a_matrix_on_two_axes_has_eleven_shardings():
    assert texts("A[I, J]", {"X": 2, "Y": 2}, {"I": 8, "J": 8}) == ELEVEN


def test_what_is_written_on_the_dims_does_not_matter():
    assert texts("A[I_YX, J]{U_Z}", {"X": 2, "Y": 2, "Z": 1}, {"I": 8, "J": 8}) == ELEVEN


def test_no_two_of_them_lay_the_same_shards_on_the_same_devices():
    sizes = Sizes(degrees={"X": 2, "Y": 4}, dims={"I": 8, "J": 8})
    every = every_sharding(parse_array("A[I, J]"), sizes)
    assert len({tuple(holder.block for holder in holdings_of(array, sizes).holders) for array in every}) == 11


def test_shardings_that_do_not_divide_are_left_out_and_counted():
    sizes = {"I": 8, "J": 2}
    found = texts("A[I, J]", {"X": 2, "Y": 4}, sizes)
    assert found == [text for text in ELEVEN if text not in ("A[I, J_Y]", "A[I, J_XY]", "A[I, J_YX]", "A[I_X, J_Y]")]
    text = str(show("A[I, J]", mesh="X=2,Y=4", dims=sizes, every=True))
    assert "7 shardings of A" in text
    assert "4 more are left out: their degrees do not divide I=8, J=2" in text


@pytest.mark.parametrize(("axes", "count"), [("X=2", 3), ("X=2,Y=2", 11), ("X=2,Y=2,Z=2", 49)])
def test_the_count_is_that_of_ordered_subsets_of_axes_on_two_dims(axes, count):
    # A subset of s axes in one of s! orders, cut at one of s + 1 places into what splits I and what splits J:
    # 1 + 1*2 = 3, 1 + 2*2 + 1*6 = 11, 1 + 3*2 + 3*6 + 1*24 = 49.
    assert f"{count} shardings of A" in str(show("A[I, J]", mesh=axes, dims="I=8,J=8", every=True))


def test_the_gallery_shows_each_with_its_text_and_fits_the_screen():
    lines = str(show("A[I, J]", mesh="X=2,Y=2", dims="I=8,J=8", every=True)).splitlines()
    assert max(map(len, lines)) <= 100
    for text in ELEVEN:
        assert sum(line.count(text) for line in lines) == 1


def test_all_thumbnails_of_a_small_mesh_have_one_size():
    lines = str(show("A[I, J]", mesh="X=2,Y=2", dims="I=8,J=8", every=True)).splitlines()
    tops = [line for line in lines if "┌" in line]
    assert [line.count("┌") for line in tops] == [5, 5, 1]
    assert {len(part) for line in tops for part in line.split()} == {17}


@pytest.mark.parametrize(
    ("array", "mesh", "dims"),
    [
        ("A[I, J, K]", "X=2,Y=2", "I=8,J=8,K=8"),
        ("C[]", "X=2,Y=2", {}),
        ("A[I, J]", "X=2,Y=2,Z=2,W=2", "I=8,J=8"),
    ],
)
def test_only_one_or_two_dims_and_up_to_three_axes_are_drawn(array, mesh, dims):
    with pytest.raises(MeshwrightError, match="arrays of 1 or 2 dims on meshes of up to 3 axes"):
        show(array, mesh=mesh, dims=dims, every=True)
