"""The pages of the site that are made from the code: commands, chips, and the Python API."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, is_typeddict

from documents import Page

import meshwright
from meshwright.cli.main import COMMANDS, SEVERAL_KINDS, command_module
from meshwright.cli.words.help import help_sections
from meshwright.cli.words.options import declared_words
from meshwright.options import keywords


def command_pages(folder: str) -> Iterator[Page]:
    """Yield a page for each command: usage, every argument and option, examples."""
    for name in COMMANDS:
        yield Page(f"{folder}/{name.replace(' ', '-')}", text=_command(name))


def command_table() -> str:
    """Return the table of commands, each with the link to its page."""
    rows = [f"| [`{name}`]({name.replace(' ', '-')}.md) | {what} |" for name, what in COMMANDS.items()]
    return "\n".join(["| `meshwright …` | |", "| --- | --- |", *rows])


def chip_pages(folder: str) -> Iterator[Page]:
    """Yield a page for each chip: every figure, and where it is from."""
    for chip in meshwright.chips().chips:
        yield Page(f"{folder}/{chip.name}", title=f"{chip.name}: {chip.title}", text=_chip(chip.name))


def api_pages(folder: str) -> Iterator[Page]:
    """Yield a page for each public name, and one for the keywords that several functions take."""
    for name in _public():
        yield Page(f"{folder}/{name}", title=f"`{name}`", text=_api(name))
    text = [
        "`plan`, `verify`, `train` and `serve` take these as keywords, `**options`. They are the options of the"
        " commands, with `_` for `-`.",
        *_keyword_groups(),
    ]
    yield Page(f"{folder}/options", title="Keywords of several functions", text="\n\n".join(text))


def api_table() -> str:
    """Return the table of public names, each with the first line of its docstring."""
    rows = []
    for name in _public():
        first = " ".join((inspect.getdoc(getattr(meshwright, name)) or "").split("\n\n")[0].split())
        rows.append(f"| [`{name}`]({name}.md) | {first.replace('|', ' ')} |")
    return "\n".join(["| `meshwright.…` | |", "| --- | --- |", *rows])


def _public() -> list[str]:
    return [name for name in meshwright.__all__ if name != "__version__"]


def _command(name: str) -> str:
    """Return a command's page; a command of several kinds has a section for each."""
    module = command_module(name)
    kinds = module.KINDS if name in SEVERAL_KINDS else {"": module.Args}
    parts = [f"# meshwright {name}"]
    for place, (kind, args) in enumerate(kinds.items()):
        if kind:
            parts.append(f"## {kind[:1].upper()}{kind[1:]}")
        parts.append(inspect.cleandoc(args.__doc__ or ""))
        words = " ".join(word.name if word.is_needed else f"[{word.name}]" for word in declared_words(args)[1])
        parts.append(f"```text\nmeshwright {name} [OPTIONS] {words}".rstrip() + "\n```")
        for title, rows in help_sections(args).items():
            heading, _, more = title.partition(". ")
            parts.append(f"{'###' if kind else '##'} {heading[:1].upper()}{heading[1:]}".rstrip("."))
            parts += [_escaped(more)] if more else []
            parts += [_option(label, text, name, has_target=place == 0) for label, text in rows]
    parts.append("## Examples\n\n```text\n" + "\n".join(module.EXAMPLES) + "\n```")
    return "\n\n".join(parts)


def _option(label: str, text: str, command: str, *, has_target: bool) -> str:
    """Return an option as an entry of a definition list; the first kind's can be linked to."""
    anchor = re.match(r"(?:-\w, )?(--[\w-]+)", label)
    target = f"({command.replace(' ', '-')}{anchor[1]})=\n" if anchor and has_target else ""
    return f"{target}`{label}`\n: {_escaped(text)}"


def _escaped(text: str) -> str:
    """Return help text as Markdown that shows it as it is."""
    return re.sub(r"([\\*_`<>\[\]{}|])", r"\\\1", text)


def _chip(name: str) -> str:
    """Return the screen of a chip, as `meshwright chips NAME` prints it."""
    screen = str(meshwright.chips(name))
    return f"```text\n$ meshwright chips {name}\n\n{screen}\n```"


def _api(name: str) -> str:
    """Return the page of a public name; a function's has the classes that it returns too."""
    found = getattr(meshwright, name)
    if inspect.isclass(found):
        return _autodoc("class", f"meshwright.{name}")
    parts = [_autodoc("function", f"meshwright.{name}")]
    for returned in _returned(found):
        if returned.__name__ in meshwright.__all__:
            parts.append(f"It returns a [`{returned.__name__}`]({returned.__name__}.md).")
        else:
            parts.append(f"## What it returns: `{returned.__name__}`")
            parts.append(_autodoc("class", f"{returned.__module__}.{returned.__name__}"))
    if "options" in inspect.signature(found).parameters:
        parts.append("The keywords that `**options` takes are [listed here](options.md).")
    return "\n\n".join(parts)


def _autodoc(kind: str, name: str) -> str:
    members = "" if kind == "function" else "\n   :members:\n   :inherited-members: object, tuple, dict, Exception\n"
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}{members}\n```"


def _returned(function: Any) -> Iterator[type]:
    """Yield the classes of meshwright that a function's annotation says it returns."""
    module = inspect.getmodule(function)
    assert module is not None
    homes = {
        alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    for word in dict.fromkeys(re.findall(r"\w+", str(function.__annotations__.get("return", "")))):
        value = getattr(importlib.import_module(homes[word]) if word in homes else module, word, None)
        if inspect.isclass(value) and value.__module__.startswith("meshwright."):
            yield value


def _keyword_groups() -> Iterator[str]:
    """Yield a section for each group of keywords: its own, and the names of the groups whose keywords it has too."""
    groups = {name: value for name, value in vars(keywords).items() if is_typeddict(value)}
    for name, group in groups.items():
        within = [one for one, other in groups.items() if other.__annotations__.keys() < group.__annotations__.keys()]
        also = f"Also all of {', '.join(f'[{one}](#{one.lower()})' for one in within)}." if within else ""
        yield "\n\n".join([f"## {name}", also, _autodoc("class", f"meshwright.options.keywords.{name}")])
