"""Read a script to inspect, without running it or loading JAX."""

from __future__ import annotations

import ast
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import MeshwrightError

_COUNT_FLAG = "--xla_force_host_platform_device_count"


class Script(NamedTuple):
    """A Python file, the name of one of its functions ('' if none is named), and its command-line arguments."""

    file: Path
    name: str
    words: tuple[str, ...]

    def parsed(self) -> ast.Module:
        """Parse the file. Raises if it cannot be read or has a syntax error."""
        try:
            return ast.parse(self.file.read_bytes(), str(self.file))
        except OSError as error:
            raise MeshwrightError(f"cannot read {self.file}: {error.strerror}") from None
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
            raise MeshwrightError(f"{self.file}{line} does not parse: {getattr(error, 'msg', error)}") from None

    def takes_mesh(self, *, has_mesh: bool) -> bool:
        """Whether to call the named function with a mesh, instead of running the script.

        True if the function has one required parameter, and this is named `mesh`, or a mesh is given (`has_mesh`) and
        the function has no decorator: a decorated function is usually the jitted step itself.
        """
        node, required = self._named()
        if node is None or len(required) != 1:
            return False
        return required[0] == "mesh" or (has_mesh and not node.decorator_list)

    def takes_nothing(self) -> bool:
        """Whether the named function has no required parameter and no decorator, as one that returns (step, args)."""
        node, required = self._named()
        return node is not None and not required and not node.decorator_list

    def _named(self) -> tuple[ast.FunctionDef | None, list[str]]:
        """Return the named function's syntax tree and the names of its required parameters; (None, []) without one."""
        for node in self.parsed().body:
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                given = node.args
                required = [*given.posonlyargs, *given.args][: -len(given.defaults) or None]
                by_name = [
                    one for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None
                ]
                return node, [one.arg for one in (*required, *by_name)]
        return None, []


def simulate_devices(count: int) -> None:
    """Set XLA_FLAGS to `count` simulated CPU devices for a script, unless XLA_FLAGS already has a number."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_COUNT_FLAG}={count}".strip()


def read_script(text: str) -> Script | None:
    """Parse `FILE.py[:NAME] [ARGUMENTS…]`; None for other text. Raises if there is no such file."""
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
