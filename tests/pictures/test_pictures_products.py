"""Pictures of products and collectives: operands, partial sums, results, one device's part, each hop."""

from xml.etree import ElementTree

import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.pictures.colours import device_fill
from meshwright.record import KINDS
from meshwright.units import show_bytes

SVG = "{http://www.w3.org/2000/svg}"

PARTIAL = """\
  C[I, K]{U_X}                       C[I, K]
  ┌───────────────┐                  ┌───────────────┐
  │               ├─┐                │               │
  │               │ ├─┐              │               │
  │               │ │ ├─┐            │               │
  │       0       │ │ │ │            │      0-3      │
  │               │ │ │ │            │               │
  │               │ │ │ │            │               │
  │               │ │ │ │            │               │
  └─┬─────────────┘ │ │ │            └───────────────┘
    └─┬─────────────┘ │ │            all-reduce over X: 4.47 ms
      └─┬─────────────┘ │
        └───────────────┘
  product: 275 Gflop a device
  a sheet for each X, to be summed
"""


def test_partial_sums_are_sheets_behind_each_other():
    assert PARTIAL in str(mw.matmul("A[I, J_X] @ B[J_X, K]", X=4, on="v5e:2x4").picture)


def test_a_sheet_has_the_colour_of_the_devices_that_have_that_partial_sum():
    root = ElementTree.fromstring(mw.show("C[I, K]{U_X}", mesh="X=4", dims="I=8,K=8").svg())
    fills = [rect.get("fill") for rect in root.iter(f"{SVG}rect") if rect.get("width") != "100%"]
    wanted = [device_fill({"X": place}, {"X": 4}) for place in (3, 2, 1, 0)]  # the front is drawn last
    assert fills == wanted


@pytest.mark.parametrize("device", range(8))
def test_a_devices_shards_are_marked_and_named(device):
    answer = mw.matmul("A[I_X, J_Y] @ B[J_Y, K]", X=2, Y=4, I=8, J=8, K=8, on="v5e:2x4", device=device)
    x, y = divmod(device, 4)
    root = ElementTree.fromstring(answer.svg())
    marked = [
        group.find(f"{SVG}title").text
        for group in root.iter(f"{SVG}g")
        if any(rect.get("stroke-width") == "2" for rect in group.iter(f"{SVG}rect"))
    ]
    rows = f"{4 * x}:{4 * x + 4}"
    summed = f"{2 * y}:{2 * y + 2}"
    held = [f"A[{rows}, {summed}]", f"B[{summed}, 0:8]"]
    assert [text.split(" hold")[1].lstrip("s ") for text in marked] == held + [f"C[{rows}, 0:8]"] * (1 + (y == 0))
    said = " ".join(str(answer).split())
    assert f"device {device} holds {held[0]}; holds {held[1]}; computes A[I_X, J_Y] @ B[J_Y, K]" in said
    assert f"ends with C[{rows}, 0:8]" in said


def test_a_device_that_is_not_on_the_mesh_is_one_clear_error():
    with pytest.raises(mw.MeshwrightError, match="device=4 is not on the mesh, whose devices are 0 to 3"):
        mw.matmul("A[I, J_X] @ B[J_X, K]", X=4, on="v5e:2x2", device=4)


def test_the_four_cases_are_side_by_side(capsys):
    found = mw.matmul_cases(X=4, on="v5e:2x2")
    assert [one.case for one in found.matmuls] == [1, 2, 3, 4]
    assert main(["matmul", "cases", "--on", "v5e:2x2", "--mesh", "X=4"]) == 0
    screen = capsys.readouterr().out
    rows = [line for line in screen.splitlines() if line[:1].isdigit()]
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4"]
    assert "nothing moves" in rows[0]
    assert "1.49 to 2.89 ms" in rows[3]
    assert [sketch.title.split("   ")[1] for sketch in found.picture.sketches] == [f"case {n}" for n in range(1, 5)]
    assert str(mw.matmul_cases(mesh="tp=4", on="v5e:2x2")).count("tp=4") == 1


@pytest.mark.parametrize("ending", ["svg", "html"])
@pytest.mark.parametrize("words", [["matmul", "cases"], ["matmul", "A[I, J_X] @ B[J_X, K]"], ["collective", "permute"],
                                   ["show", "pipeline", "--stages", "2", "--microbatches", "2"]])  # fmt: skip
def test_a_picture_is_written_as_svg_or_as_a_page(words, ending, tmp_path, capsys):
    file = tmp_path / f"picture.{ending}"
    more = [] if words[0] == "show" else ["--on", "v5e:2x2"]
    assert main([*words, *more, "-o", str(file)]) == 0
    assert f"wrote  {file}" in " ".join(capsys.readouterr().out.split("\n"))
    text = file.read_text()
    assert text.startswith("<svg" if ending == "svg" else "<!DOCTYPE html>")
    assert text.count("<svg") == 1
    if ending == "svg":
        ElementTree.fromstring(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_is_drawn_before_hop_by_hop_and_after(kind):
    steps, torus = mw.collective(kind, mesh="X=2,Y=4", axis="Y", on="v5e:2x4").picture.sketches
    assert all(len(panel.cells) == 4 for panel in steps.panels)
    assert torus.title == "mesh X=2, Y=4 on v5e:2x4"
    if kind != "collective-permute":
        captions = [panel.caption.split(":")[0] for panel in steps.panels]
        assert captions[0] == "before"
        assert captions[-1].startswith("after hop")
    fills = {device_fill({"X": 0, "Y": place}, {"X": 2, "Y": 4}) for place in range(4)}
    assert set(steps.panels[0].row_fills) == fills
    assert fills < {cell.fill for panel in torus.panels for row in panel.cells for cell in row}


def test_devices_of_a_group_have_their_numbers_on_the_mesh():
    steps, _ = mw.collective("all-gather", mesh="X=4,Y=2", axis="X", on="v5e:2x4").picture.sketches
    assert steps.title == "ring all-gather over 4 devices   0 → 2 → 4 → 6 → 0"
    assert steps.panels[0].rows == ("device 0", "device 2", "device 4", "device 6")


def test_more_devices_than_fit_are_only_drawn_on_a_torus():
    (torus,) = mw.collective("all-gather", X=16, on="v5e:4x4").picture.sketches
    assert "a slice as small as this one JAX lays out by hand, along a ring of neighbours" in torus.notes
    with pytest.raises(mw.MeshwrightError, match="up to 8 devices; 16 would fill it"):
        mw.collective("all-gather", X=16, on="h100:16").svg()


def test_a_product_lies_under_its_roofline():
    """It is bound by communication, so its point is on the slope of the network, at its flops a second."""
    answer = mw.matmul("A[I_X, J] @ B[J, K_X] -> C[I_X, K]", X=4, on="v5e:4x4")
    _, roofline = answer.picture.sketches
    way = answer.ways[0]
    notes = " ".join(roofline.notes)
    assert "roofs: peak 197 Tflop/s in bf16; memory 820 GB/s; network 60.0 GB/s" in notes
    assert "123 Tflop/s if everything overlaps" in notes
    assert way.network.value * 60e9 == pytest.approx(way.implementation.flops / way.seconds)
    root = ElementTree.fromstring(answer.svg())
    texts = {text.text: text for text in root.iter(f"{SVG}text")}
    slopes = [
        line
        for line in root.iter(f"{SVG}line")
        if line.get("x1") != line.get("x2") and line.get("y1") != line.get("y2")
    ]
    assert len(slopes) == 2
    points = [text for text in root.iter(f"{SVG}text") if text.text == "●"]
    x, y = max((float(point.get("x")), float(point.get("y")) - 4) for point in points)
    x1, y1, x2, y2 = (float(slopes[1].get(name)) for name in ("x1", "y1", "x2", "y2"))
    assert y == pytest.approx(y1 + (x - x1) * (y2 - y1) / (x2 - x1), abs=1)
    assert "flops a byte" in texts


def test_a_resharding_has_no_roofline():
    assert len(mw.matmul("A[I_X, J] -> A[I, J_X]", X=4, on="v5e:2x2").picture.sketches) == 1


def test_a_plan_is_shown_by_its_memory_and_by_every_parameter(tmp_path):
    plan = mw.plan("tiny", on="cpu:8", batch=16, seq_len=64, mesh="fsdp=2,tp=4")
    plan.write(tmp_path / "plan.yaml")
    memory, table = mw.show(plan).sketches
    rows = {row: cells[0].text for row, cells in zip(memory.panels[0].rows, memory.panels[0].cells, strict=True)}
    assert rows["peak"] == show_bytes(plan.predicted.memory_bytes["peak"])
    assert rows["usable"] == show_bytes(plan.system.usable_bytes)
    bars = [cells[2].text.count("█") for cells in memory.panels[0].cells]
    assert bars[-1] == 40
    assert table.panels[0].columns[-1] == "in all"
    assert str(mw.show(str(tmp_path / "plan.yaml"))) == str(mw.show(plan))


def test_a_plan_that_does_not_fit_says_so():
    plan = mw.plan("llama3-8b", on="v5e:2x2", batch=8, num_layers=16, mesh="fsdp=4")
    assert "that a program can use: DOES NOT FIT" in str(mw.show(plan))
