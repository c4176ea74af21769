"""What is public: the names of the library, and the help of every command. Changes are meant.

To take new ones: python tests/test_public.py
"""

import contextlib
import io
import pkgutil
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
    "plan import": ["plan", "--import", "llama3.yml"],
    "verify serve": ["verify", "--serve", "decode"],
}


def public_names():
    """Every public name of the library, a line each."""
    return "".join(f"meshwright.{name}\n" for name in meshwright.__all__)


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


def test_the_public_names_are_those_that_were_meant():
    assert public_names() == NAMES.read_text()


@pytest.mark.parametrize("name", HELP)
def test_the_help_of_a_command_is_the_one_that_was_meant(name):
    assert help_of(HELP[name]) == help_file(name).read_text()


def test_no_public_name_hides_a_package():
    assert not set(meshwright.__all__) & {module.name for module in pkgutil.iter_modules([str(ROOT)])}


if __name__ == "__main__":
    NAMES.write_text(public_names())
    for name in HELP:
        help_file(name).parent.mkdir(exist_ok=True)
        help_file(name).write_text(help_of(HELP[name]))
