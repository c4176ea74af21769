"""What `tests/matrix.txt` names is there."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_line_names_a_test():
    lines = [line for line in (TESTS / "matrix.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    names = {line.split("[")[0] for line in lines}
    there = {
        f"{path.relative_to(TESTS)}::{node.name}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert names - there == set()
