"""The pictures as SVG documents."""

import colorsys
from xml.etree import ElementTree

import pytest

from meshwright.description.hardware.system import parse_system
from meshwright.pictures.colours import NAMED, device_fill
from meshwright.pictures.drawings.torus import torus_sketch
from meshwright.pictures.panels import Cell, Panel, Sketch
from meshwright.pictures.showing import Picture, show, show_ring

SVG = "{http://www.w3.org/2000/svg}"

PICTURES = {
    "grid": lambda: show("A[I_X, J_Y]", mesh="X=2,Y=2", dims="I=8,J=8"),
    "row": lambda: show("A[I_XY]", mesh="X=2,Y=4", dims="I=8"),
    "scalar": lambda: show("C[]", mesh="X=2", dims={}),
    "rank 4": lambda: show("A[L_Z, I_X, J_Y, K]", mesh="X=2,Y=2,Z=2", dims="L=4,I=8,J=8,K=3"),
    "large": lambda: show("A[I_X, J_Y]", mesh="X=128,Y=128", dims="I=128,J=128"),
    "gallery": lambda: show("A[I, J]", mesh="X=2,Y=2", dims="I=8,J=8", every=True),
    "torus": lambda: show("A[I_X, J]", mesh="X=16,Y=16", dims="I=16,J=8", on="v5e:16x16"),
    "planes": lambda: Picture((torus_sketch(parse_system("v5p:8x8x8"), {"dp": 8, "tp": 64}),)),
    "ring": lambda: show_ring("all-to-all"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_valid_xml_with_a_title_and_all_of_it_in_view(name):
    root = ElementTree.fromstring(PICTURES[name]().svg())
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title").text
    width, height = float(root.get("width")), float(root.get("height"))
    for right, bottom in corners(root):
        assert right <= width
        assert bottom <= height


def corners(root):
    """The lower right corner of every rectangle and text."""
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("width") != "100%":
            yield float(rect.get("x")) + float(rect.get("width")), float(rect.get("y")) + float(rect.get("height"))
    for text in root.iter(f"{SVG}text"):
        # 0.6 of the font's size is the advance of a character in the fonts named.
        share = 1.0 if text.get("text-anchor") == "start" else 0.5
        yield float(text.get("x")) + share * 0.6 * 13 * len(text.text), float(text.get("y"))


def test_each_shard_has_its_own_colour_and_says_who_holds_it():
    root = ElementTree.fromstring(show("A[I_X, J_Y]", mesh="X=2,Y=2,Z=2", dims="I=8,J=8").svg())
    cells = {
        group.find(f"{SVG}title").text: group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None
    }
    assert list(cells) == [
        "devices 0,1 hold A[0:4, 0:4]",
        "devices 2,3 hold A[0:4, 4:8]",
        "devices 4,5 hold A[4:8, 0:4]",
        "devices 6,7 hold A[4:8, 4:8]",
    ]
    wanted = [device_fill({"X": x, "Y": y}, {"X": 2, "Y": 2, "Z": 2}) for x in range(2) for y in range(2)]
    assert [cell.find(f"{SVG}rect").get("fill") for cell in cells.values()] == wanted
    assert len(set(wanted)) == 4
    assert [cell.find(f"{SVG}text").text for cell in cells.values()] == ["0,1", "2,3", "4,5", "6,7"]


def test_the_colours_of_256_devices_differ_and_are_light_enough_for_dark_text():
    degrees = {"X": 16, "Y": 16}
    colours = [device_fill({"X": x, "Y": y}, degrees) for x in range(16) for y in range(16)]
    assert len(set(colours)) == 256
    for colour in colours:
        red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue > 150


def test_text_cannot_break_out_of_the_document():
    panel = Panel(
        cells=((Cell("<&>", device_fill({"X": 0}, {"X": 2}), '"<script>"'),),),
        rows=("<a>",),
        columns=("&",),
        notes=("]]>",),
    )
    root = ElementTree.fromstring(Picture((Sketch(title="<svg> & co", panels=(panel,)),)).svg())
    assert root.find(f"{SVG}title").text == "<svg> & co"
    assert {text.text for text in root.iter(f"{SVG}text")} == {"<svg> & co", "&", "<a>", "<&>", "]]>"}
    assert not list(root.iter(f"{SVG}script"))


def test_a_notebook_is_given_the_svg():
    picture = show("A[I_X]", mesh="X=2", dims="I=8")
    assert picture._repr_html_() == picture.svg()
    assert repr(picture) == str(picture)


def test_a_chip_of_the_torus_has_the_hue_of_the_shard_that_it_holds():
    root = ElementTree.fromstring(show("A[I_X, J]", mesh="X=2,Y=2", dims="I=8,J=8", on="v5e:2x2").svg())
    fills = {}
    for group in root.iter(f"{SVG}g"):
        fills[group.find(f"{SVG}title").text] = group.find(f"{SVG}rect").get("fill")
    first, second = fills["devices 0,1 hold A[0:4, 0:8]"], fills["devices 2,3 hold A[4:8, 0:8]"]
    assert abs(hue(first) - hue(second)) > 0.3
    chips = {hint: colour for hint, colour in fills.items() if hint.startswith("chip")}
    assert len(set(chips.values())) == 4
    for hint, colour in chips.items():
        assert hue(colour) == pytest.approx(hue(first if "X=0" in hint else second), abs=0.01)


def hue(colour):
    return colorsys.rgb_to_hls(*bytes.fromhex(colour[1:]))[0]


def test_every_name_has_one_colour_of_its_own():
    assert len(set(NAMED.values())) == len(NAMED)
