"""Exercises with a number or a choice as their answer, and the verdict that grading returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from meshwright.errors import MeshwrightError
from meshwright.units import parse_bytes, parse_number, parse_seconds

TOLERANCE = 0.02
"""The relative error up to which a number counts as right: readers round to three digits, also intermediate results."""

Unit = Literal["", "s", "B"]


@dataclass(frozen=True)
class Verdict:
    """The result of grading an answer. is_blank: nothing has been answered yet. text: printed for the reader."""

    name: str
    is_right: bool
    text: str
    is_blank: bool = False


VERDICTS: list[Verdict] = []
"""The verdicts of this process, in the order of its checks: `meshwright learn --check` counts them."""


class Exercise(Protocol):
    """An exercise: a question, three hints from vague to nearly complete, and a method that grades an answer."""

    @property
    def question(self) -> str:
        """The question."""
        ...

    @property
    def hints(self) -> tuple[str, str, str]:
        """Three hints."""
        ...

    def grade(self, name: str, answer: Any) -> Verdict:
        """Return the verdict on an answer. It never reveals the right answer."""
        ...


class Mistake(NamedTuple):
    """A common wrong answer: a function that computes it, and the reply to it."""

    value: Callable[[], Any]
    reply: str


@dataclass(frozen=True, kw_only=True)
class Number:
    """An exercise whose answer is a number.

    answer: computes the right number. mistakes: common wrong answers, each with its reply. unit: with `s` or `B`, an
    answer can be text such as "1.12 ms" or "64 MB". because: the explanation, shown after a right answer.
    """

    question: str
    answer: Callable[[], float]
    mistakes: tuple[Mistake, ...]
    hints: tuple[str, str, str]
    because: str
    unit: Unit = ""

    def grade(self, name: str, answer: Any) -> Verdict:
        """Compare a number with the right answer, then with each known mistake."""
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

    options: the statements by letter. answer: the letter of the true one. replies: for each other letter, why it is
    wrong. because: the explanation, shown after a right answer.
    """

    question: str
    options: Mapping[str, str]
    answer: str
    replies: Mapping[str, str]
    hints: tuple[str, str, str]
    because: str

    def grade(self, name: str, answer: Any) -> Verdict:
        """Compare a letter with the answer. Raises if it is not one of the options."""
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
    """An exercise whose answer is a mapping with a value for each of several items.

    answer: returns the right value of each item. mistakes: for each common misunderstanding, the values that it leads
    to, and its reply. values: the values that an item can have.
    """

    question: str
    answer: Callable[[], Mapping[str, Any]]
    mistakes: tuple[Mistake, ...]
    values: tuple[Any, ...]
    hints: tuple[str, str, str]
    because: str

    def grade(self, name: str, answer: Any) -> Verdict:
        """Compare the items; name the wrong ones, and the known mistake that explains all wrong items, if any.

        Raises:
            MeshwrightError: an item has no answer, or one that is not among the values.
        """
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
    """Return the verdict for a missing answer, which repeats the question."""
    return Verdict(name, False, f"{name}: not answered yet. {question}", is_blank=True)


def _ask_hint(name: str) -> str:
    return f'hint("{name}") helps.'


def _is_near(number: float, value: float) -> bool:
    return abs(number - value) <= TOLERANCE * abs(value)


def _read_number(name: str, answer: Any, unit: Unit) -> float:
    """Return the answer as a number, also from text such as "1.12 ms". Raises an error that shows accepted forms."""
    if isinstance(answer, str):
        text = answer.strip()
        try:
            if unit == "s":
                return parse_seconds(text)
            if unit == "B":
                return parse_bytes(text)
            return parse_number(text.replace(",", ""))
        except MeshwrightError as error:
            raise MeshwrightError(f"{name}: {error}") from None
    try:
        return float(answer)
    except (TypeError, ValueError):
        wants = {"": "a number", "s": 'seconds, as 0.00112 or "1.12 ms"', "B": 'bytes, as 64e6 or "64 MB"'}[unit]
        raise MeshwrightError(f"{name} takes {wants}, not {answer!r}") from None
