"""Collectives with real numbers, on simulated devices and step by step around a ring."""

import random

import pytest

from meshwright.errors import MeshwrightError
from meshwright.pictures.drawings.collectives import DIGITS, collective_sketch, run_collective
from meshwright.pictures.drawings.rings import RING_KINDS, run_ring
from meshwright.pictures.showing import show_collective, show_ring
from meshwright.record import KINDS, wire_bytes

# What MinText's tutorial 1 prints for these sixteen digits on four devices (github.com/sshkhr/MinText).
BEFORE = ((3, 1, 4, 1), (5, 9, 2, 6), (5, 3, 5, 8), (9, 7, 1, 2))
TUTORIAL = {
    "all-gather": (DIGITS,) * 4,
    "all-reduce": ((22, 20, 12, 17),) * 4,
    "reduce-scatter": ((22,), (20,), (12,), (17,)),
    "all-to-all": ((3, 5, 5, 9), (1, 9, 3, 7), (4, 2, 5, 1), (1, 6, 8, 2)),
    "collective-permute": ((9, 7, 1, 2), (3, 1, 4, 1), (5, 9, 2, 6), (5, 3, 5, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tutorial_numbers_come_out_of_really_running_the_collective(kind):
    exchange = run_collective(kind)
    assert (exchange.before, exchange.after) == (BEFORE, TUTORIAL[kind])


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", RING_KINDS)
def test_the_ring_ends_with_what_the_real_collective_gives(kind, degree):
    values = random.Random(degree).choices(range(-50, 100), k=2 * degree * degree)
    exchange, ring = run_collective(kind, values, degree=degree), run_ring(kind, values, degree=degree)
    assert ring.result == exchange.after


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_a_device_sends_what_the_cost_model_says_a_ring_sends(kind, degree):
    """`wire_bytes` of the array as one device sees it: the gathered result, the unreduced operand."""
    values = range(degree * degree)
    seen = len(values) if kind == "all-gather" else len(values) // degree
    ring = run_ring(kind, values, degree=degree)
    assert ring.sent == wire_bytes(kind, seen, degree)
    assert len(ring.frames) - 1 == (degree - 1) * (2 if kind == "all-reduce" else 1)


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_an_all_to_all_in_one_direction_sends_half_of_what_an_all_gather_does(degree):
    values = range(degree * degree)
    assert 2 * run_ring("all-to-all", values, degree=degree).sent == run_ring("all-gather", values, degree=degree).sent


def test_an_all_reduce_is_a_reduce_scatter_and_then_an_all_gather():
    reduced, scattered = run_ring("all-reduce"), run_ring("reduce-scatter")
    assert reduced.frames[: len(scattered.frames)] == scattered.frames
    gathered = run_ring("all-gather", [22, 20, 12, 17])
    assert [frame.slots for frame in reduced.frames[len(scattered.frames) - 1 :]] == [
        frame.slots for frame in gathered.frames
    ]


def test_every_hop_moves_only_what_the_neighbour_before_held():
    for before, after in zip(run_ring("all-gather").frames, run_ring("all-gather").frames[1:], strict=False):
        for device in range(4):
            slot = after.arrived[device]
            assert before.slots[device][slot] is None
            assert after.slots[device][slot] == before.slots[device - 1][slot]


def test_an_all_to_all_hands_on_each_block_until_it_arrives():
    start, first, *_ = run_ring("all-to-all").frames
    assert start.to_pass_on[0] == ((1,), (4,), (1,))
    assert first.slots[1] == ((1,), (9,), None, None)
    assert first.to_pass_on[1] == ((4,), (1,))
    assert (start.sent, first.sent) == (0, 3)


HOP = """\
  hop 1 of 3: each device sent 1 number
            part 0  part 1  part 2  part 3
  device 0  3       1      ›5       ·
  device 1  ·       9       2      ›7
  device 2 ›10      ·       5       8
  device 3  9      ›10      ·       2
"""


def test_a_hop_is_a_table_in_which_the_newcomers_are_marked():
    assert HOP in str(show_ring("reduce-scatter"))


def test_before_and_after_stand_side_by_side():
    text = str(show_collective("all-to-all"))
    assert "jax.lax.all_to_all" in text
    assert "device 2  5 3 5 8  →  4  2  5  1" in text


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all", "collective-permute"])
def test_a_number_keeps_the_colour_of_the_device_that_had_it(kind):
    """Every device starts with numbers of its own, so that they tell where they come from."""
    (panel,) = collective_sketch(run_collective(kind, range(16))).panels
    colours = {text: row[0].fill for row in panel.cells for text in row[0].text.split()}
    for row in panel.cells:
        for cell in row[2:]:
            assert {colours[text] for text in cell.text.split()} == {cell.fill}


@pytest.mark.parametrize(
    ("kind", "values", "degree", "message"),
    [
        (
            "all-gather",
            [1, 2, 3],
            2,
            "3 values cannot be cut evenly by all-gather over 2 devices; give a multiple of 2",
        ),
        ("all-to-all", [1, 2], 2, "give a multiple of 4"),
        ("all-gather", [], 2, "0 values"),
        ("broadcast", [1, 2], 2, "'broadcast' is not a collective"),
        ("all-gather", [1, 2], 0, "1 device or more, not 0"),
        ("all-gather", list(range(16)), 16, "16 devices are needed, there are 8"),
    ],
)
def test_what_cannot_be_run_is_refused(kind, values, degree, message):
    with pytest.raises(MeshwrightError, match=message):
        run_collective(kind, values, degree=degree)


def test_only_the_ring_cuts_the_parts_of_an_all_reduce():
    assert run_collective("all-reduce", [1, 2, 3, 4, 5, 6], degree=2).after == ((5, 7, 9),) * 2
    with pytest.raises(MeshwrightError, match="give a multiple of 4"):
        run_ring("all-reduce", [1, 2, 3, 4, 5, 6], degree=2)


def test_a_permute_is_no_ring_algorithm():
    with pytest.raises(MeshwrightError, match="collective-permute has no ring algorithm"):
        run_ring("collective-permute")
