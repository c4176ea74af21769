"""`meshwright learn`: lists, prints, writes and grades lessons."""

import json
import os
from pathlib import Path

import pytest
from lessons.solutions import RIGHT

from meshwright.cli.main import main
from meshwright.lessons.lesson import find_lesson, lessons

TESTS = Path(__file__).parents[1]


def test_lessons_are_listed_with_minutes_and_exercises(capsys):
    assert main(["learn"]) == 0
    shown = capsys.readouterr().out
    assert all(lesson.title in shown for lesson in lessons())


def test_a_lesson_is_printed(capsys):
    assert main(["learn", "5"]) == 0
    assert "# The four cases of a product" in capsys.readouterr().out


def solved(notebook, answers):
    """Put answers into a notebook's checks."""
    book = json.loads(notebook.read_text())
    for cell in book["cells"]:
        for name, answer in answers.items():
            if f'check("{name}"' in "".join(cell["source"]):
                cell["source"] = [f'from meshwright.learn import check\ncheck("{name}", {answer})']
    notebook.write_text(json.dumps(book))


def test_a_notebook_is_written_once_and_graded(tmp_path, capfd):
    assert main(["learn", "5", "--to", str(tmp_path / "new")]) == 0
    [notebook] = (tmp_path / "new").iterdir()
    assert main(["learn", "5", "--to", str(tmp_path / "new")]) == 2
    assert "may have your answers" in capfd.readouterr().err
    solved(notebook, {"bytes-of-a-sum": "2 * 3 / 4 * 8192 * 8192 * 2", "four-cases": "{}"})
    assert main(["learn", "--check", str(notebook)]) == 2
    assert "line 2: MeshwrightError: four-cases takes a mapping" in capfd.readouterr().err


def test_a_solved_lesson_ends_with_0(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")])))
    notebook = tmp_path / "five.ipynb"
    notebook.write_text(find_lesson("5").notebook())
    solved(notebook, {name: f'__import__("lessons.solutions").solutions.RIGHT["{name}"]' for name in RIGHT})
    assert main(["learn", "--check", str(notebook)]) == 0
    assert "4 of 4 exercises right" in capfd.readouterr().out


def test_a_script_with_all_exercises_right_ends_with_0(tmp_path, capfd):
    script = tmp_path / "mine.py"
    script.write_text('from meshwright.learn import check\ncheck("bytes-of-a-sum", "201 MB")\n')
    assert main(["learn", "--check", str(script)]) == 0
    assert "1 of 1 exercises right" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["99"], "there is no lesson '99'; lessons are numbered 0 to"),
        (["--to", "somewhere"], "--to needs the number of a lesson"),
        (["--check", "nowhere.ipynb"], "cannot use nowhere.ipynb"),
        (["3", "--check", "nowhere.ipynb"], "has no effect with --check"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["learn", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_file_without_exercises_is_refused(tmp_path, capsys):
    (tmp_path / "a.py").write_text("print(1)\n")
    assert main(["learn", "--check", str(tmp_path / "a.py")]) == 2
    assert "checks no exercise" in capsys.readouterr().err
