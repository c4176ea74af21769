"""The examples run as their first lines say, without any variable set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAID = {
    "plan_and_train": ["best mesh: ", "quantities are compiled as predicted", "step 19  loss"],
    "inspect_a_mistake": [
        "all-gather over tp",
        "constraint that un-shards: the constraint of f32[512,1024] to P('dp', None)",
    ],
}


LONG = ("plan_and_train",)
"""Examples that take over 15 s; `tests/test_library.py` calls what they call."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=pytest.mark.matrix if path.stem in LONG else ())
        for path in sorted(EXAMPLES.glob("*.py"))
    ],
)
def test_an_example_runs_and_says_what_it_is_for(name):
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, done.stderr
    for words in SAID[name]:
        assert words in done.stdout
