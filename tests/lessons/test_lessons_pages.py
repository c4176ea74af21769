"""Every lesson runs as its reader gets it, and what its text says in numbers is what its cells print."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from child_flags import CHILD_FLAGS

from meshwright.errors import MeshwrightError
from meshwright.lessons.exercise import Verdict
from meshwright.lessons.lesson import find_lesson, lessons, read_code
from meshwright.lessons.run import summary

ROOT = Path(__file__).parents[2]
LESSONS = {lesson.file.stem: lesson for lesson in lessons()}
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?= ?(?:%|(?:ms|us|s|[kMGT]?B|[kMGTP]?flops?|million|billion)\b))")
"""A number of a text that has a unit."""


def value(number):
    return float(number.replace(",", ""))


@cache
def run_lesson(file):
    """Run a lesson in a process of its own, as `meshwright learn --check` does."""
    environment = {**os.environ, "XLA_FLAGS": CHILD_FLAGS, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", "meshwright.lessons.run", str(file)],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_and_asks_its_exercises(name):
    done = run_lesson(LESSONS[name].file)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    exercises = LESSONS[name].exercises
    assert f"0 of {len(exercises)} exercises right; not answered: {', '.join(exercises)}" in done.stdout


@pytest.mark.parametrize("name", LESSONS)
def test_numbers_of_a_text_are_printed_by_its_cells(name):
    printed = {value(number) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", run_lesson(LESSONS[name].file).stdout)}
    prose = "\n".join(cell.text for cell in LESSONS[name].cells if cell.kind == "markdown")
    assert [number for number in NUMBER.findall(prose) if value(number) not in printed] == []


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_has_its_parts(name):
    lesson = LESSONS[name]
    prose = "\n".join(cell.text for cell in lesson.cells if cell.kind == "markdown")
    assert len(lesson.code) <= 12
    assert [line for line in lesson.file.read_text().splitlines() if len(line) > 120] == []
    # jupytext makes no notebook without it.
    assert "display_name: Python 3" in lesson.file.read_text()
    assert lesson.cells[0].text.startswith(f"# {lesson.title}\n")
    assert "**Predict.**" in lesson.cells[0].text
    assert next(iter(lesson.code)) == 'prediction = "?"'
    assert "## What goes wrong" in prose
    elsewhere = prose.partition("## Elsewhere")[2]
    assert [name for name in ("MinText", "MaxText", "scaling book") if name not in " ".join(elsewhere.split())] == []
    assert lesson.exercises


def test_lessons_are_numbered_from_0():
    assert [lesson.number for lesson in lessons()] == [*range(len(lessons()))]


def test_a_notebook_has_the_cells_of_the_page(tmp_path):
    lesson = find_lesson("5")
    file = tmp_path / "five.ipynb"
    file.write_text(lesson.notebook())
    assert read_code(file) == lesson.code == read_code(lesson.file)
    notebook = json.loads(lesson.notebook())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(lesson.cells)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.ipynb", "{}", "is not a notebook of format 4"),
        ("a.ipynb", "no json", "is not a notebook of format 4"),
        ("a.txt", "check('four-cases')", "is not a lesson"),
    ],
)
def test_other_files_are_refused(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(MeshwrightError, match=said):
        read_code(tmp_path / name)


def test_the_last_check_of_an_exercise_counts():
    wrong, right = Verdict("a", False, ""), Verdict("a", True, "")
    assert summary(["a"], [wrong, right]) == (0, "1 of 1 exercises right")
    assert summary(["a", "b"], [right, wrong]) == (
        1,
        "0 of 2 exercises right; not yet right: a; not answered: b",
    )
