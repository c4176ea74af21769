"""A few trials of `benchmarks/faults.py`, and the page that has the figures of a long campaign."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

FEW = ["training:16", "serving:1", "files:10", "files:28", "files:45", "files:57"]
"""A run whose checkpoint is damaged; a server under requests of every kind; four files."""

KILLED = ["training:28"]
"""A run that is killed, as in `test_training_killed.py`."""


@pytest.mark.parametrize(
    ("trials", "least"), [(FEW, 400), pytest.param(KILLED, 4, marks=pytest.mark.exhaustive)], ids=["few", "killed"]
)
def test_a_few_trials_break_no_promise(trials, least, tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "faults.py", "--trials", *trials, "--folder", tmp_path / "trials"]
    command += ["--requests", "200", "--bytes", "100", "--json", tmp_path / "found.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert Counter(found["trials"]) == Counter(trial.partition(":")[0] for trial in trials)
    assert sum(row["tried"] for row in found["promises"]) > least


def test_the_page_has_the_figures_of_the_stored_campaign():
    import faults

    found = json.loads((ROOT / "tests" / "data" / "faults.json").read_text())
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert faults.table(found) in page
    trials = ", ".join(f"{count} trials of {part}" for part, count in found["trials"].items())
    assert f"A run of {found['minutes']:.0f} minutes" in page.replace("\n", " ")
    assert f"seed {found['seed']}, {trials}" in page.replace("\n", " ")
    assert {row["promise"] for row in found["promises"]} == {
        promise for _, promises in faults.PARTS.values() for promise in promises
    }


def test_a_promise_that_is_broken_is_counted_and_named(tmp_path):
    """Damage that a reader takes for the whole file: the trial has to see it."""
    import fault_files
    from fault_trials import Trial, is_plain

    file = tmp_path / "file"
    file.write_text("abc")
    first = fault_files.Subject("a letter", lambda folder: file, lambda path: path.read_text()[0])
    fault_files._damage_all(first, tmp_path, "cut", 10, 0, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["counts"] == {"broke": 1, "equal": 2}  # Of no byte there is no first letter.
    assert re.fullmatch(r"a letter, cut at byte 0: broke IndexError: .*", found["broke"][0])
    whole = fault_files.Subject("a text", lambda folder: file, lambda path: path.read_text())
    fault_files._damage_all(whole, tmp_path, "cut", 10, 0, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["counts"] == {"other": 3}
    trial = Trial("files", 1, tmp_path)
    assert not trial.hold("a promise", False, "why")
    assert (trial.tried, trial.broke) == ({"a promise": 1}, [("a promise", "why")])
    assert not is_plain("Traceback (most recent call last):\n  File")
    assert [what for what, _ in fault_files.damages(b"abcd", "flip", 2, random.Random(0))] != []
