"""Multiple choice tasks, answered with the likeliest choice after the question.

File format, prompts and the two accuracies (`acc`, `acc_norm`) follow the LM evaluation harness
(https://github.com/EleutherAI/lm-evaluation-harness), with a space between question and choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from meshwright.errors import MeshwrightError
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.execution.text.lines import json_lines

QUERY, GOLD = ("query", "question"), ("gold", "answer")
"""The field names that a file may use for the question, and for the index of the right choice."""


@dataclass(frozen=True)
class Question:
    """A question with its choices; `gold` is the index of the right choice, from 0."""

    query: str
    choices: tuple[str, ...]
    gold: int


class TaskFigures(TypedDict):
    """A task's results in JSON and metrics: number of questions, and both accuracies with their standard errors."""

    questions: int
    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None


@dataclass(frozen=True)
class TaskResult:
    """The answers to a task, and the shares of questions answered correctly.

    Args:
        log_likelihoods: for each question, the log likelihood of each choice in nats.
        acc: share of questions whose likeliest choice is right, 0 to 1.
        acc_norm: the same with each log likelihood divided by the choice's number of UTF-8 bytes, so that short choices
          are not favoured.
    """

    log_likelihoods: tuple[tuple[float, ...], ...]
    acc: float
    acc_norm: float

    def stderr(self, share: float) -> float | None:
        """Return the standard error of `share`, which is `acc` or `acc_norm`; None for a single question."""
        count = len(self.log_likelihoods)
        return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None

    def figures(self) -> TaskFigures:
        """Return both accuracies with their standard errors."""
        return TaskFigures(
            questions=len(self.log_likelihoods),
            acc=self.acc,
            acc_stderr=self.stderr(self.acc),
            acc_norm=self.acc_norm,
            acc_norm_stderr=self.stderr(self.acc_norm),
        )


def read_task(path: Path) -> list[Question]:
    """Return the questions in a file of JSON objects, one a line.

    Fields are `query` (or `question`), `choices`, and `gold` (or `answer`); see `Question`.

    Raises:
        MeshwrightError: there is no question, or one with another field, or a field has another type.
    """
    found = [_question(data, place) for place, data in json_lines(path)]
    if not found:
        raise MeshwrightError(f"{path} has no question; it holds one a line")
    return found


def answer(model: LoadedModel, questions: Sequence[Question]) -> TaskResult:
    """Return the model's answers: for each question the choice that is likeliest after it and a space."""
    every = iter(model.log_likelihoods(_pairs(questions)))
    found = tuple(tuple(next(every) for _ in question.choices) for question in questions)
    right = right_normed = 0
    for question, likely in zip(questions, found, strict=True):
        by_byte = [value / len(choice.encode()) for value, choice in zip(likely, question.choices, strict=True)]
        right += likely.index(max(likely)) == question.gold
        right_normed += by_byte.index(max(by_byte)) == question.gold
    return TaskResult(found, right / len(questions), right_normed / len(questions))


def check_answerable(model: LoadedModel, questions: Sequence[Question]) -> None:
    """Raise if `answer` would, because a choice cannot be scored. The model's parameters are not read."""
    model.continuations(_pairs(questions))


def _pairs(questions: Sequence[Question]) -> list[tuple[str, str]]:
    """Return (question, " " + choice) for each choice of each question."""
    return [(question.query, f" {choice}") for question in questions for choice in question.choices]


def _question(data: dict[str, Any], place: str) -> Question:
    """Return the question in an object at `place` (file and line). Raises if a field is unknown, missing or invalid."""
    names = [next((name for name in kind if name in data), kind[0]) for kind in (QUERY, ("choices",), GOLD)]
    if unknown := sorted(data.keys() - {*names}):
        raise MeshwrightError(
            f"{place}: there is no field {unknown[0]!r}; a question has query (or question), choices, and gold (or"
            f" answer)"
        )
    query, choices, gold = (data.get(name) for name in names)
    if not (isinstance(query, str) and query.strip()):
        raise _field_error(place, names[0], data, "a text")
    if not (isinstance(choices, list) and len(choices) > 1 and all(isinstance(c, str) and c for c in choices)):
        raise _field_error(place, names[1], data, "a list of two texts or more")
    if len(set(choices)) < len(choices):
        raise _field_error(place, names[1], data, "a list of texts that differ")
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise _field_error(place, names[2], data, f"the number of the right choice, from 0 to {len(choices) - 1}")
    return Question(query, tuple(choices), gold)


def _field_error(place: str, name: str, data: dict[str, Any], wanted: str) -> MeshwrightError:
    said = f"is {repr(data[name])[:40]}" if name in data else "is missing"
    return MeshwrightError(f"{place}: {name} {said}; it is {wanted}")
