"""Multiple choice tasks, answered with the likeliest choice after the question.

File format, prompts and both accuracies follow the LM evaluation harness
(https://github.com/EleutherAI/lm-evaluation-harness), whose target delimiter is a space.
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
    """A task's figures in JSON and metrics: `TaskResult` without log likelihoods, with standard errors."""

    questions: int
    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None


@dataclass(frozen=True)
class TaskResult:
    """The share of questions answered correctly.

    Args:
        log_likelihoods: log likelihood of each choice of each question, in nats.
        acc: share of questions whose likeliest choice is right.
        acc_norm: the same with log likelihoods divided by the choices' UTF-8 bytes, which does not favour short
          choices.
    """

    log_likelihoods: tuple[tuple[float, ...], ...]
    acc: float
    acc_norm: float

    def stderr(self, share: float) -> float | None:
        """Return the standard error of one of the shares; None for a single question."""
        count = len(self.log_likelihoods)
        return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None

    def figures(self) -> TaskFigures:
        """Return both shares with their standard errors."""
        return TaskFigures(
            questions=len(self.log_likelihoods),
            acc=self.acc,
            acc_stderr=self.stderr(self.acc),
            acc_norm=self.acc_norm,
            acc_norm_stderr=self.stderr(self.acc_norm),
        )


def read_task(path: Path) -> list[Question]:
    """Read a file with a JSON object a line: `query`, `choices` and `gold`, or `question` and `answer`.

    Raises:
        MeshwrightError: if there is another field, or one of another type.
    """
    found = [_question(data, place) for place, data in json_lines(path)]
    if not found:
        raise MeshwrightError(f"{path} has no question; it holds one a line")
    return found


def answer(model: LoadedModel, questions: Sequence[Question]) -> TaskResult:
    """Answer each question with the likeliest of its choices, each after a space."""
    every = iter(model.log_likelihoods(_pairs(questions)))
    found = tuple(tuple(next(every) for _ in question.choices) for question in questions)
    right = right_normed = 0
    for question, likely in zip(questions, found, strict=True):
        by_byte = [value / len(choice.encode()) for value, choice in zip(likely, question.choices, strict=True)]
        right += likely.index(max(likely)) == question.gold
        right_normed += by_byte.index(max(by_byte)) == question.gold
    return TaskResult(found, right / len(questions), right_normed / len(questions))


def check_answerable(model: LoadedModel, questions: Sequence[Question]) -> None:
    """Raise as `answer` would if a choice cannot be scored; needs no parameters."""
    model.continuations(_pairs(questions))


def _pairs(questions: Sequence[Question]) -> list[tuple[str, str]]:
    """Pair each question with each of its choices, which follows a space."""
    return [(question.query, f" {choice}") for question in questions for choice in question.choices]


def _question(data: dict[str, Any], place: str) -> Question:
    """Parse one object as a question."""
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
