"""Programs that meshwright did not write, with axes of their own: their totals against hand counts."""

from itertools import pairwise

import foreign_programs as programs
import pytest
from foreign_programs import BATCH, BLOCKS, CHANNELS, CLASSES, EMBED, IMAGES, LAYERS, LENGTH, ROWS, SIDE, VOCAB

from meshwright.description.hlo.records import read_hlo

PAIRS = list(pairwise(programs.WIDTHS))
WEIGHTS = sum(a * b for a, b in PAIRS)

# A 3x3 window with SAME padding meets a pixel of the image 3 times along each side, but for the two at the borders.
MEETINGS = (3 * SIDE - 2) ** 2
STEM, BLOCK, HEAD = (2 * IMAGES // 8 * n for n in (3 * CHANNELS * MEETINGS, CHANNELS**2 * MEETINGS, CHANNELS * CLASSES))

TOKENS = BATCH // 2 * LENGTH
PROJECTIONS = 2 * TOKENS * 4 * EMBED**2  # query, key, value and output, whole on every device
SCORES = 2 * 2 * TOKENS * LENGTH * EMBED
FEEDFORWARD = 2 * TOKENS * 2 * EMBED * 4 * EMBED // 4

# (program, mesh, flops a device, bytes by kind and axes). A product costs as much again for each gradient; the first of
# a chain has no gradient of its input.
PROGRAMS = [
    (
        programs.mlp,
        {"data": 8},
        2 * ROWS // 8 * (3 * WEIGHTS - PAIRS[0][0] * PAIRS[0][1]),
        {("all-reduce", ("data",)): 4 * (WEIGHTS + sum(b for _, b in PAIRS))},
    ),
    (
        programs.resnet,
        {"data": 8},
        3 * (STEM + 2 * BLOCKS * BLOCK + HEAD) - STEM,
        {("all-reduce", ("data",)): 4 * (9 * 3 * CHANNELS + 2 * BLOCKS * 9 * CHANNELS**2 + CHANNELS * CLASSES)},
    ),
    (
        programs.transformer,
        {"data": 2, "model": 4},
        LAYERS * (PROJECTIONS + SCORES + FEEDFORWARD) + 2 * TOKENS * EMBED * VOCAB,
        {("all-reduce", ("model",)): LAYERS * 4 * TOKENS * EMBED},
    ),
    (
        programs.mapped,
        {"i": 8},
        2 * 4 * 16 * 32,
        {("all-reduce", ("i",)): 4 * 4 * 32, ("all-gather", ("i",)): 8 * 4 * 4 * 32},
    ),
    (
        programs.partly_manual,
        {"data": 2, "model": 4},
        2 * 2 * 4 * 16 * 64 // 4,
        {("all-reduce", ("model",)): 4 * 4 * 16, ("all-reduce", ("data",)): 4 * 4 * 16},
    ),
    (
        programs.propagated,
        {"x": 4, "y": 2},
        2 * 8 * 16 * 32 + 2 * 8 * 32 * 8,
        {("all-reduce", ("y",)): 4 * 8 * 8},
    ),
]


def totals(record) -> dict[tuple, int]:
    """The bytes of a record's collectives by kind and axes."""
    found = dict.fromkeys(((c.kind, c.axes) for c in record.collectives), 0)
    for c in record.collectives:
        found[c.kind, c.axes] += c.bytes
    return found


@pytest.mark.parametrize(("program", "mesh", "flops", "bytes_"), PROGRAMS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_foreign_program_has_the_flops_and_collectives_counted_by_hand(program, mesh, flops, bytes_, tmp_path):
    compiled = program().compile(compiler_options={"xla_dump_to": str(tmp_path)})
    record = read_hlo(compiled.as_text(), mesh, hardware="cpu:8")
    assert (record.flops, totals(record), record.notes) == (flops, bytes_, ())
    # The text that XLA dumps says the same.
    (dumped,) = tmp_path.glob("*cpu_after_optimizations.txt")
    again = read_hlo(dumped.read_text(), mesh, hardware="cpu:8")
    assert (again.flops, totals(again)) == (flops, bytes_)


def test_the_phases_of_a_foreign_step_are_forward_and_backward():
    record = read_hlo(programs.mlp().compile().as_text(), {"data": 8}, hardware="cpu:8")
    assert {c.phase for c in record.collectives} == {"backward"}
    assert all("foreign_programs.py" in c.source for c in record.collectives)


def test_the_axes_of_a_foreign_mesh_may_be_cut_finer_than_it_was():
    """Two axes of 2 and 4 are the same devices as one of 8: a sum over all of them is one over both."""
    record = read_hlo(programs.mlp().compile().as_text(), {"a": 2, "b": 4}, hardware="cpu:8")
    assert {c.axes for c in record.collectives} == {("a", "b")}
