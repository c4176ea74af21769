"""Every row of the correctness kit is planned as the compiler's program is, which `make_kit.py` has stored.

`test_runtime_kit.py` compiles the rows and compares the same, and holds the stored records against what
the compiler makes; here no compiler is needed, so that a change of the planner is held against all rows in seconds.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "execution" / "runtime"))
from compute import kit_differences
from kit_rows import REPEATED, ROWS
from records import KIT, read

ALL = [*ROWS, *REPEATED]
STORED = read(KIT)


def test_every_row_is_stored():
    assert len(STORED) == len(ALL)


@pytest.mark.parametrize("number", range(len(ALL)), ids=lambda number: str(ALL[number]))
def test_a_row_is_planned_as_it_was_compiled(number):
    assert kit_differences(ALL[number], STORED[number]["compiled"]) == []


def test_a_byte_more_in_a_program_is_seen():
    compiled = STORED[3]["compiled"]
    moves = [dict(move) for move in compiled["record"]["collectives"]]
    moves[0]["bytes"] += 1
    other = compiled | {"record": compiled["record"] | {"collectives": moves}}
    assert len(kit_differences(ALL[3], other)) == 1
    other = compiled | {"record": compiled["record"] | {"flops": compiled["record"]["flops"] + 1}}
    assert len(kit_differences(ALL[3], other)) == 1
    assert len(kit_differences(ALL[3], compiled | {"argument bytes": compiled["argument bytes"] - 4})) == 1
