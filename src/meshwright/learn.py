"""`check` and `hint`, for the exercises of the lessons: `from meshwright.learn import check, hint`."""

from __future__ import annotations

from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.lessons.exercise import VERDICTS
from meshwright.lessons.exercises.catalog import find_exercise
from meshwright.pictures.text import prose_width, wrap


def check(name: str, answer: Any = None) -> None:
    """Grade an answer and print the reply, which never reveals the right answer.

    The answer is a number, a letter, a mapping or a function, depending on the exercise. Without one, print the
    question.

    Raises:
        MeshwrightError: there is no such exercise, or it expects another kind of answer.
    """
    verdict = find_exercise(name).grade(name, answer)
    VERDICTS.append(verdict)
    _print(verdict.text)


def hint(name: str, number: int = 1) -> None:
    """Print one of an exercise's three hints: number 1 is the vaguest, 3 the most complete.

    Raises:
        MeshwrightError: there is no such hint.
    """
    hints = find_exercise(name).hints
    if number not in (1, 2, 3):
        raise MeshwrightError(f"{name} has hints 1, 2 and 3, not {number!r}")
    after = f' hint("{name}", {number + 1}) says more.' if number < len(hints) else ""
    _print(f"hint {number} of {len(hints)}: {hints[number - 1]}{after}")


def _print(text: str) -> None:
    """Print a text with its long lines wrapped."""
    for line in text.splitlines():
        print("\n".join(wrap(line, then="  ")) if len(line) > prose_width() else line)
