"""Scripts as the subject of an inspection: their text, read without running it or loading JAX."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import MeshwrightError


class Script(NamedTuple):
    """A Python file, the name of one of its functions ('' if none is named), and its command-line arguments."""

    file: Path
    name: str
    words: tuple[str, ...]

    def parsed(self) -> ast.Module:
        """Parse the file."""
        try:
            return ast.parse(self.file.read_bytes(), str(self.file))
        except OSError as error:
            raise MeshwrightError(f"cannot read {self.file}: {error.strerror}") from None
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
            raise MeshwrightError(f"{self.file}{line} does not parse: {getattr(error, 'msg', error)}") from None

    def takes_mesh(self, *, has_mesh: bool) -> bool:
        """Whether the named function is to be called with a mesh, not taken from a run of the script.

        It is where its only required parameter is called `mesh`, or where a mesh is given and nothing decorates it.
        """
        for node in self.parsed().body:
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                given = node.args
                required = [*given.posonlyargs, *given.args][: -len(given.defaults) or None]
                is_one = len(required) == 1 and None not in given.kw_defaults
                return is_one and (required[0].arg == "mesh" or (has_mesh and not node.decorator_list))
        return False


def read_script(text: str) -> Script | None:
    """Return the script that `FILE.py:NAME ARGUMENTS…` names, the last two optional; None for other texts."""
    try:
        words = [text] if Path(text).is_file() else shlex.split(text)
    except ValueError:  # unbalanced quotes
        return None
    file, _, name = words[0].partition(":") if words else ("", "", "")
    if not file.endswith(".py"):
        return None
    if not Path(file).is_file():
        raise MeshwrightError(f"there is no file {file}")
    return Script(Path(file), name, tuple(words[1:]))
