"""Read a YAML file of option names with values, for options that were not typed."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError


class Entry(NamedTuple):
    """An option in a file: its name with underscores, its values as text, and its position (file and line)."""

    name: str
    values: tuple[str, ...]
    where: str


def read_config_file(path: Path, known: Collection[str]) -> list[Entry]:
    """Return the options of a file except null and false ones; for a plan's file, one option `model`: its path.

    known: the option names, with `model`. A list is several values; a mapping is several values NAME=VALUE, joined by
    commas if the option takes one text; true is an option without value.

    Raises:
        MeshwrightError: the file cannot be read, or a name is unknown; the message suggests the nearest one.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise MeshwrightError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise MeshwrightError(f"{where} is not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise MeshwrightError(f"{path} has no options; it is YAML, NAME: VALUE on each line, as `steps: 200`")
    if any(key.value == "meshwright_plan" for key, _ in root.value):
        return [Entry("model", (str(path),), str(path))]
    found: dict[str, Entry] = {}
    for key, value in root.value:
        where, name = f"{path}, line {key.start_mark.line + 1}", str(key.value).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; `meshwright train --help` lists what there is"
            raise MeshwrightError(f"{where}: there is no option {key.value!r}{hint}")
        if name in found:
            raise MeshwrightError(f"{where}: {name} is given twice; leave one out")
        if (values := _values(value, where, name)) is not None:
            found[name] = Entry(name, values, where)
    return [*found.values()]


def _values(node: Any, where: str, name: str) -> tuple[str, ...] | None:
    """Return an option's values as text, as written (`4M` stays `4M`); () for true, None for null and false."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        if node.tag.endswith(":null") or (node.tag.endswith(":bool") and node.value.lower() == "false"):
            return None
        return () if node.tag.endswith(":bool") and node.value.lower() == "true" else (node.value,)
    pairs = [(None, each) for each in node.value] if isinstance(node, yaml.SequenceNode) else node.value
    if not all(isinstance(part, yaml.ScalarNode) for pair in pairs for part in pair if part is not None):
        raise MeshwrightError(f"{where}: {name} holds lists or mappings within another; it takes values alone")
    return tuple(value.value if key is None else f"{key.value}={value.value}" for key, value in pairs)
