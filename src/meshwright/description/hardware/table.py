"""Read tables of a TOML file field by field. Errors name the file, the field and valid values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, near_names

# tomllib is imported where it is used, so that importing the package stays fast.


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises OSError if it cannot be read, ValueError if it is not TOML."""
    import tomllib

    return tomllib.loads(path.read_text())


LEAST = 1e6
"""The smallest valid number of bytes, bytes per second or flops per second: smaller ones were meant in GB or TB."""


class Table:
    """A table of a TOML file. Methods read fields and raise for invalid values; `close` raises for unread fields."""

    def __init__(self, data: dict[str, Any], *, file: str, name: str = "") -> None:
        self.data, self.file, self.name = data, file, name
        self.asked: list[str] = []

    def get(self, field: str, default: Any = ...) -> Any:
        """Return the value of a field. Raises if it is absent and there is no default."""
        self.asked.append(field)
        value = self.data.get(field, default)
        if value is ...:
            raise self.error(field, "is missing")
        return value

    def error(self, field: str, reason: str) -> MeshwrightError:
        """Return an error that names file, table and field."""
        place = f"[{self.name}] {field}" if self.name else field
        return MeshwrightError(f"{self.file}: {place} {reason}")

    def number(self, field: str, default: Any = ...) -> float:
        """Return a positive number, or the default."""
        value = self.get(field, default)
        if value is default and default is not ...:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(field, f"= {value!r}; it takes a positive number, such as 4.5e11")
        return float(value)

    def amount(self, field: str, default: Any = ...) -> float:
        """Return a number of bytes, of bytes per second or of flops per second, or the default.

        Raises if the number is so small that it must be in GB or TB.
        """
        value = self.number(field, default)
        if value is not None and value < LEAST:
            raise self.error(field, f"= {value:g}; that is a figure in GB or TB: write it out, as 4.5e11 for 450 GB")
        return value

    def whole(self, field: str, default: Any = ...) -> int:
        """Return a whole number of at least 1, or the default."""
        value = self.get(field, default)
        if value is default and default is not ...:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, f"= {value!r}; it takes a whole number from 1")
        return value

    def text(self, field: str, choices: tuple[str, ...] = (), default: Any = ...) -> Any:
        """Return a non-empty text, one of `choices` if there are any, or the default."""
        value = self.get(field, default)
        if value is default and default is not ...:
            return value
        if not isinstance(value, str) or not value or (choices and value not in choices):
            right = f"one of {', '.join(choices)}" if choices else "a text"
            raise self.error(field, f"= {value!r}; it takes {right}")
        return value

    def flag(self, field: str) -> bool:
        """Return a boolean field; false if it is absent."""
        value = self.get(field, False)
        if not isinstance(value, bool):
            raise self.error(field, f"= {value!r}; it takes true or false")
        return value

    def sizes(self, field: str, *, rank: int | None = None) -> tuple[int, ...]:
        """Return a list of whole numbers of at least 1. rank: how many there must be; None for any number."""
        return self._sizes(field, self.get(field), rank)

    def shapes(self, field: str, *, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return a list of shapes, each of which is a list of `rank` whole numbers of at least 1."""
        value = self.get(field)
        if not isinstance(value, list) or not value:
            raise self.error(field, f"= {value!r}; it takes a list of shapes, such as [[2, 2], [4, 4]]")
        return tuple(self._sizes(field, shape, rank) for shape in value)

    def _sizes(self, field: str, value: Any, rank: int | None) -> tuple[int, ...]:
        """Return `value`, a field or a part of it, as a tuple. Raises unless it is a list of sizes of length `rank`."""
        is_list = isinstance(value, list) and bool(value)
        if not is_list or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in value):
            raise self.error(field, f"= {value!r}; it takes whole numbers from 1, such as [4, 4]")
        if rank is not None and len(value) != rank:
            raise self.error(field, f"= {value!r}; it takes {rank} numbers, as max_slice has")
        return tuple(value)

    def table(self, field: str) -> Table:
        """Return a table inside this one; empty if absent."""
        value = self.get(field, {})
        if not isinstance(value, dict):
            raise self.error(field, f"= {value!r}; it takes a table, [{field}]")
        return Table(value, file=self.file, name=field)

    def tables(self, field: str) -> list[Table]:
        """Return a list of tables; empty if absent."""
        value = self.get(field, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(field, f"= {value!r}; it takes tables, each under [[{field}]]")
        return [Table(item, file=self.file, name=f"{field}.{index}") for index, item in enumerate(value)]

    def close(self) -> None:
        """Raise if the table has a field that was not read."""
        for field in self.data:
            if field not in self.asked:
                near = near_names(field, self.asked)
                right = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(self.asked)}"
                raise self.error(field, f"is not a field; {right}")
