"""Exercises with a number or a choice as their answer, and the verdict that grading returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from meshwright.errors import MeshwrightError
from meshwright.units import parse_count, parse_number, parse_seconds

TOLERANCE = 0.02
"""The relative error up to which a number is right: answers are given with three figures, and some after rounding."""

Unit = Literal["", "s", "B"]


@dataclass(frozen=True)
class Verdict:
    """What grading an answer found. is_blank: there was no answer yet. text: what the reader is shown."""

    name: str
    is_right: bool
    text: str
    is_blank: bool = False


VERDICTS: list[Verdict] = []
"""The verdicts of this process, in the order of its checks: `meshwright learn --check` counts them."""


class Exercise(Protocol):
    """An exercise: what it asks, three hints from vague to nearly all, and how an answer is graded."""

    @property
    def question(self) -> str:
        """What is asked."""
        ...

    @property
    def hints(self) -> tuple[str, str, str]:
        """Three hints."""
        ...

    def grade(self, name: str, answer: Any) -> Verdict:
        """Return the verdict on an answer, which never contains the right one."""
        ...


class Mistake(NamedTuple):
    """A wrong answer that many give: its formula, and the reply to it."""

    value: Callable[[], Any]
    reply: str


@dataclass(frozen=True, kw_only=True)
class Number:
    """An exercise whose answer is a number.

    answer: its formula. mistakes: wrong answers with replies of their own. unit: `s` and `B` also take text, as
    "1.12 ms" and "64 MB". because: why the right answer is right, shown with it.
    """

    question: str
    answer: Callable[[], float]
    mistakes: tuple[Mistake, ...]
    hints: tuple[str, str, str]
    because: str
    unit: Unit = ""

    def grade(self, name: str, answer: Any) -> Verdict:
        """Compare a number with the answer, then with each mistake."""
        if is_blank(answer):
            return blank(name, self.question)
        number = _read_number(name, answer, self.unit)
        if _is_near(number, self.answer()):
            return Verdict(name, True, f"{name}: right. {self.because}")
        for mistake in self.mistakes:
            if _is_near(number, mistake.value()):
                return Verdict(name, False, f"{name}: not yet. {mistake.reply}")
        return Verdict(name, False, f"{name}: not yet, and none of the usual mistakes gives it. {_ask_hint(name)}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An exercise whose answer is a letter.

    options: the statements by letter. answer: the letter of the true one. replies: for each other letter, what is wrong
    with it. because: why the right answer is right, shown with it.
    """

    question: str
    options: Mapping[str, str]
    answer: str
    replies: Mapping[str, str]
    hints: tuple[str, str, str]
    because: str

    def grade(self, name: str, answer: Any) -> Verdict:
        """Compare a letter with the answer."""
        if is_blank(answer):
            asked = "\n".join([self.question, *(f"  {letter}  {text}" for letter, text in self.options.items())])
            return blank(name, asked)
        letter = str(answer).strip().lower()
        if letter not in self.options:
            raise MeshwrightError(f"{name} takes a letter of {', '.join(self.options)}, not {answer!r}")
        if letter == self.answer:
            return Verdict(name, True, f"{name}: right. {self.because}")
        return Verdict(name, False, f"{name}: not yet. {self.replies[letter]}")


@dataclass(frozen=True, kw_only=True)
class Several:
    """An exercise with one answer for each of several items, which are given as a mapping.

    answer: the right value of each item. mistakes: the values that someone who makes one mistake gives, with the reply.
    values: what an item's answer can be.
    """

    question: str
    answer: Callable[[], Mapping[str, Any]]
    mistakes: tuple[Mistake, ...]
    values: tuple[Any, ...]
    hints: tuple[str, str, str]
    because: str

    def grade(self, name: str, answer: Any) -> Verdict:
        """Compare the items, name those that are wrong, and the mistake that explains all of them if there is one."""
        if is_blank(answer):
            return blank(name, self.question)
        right = self.answer()
        if not isinstance(answer, Mapping) or set(answer) != set(right):
            raise MeshwrightError(f"{name} takes a mapping with an answer for each of {'; '.join(right)}")
        if all(is_blank(value) for value in answer.values()):
            return blank(name, self.question)
        for item, value in answer.items():
            if not is_blank(value) and value not in self.values:
                allowed = ", ".join(map(str, self.values))
                raise MeshwrightError(f"{name}: the answer for {item} is one of {allowed}, not {value!r}")
        missed = [item for item, value in right.items() if answer[item] != value]
        if not missed:
            return Verdict(name, True, f"{name}: right. {self.because}")
        lines = [
            f"{name}: {len(right) - len(missed)} of {len(right)} right; look again at",
            *(f"  {i}" for i in missed),
        ]
        for mistake in self.mistakes:
            mistaken = mistake.value()
            if all(answer[item] == mistaken[item] for item in missed):
                return Verdict(name, False, "\n".join([*lines, mistake.reply]))
        return Verdict(name, False, "\n".join([*lines, _ask_hint(name)]))


def is_blank(answer: Any) -> bool:
    """Whether nothing has been answered: `None`, `...` or empty text."""
    return answer is None or answer is ... or (isinstance(answer, str) and not answer.strip())


def blank(name: str, question: str) -> Verdict:
    """Return the verdict on no answer: the question."""
    return Verdict(name, False, f"{name}: not answered yet. {question}", is_blank=True)


def _ask_hint(name: str) -> str:
    return f'hint("{name}") helps.'


def _is_near(number: float, value: float) -> bool:
    return abs(number - value) <= TOLERANCE * abs(value)


def _read_number(name: str, answer: Any, unit: Unit) -> float:
    """Return a number, given as one or as text with its unit. Raises an error that says how to write it."""
    if isinstance(answer, str):
        text = answer.strip()
        try:
            if unit == "s":
                return parse_seconds(text)
            if unit == "B":
                return parse_count(text.removesuffix("B").rstrip().replace(" ", ""))
            return parse_number(text.replace(",", ""))
        except MeshwrightError as error:
            raise MeshwrightError(f"{name}: {error}") from None
    try:
        return float(answer)
    except (TypeError, ValueError):
        wants = {"": "a number", "s": 'seconds, as 0.00112 or "1.12 ms"', "B": 'bytes, as 64e6 or "64 MB"'}[unit]
        raise MeshwrightError(f"{name} takes {wants}, not {answer!r}") from None
