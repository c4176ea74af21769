"""`tests/matrix.txt` and `tests/exhaustive.txt` are sorted; `conftest.py` holds that the tests in them are there."""

from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["matrix.txt", "exhaustive.txt"])
def test_lines_are_sorted_and_each_is_there_once(name):
    lines = [line for line in (Path(__file__).parent / name).read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
