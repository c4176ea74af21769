"""What is public: the names of the library and of its packages, and the help of every command. Changes are meant.

To take new ones: python tests/test_public.py
"""

import ast
import contextlib
import importlib
import io
import pkgutil
from functools import cache
from pathlib import Path

import pytest

import meshwright
from meshwright.cli.main import COMMANDS, main

ROOT = Path(meshwright.__file__).parent
DATA = Path(__file__).parent / "data"
NAMES = DATA / "public_api.txt"
HELP = {
    **{name: [name] for name in COMMANDS},
    "plan serve": ["plan", "--serve", "decode"],
    "plan images": ["plan", "resnet50"],
    "verify serve": ["verify", "--serve", "decode"],
}
PACKAGES = sorted(module.name for module in pkgutil.iter_modules([str(ROOT)]) if module.ispkg and module.name != "cli")


def public_names():
    """Every public name, a line each: those of the library, then those of its packages."""
    lines = [f"meshwright.{name}" for name in meshwright.__all__]
    for package in PACKAGES:
        module = importlib.import_module(f"meshwright.{package}")
        lines += [f"meshwright.{package}.{name}" for name in getattr(module, "__all__", ())]
    return "\n".join(lines) + "\n"


def help_of(words):
    """The help of a command, 100 columns wide, without colours."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("COLUMNS", "100")
        patch.setenv("NO_COLOR", "1")
        assert main([*words, "--help"]) == 0
    out.seek(0)
    return out.read()


def help_file(name):
    return DATA / "help" / f"{name.replace(' ', '_')}.txt"


@cache
def imported():
    """Every (package, name, importing package) that a file imports from a package of meshwright, tests included."""
    found = set()
    places = [ROOT, DATA.parent, DATA.parents[1] / "benchmarks", DATA.parents[1] / "examples"]
    for path in (path for place in places for path in place.rglob("*.py")):
        here = path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else ""
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwright."):
                found |= {(node.module.split(".", 1)[1], alias.name, here) for alias in node.names}
    return found


def test_the_public_names_are_those_that_were_meant():
    assert public_names() == NAMES.read_text()


@pytest.mark.parametrize("name", HELP)
def test_the_help_of_a_command_is_the_one_that_was_meant(name):
    assert help_of(HELP[name]) == help_file(name).read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_is_used_outside_of_it(package):
    exported = set(getattr(importlib.import_module(f"meshwright.{package}"), "__all__", ()))
    used = {name for source, name, here in imported() if source == package and here != package}
    assert sorted(exported - used - set(meshwright.__all__)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_exported_name_hides_a_module(package):
    exported = set(getattr(importlib.import_module(f"meshwright.{package}"), "__all__", ()))
    modules = {module.name for module in pkgutil.iter_modules([str(ROOT / package)])}
    assert sorted(exported & modules) == []


def test_no_public_name_hides_a_package():
    assert not set(meshwright.__all__) & {module.name for module in pkgutil.iter_modules([str(ROOT)])}


if __name__ == "__main__":
    NAMES.write_text(public_names())
    for name in HELP:
        help_file(name).parent.mkdir(exist_ok=True)
        help_file(name).write_text(help_of(HELP[name]))
