"""Names in backticks, in documents and in the source's own docstrings, are those of something that is there."""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import meshwright

ROOT = Path(__file__).parents[1]
SOURCE = Path(meshwright.__file__).parent
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}
WINGS = ("description", "execution", "proof", "planning")
# Names in prose begin with the package, without its wing.
MODULES |= {
    name.partition(".")[2]: path for name, path in MODULES.items() if name.split(".")[0] in WINGS and "." in name
}
TOPS = {name.split(".")[0] for name in MODULES}
DOCUMENTS = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if path.name != "CHANGELOG.md"]
"""But for the one whose names were there once."""

FILES = {path.name for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")}

NAME = re.compile(r"`([A-Za-z_][\w./]*)(?:\(\))?`")


@cache
def defined(path: Path) -> set[str]:
    """What a module defines, or has imported."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {getattr(target, "id", "") for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            found.add(getattr(node.target, "id", ""))
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def is_there(name: str) -> bool:
    """Whether a name that looks like one of ours, a file or a dotted name from a package on, leads somewhere."""
    if name.endswith(".py"):
        return "NAME" in name or name == ".py" or Path(name).name in FILES
    parts = name.removeprefix("meshwright.").split(".")
    if "/" in name or len(parts) < 2 or parts[0] not in TOPS:
        return True
    for end in range(len(parts), 0, -1):
        if path := MODULES.get(".".join(parts[:end])):
            return len(parts) == end or parts[end] in defined(path)
    return False


def test_names_in_documents_are_there():
    wrong = [
        f"{path.relative_to(ROOT)}: {name[1]}"
        for path in DOCUMENTS
        for name in NAME.finditer(path.read_text())
        if not is_there(name[1])
    ]
    assert wrong == []


OTHERS = {"_fsdp_collectives.py", "axlearn/cloud/gcp/measurement.py", "jax/_src/cudnn/fused_attention_stablehlo.py"}
"""Files of other projects that constants are from."""

VARIABLES = {"inference.implementation"}


def test_names_in_the_source_are_there():
    wrong = [
        f"{path.relative_to(ROOT)}: {name[1]}"
        for path in MODULES.values()
        for name in NAME.finditer(path.read_text())
        if name[1] not in OTHERS | VARIABLES and not is_there(name[1])
    ]
    assert wrong == []


PROSE = re.compile(r" *[a-z`(]")
NO_PROSE = re.compile(r" *(>>>|\.\.\.|\$|-|[\w, ]+:|\w+ = |.*\S  )")


def broken_lines(text: str) -> list[str]:
    """Lines of a docstring that end long before the next word would have been too much: what a bad reflow leaves."""
    found = []
    for line, after in pairwise(text.splitlines()):
        is_prose = PROSE.match(after) and not NO_PROSE.match(line) and not NO_PROSE.match(after)
        if line.strip() and is_prose and len(line) + len(after.split()[0]) < 90 and line.rstrip()[-1] not in ".:":
            found.append(line)
    return found


def test_docstrings_are_filled_lines():
    wrong = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for line in broken_lines(ast.get_docstring(node) or "")
    ]
    assert wrong == []


def test_a_broken_line_is_seen():
    assert broken_lines("What it is, and how many there are in all; of\none\n    head each.") != []
    assert broken_lines("Args:\n    one: a thing.\n    two: another.") == []
