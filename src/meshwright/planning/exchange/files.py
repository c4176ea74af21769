"""Read and write settings files: YAML, TOML or a list of flags, as a mapping from option to value.

In YAML and TOML the name of an option includes its sections, joined by dots.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from meshwright.errors import MeshwrightError
from meshwright.planning.exchange.tables import Format

Values = dict[str, Any]
"""Values by option. In a list of flags, the value of a flag is text; a flag without a value is True."""

_FLAG = re.compile(r"--[A-Za-z][\w.-]*")


def read_values(path: Path) -> tuple[Format, Values]:
    """Return the format of a settings file, detected from its contents, and its values by option.

    Raises:
        MeshwrightError: the file cannot be read, or has no settings.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MeshwrightError(f"cannot read {path}: {error}") from None
    if any(re.search(r"(?:^|\s)--[A-Za-z]", line) for line in text.splitlines() if not line.lstrip().startswith("#")):
        return "flags", _read_flags(text, path)
    try:
        return "toml", _flat(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        if path.suffix == ".toml":
            raise MeshwrightError(f"{path} is not TOML: {error}") from None
    import yaml  # Imported late: 0.1 s that other formats do not need.

    try:
        data = yaml.load(text, _loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MeshwrightError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict) or not data:
        raise MeshwrightError(f"{path} has no settings: it is neither YAML, nor TOML, nor a list of --flags")
    return "yaml", _flat(cast(dict[Any, Any], data))


def write_values(values: Mapping[str, Any], kind: Format) -> str:
    """Return options as the text of a settings file; in YAML and TOML a dot in an option's name starts a section."""
    if kind == "flags":
        lines = (f"--{name}" if value is True else f"--{name} {value}" for name, value in values.items())
        return "".join(f"{line}\n" for line in lines)
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        sections.setdefault(section, {})[last] = value
    if kind == "toml":
        texts = (
            (f"[{name}]\n" if name else "")
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
            for name, section in sections.items()
        )
        return "\n".join(texts)
    import yaml

    nested: dict[str, Any] = {}
    for name, section in sections.items():
        inner = nested
        for part in name.split(".") if name else ():
            inner = inner.setdefault(part, {})
        inner.update(section)
    return yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)


def _read_flags(text: str, path: Path) -> Values:
    """Return the flags of an argument list or a shell script; lines without flags are skipped."""
    values: Values = {}
    joined = re.sub(r"\\\n", " ", text)
    for line in joined.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise MeshwrightError(f"{path}: {line.strip()[:60]!r} is not a line of a shell: {error}") from None
        first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
        name = ""
        for word in words[first:]:
            option, equals, value = word.partition("=")
            if _FLAG.fullmatch(option):
                name = option[2:]
                if name in values:
                    raise MeshwrightError(f"{path} has --{name} twice; leave one out")
                values[name] = value if equals else True
            elif name and values[name] is True:
                values[name] = word
            elif name and not equals and re.fullmatch(r"[\w.,:/-]+", word):
                values[name] = f"{values[name]} {word}"  # A flag with several values, as Megatron's --data-path.
            elif re.fullmatch(r"[|&;)]+\S*", word):
                break
            else:
                raise MeshwrightError(f"{path} has {word!r} behind --{name}, which is neither an option nor its value")
    for name, value in values.items():
        if isinstance(value, str) and "$" in value and re.search(r"\$\W?\w", value):
            values[name] = _Variable(value)
    return values


class _Variable(str):
    """A value that is a shell variable, which is accepted only for options that do not affect a step."""


def is_variable(value: object) -> bool:
    """Whether a value is a shell variable, such as `$TP_SIZE`."""
    return isinstance(value, _Variable)


def _flat(data: Mapping[Any, Any], prefix: str = "") -> Values:
    """Flatten nested data; names of sections are joined by dots."""
    values: Values = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            values |= _flat(value, f"{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            values[name] = value
    return values


def _loader() -> Any:
    """Return a YAML loader that reads 1e-5 as a number; PyYAML reads it as text."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+")
    loader: Any = Loader
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return loader
