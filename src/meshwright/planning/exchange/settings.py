"""The options of a settings file while it is read: each option is read once, and its meaning is recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from meshwright.description.hardware.system import System
from meshwright.description.step.model import Model
from meshwright.errors import MeshwrightError, did_you_mean, near_names
from meshwright.planning.exchange.files import is_variable
from meshwright.planning.exchange.tables import OptionTable, named_options


@dataclass(frozen=True)
class Meaning:
    """The meaning of another framework's option in meshwright."""

    option: str
    value: Any
    ours: str  # The fields of a plan that it sets, such as `dp=1, fsdp=8`.
    is_typed: bool = True  # Whether the file has the option; if not, `value` is the framework's default.

    @property
    def theirs(self) -> str:
        """The option and its value as text, `ici_fsdp_parallelism = -1`."""
        text = self.option if self.value is True else f"{self.option} = {self.value}"
        return text if self.is_typed else f"({text})"


class Settings:
    """The options of a settings file while it is read, and the fields of a plan that they have set so far.

    left: values of the options that are not yet read, by option. typed: the options in the file. fields: values of a
    plan's fields, by field (`plan_fields`). meanings: the meanings of the options read so far.
    """

    def __init__(self, table: OptionTable, values: Mapping[str, Any], system: System) -> None:
        self.table = table
        self.left = dict(values)
        self.typed = set(values)
        self.system = system
        self.fields: dict[str, Any] = {}
        self.meanings: list[Meaning] = []
        self.model: Model | None = None

    def shown(self, option: str) -> str:
        """Return the option as a user of the framework types it: with dashes, if it is a flag."""
        return f"--{option}" if self.table.format == "flags" else option

    def refusal(self, option: str, why: str) -> MeshwrightError:
        """Return the error for an option that cannot be read; why: continues the sentence after the option's name."""
        return MeshwrightError(f"{self.table.title}: {self.shown(option)} {why}")

    def take(self, option: str, default: Any = None) -> Any:
        """Return the value of an option and mark the option as read; `default` if it is not in the file."""
        value = self.left.pop(option, default)
        if is_variable(value):
            raise self.refusal(option, f"is {value}, a variable of a shell; write its value")
        return default if value is None or value in ("None", "null") else value

    def text(self, option: str, default: str = "") -> str:
        """Return the value of an option as text; `default` if it is not in the file."""
        return str(self.take(option, default))

    def names(self, option: str) -> list[str]:
        """Return the value of an option that is a list of names; [] if it is not in the file."""
        value = self.take(option, [])
        if not isinstance(value, list):
            raise self.refusal(option, f"is {value!r}; it takes a list")
        return [str(name) for name in cast(list[Any], value)]

    def number(self, option: str, default: float | None = None) -> float:
        """Return the value of a numeric option. Raises if it is not a number, or missing without a default."""
        value = self.take(option, default)
        if value is None:
            raise self.refusal(option, "is missing")
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
        if isinstance(value, bool) or not math.isfinite(found):
            raise self.refusal(option, f"is {value!r}; it takes a number")
        return int(found) if found.is_integer() and "." not in str(value) else found

    def whole(self, option: str, default: int | None = None) -> int:
        """Return the value of an integer option. Raises as `number` does."""
        value = self.number(option, default)
        if value != int(value):
            raise self.refusal(option, f"is {value}; it takes a whole number")
        return int(value)

    def flag(self, option: str) -> bool:
        """Return whether an option is on; False if it is not in the file."""
        value = self.take(option, False)
        if str(value).lower() not in ("true", "false"):
            raise self.refusal(option, f"is {value!r}; it takes true or false")
        return str(value).lower() == "true"

    def add(self, values: Mapping[str, Any]) -> None:
        """Add options that were given inside the value of another option."""
        self.left |= values
        self.typed |= values.keys()

    def means(self, option: str, value: Any, ours: str) -> None:
        """Record what an option means: `ours`, the fields that it sets. A default is recorded too, unless it is 1."""
        if option in self.typed or value != 1:
            self.meanings.append(Meaning(self.shown(option), value, ours, is_typed=option in self.typed))

    def quotient(self, what: str, whole: int, by: int) -> int:
        """Return whole / by. Raises unless that is a whole number above 0. what: names both numbers in the error."""
        if by < 1 or whole % by or whole < 1:
            raise MeshwrightError(f"{self.table.title}: {what}: {whole:,} does not divide by {by:,}")
        return whole // by

    def take_without_effect(self) -> dict[str, list[str]]:
        """Mark as read the options that have no effect on a step; return their names, by the reason."""
        found: dict[str, list[str]] = {}
        for reason, patterns in self.table.nothing.items():
            for option in [name for name in self.left if any(fnmatchcase(name, pattern) for pattern in patterns)]:
                del self.left[option]
                found.setdefault(reason, []).append(self.shown(option))
        return found

    def take_single_valued(self) -> None:
        """Mark as read the options for which only one value is supported. Raises if an option has another value."""
        for option, (needed, why) in self.table.only.items():
            if option in self.left and not same(value := self.take(option, needed), needed):
                raise self.refusal(option, f"is {value}: {why}")

    def check_all_known(self) -> None:
        """Raise if an option of the file has not been read, because it is unknown."""
        if self.left:
            option = next(iter(self.left))
            hint = did_you_mean(self.shown(name) for name in near_names(option, named_options(self.table)))
            raise self.refusal(
                option, f"is not read; {hint}leave it out of the file if it changes nothing of a step's time and memory"
            )


def same(value: Any, other: Any) -> bool:
    """Whether two values of an option are equal, however they are written: `true` equals True, and 1 equals 1.0."""
    try:
        return float(value) == float(other) and isinstance(value, bool) == isinstance(other, bool)
    except (TypeError, ValueError):
        return str(value).lower() == str(other).lower()
