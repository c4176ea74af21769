"""What `tests/matrix.txt` and `tests/exhaustive.txt` name is there."""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@cache
def functions_there():
    return {
        f"{path.relative_to(TESTS)}::{node.name}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("name", ["matrix.txt", "exhaustive.txt"])
def test_every_line_names_a_test(name):
    lines = [line for line in (TESTS / name).read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    names = {line.split("[")[0] for line in lines}
    assert names - functions_there() == set()
