"""The extras of the distribution: packages that only some commands need, and the one line for where they are missing.

Which packages an extra brings is read from the installed distribution's metadata, which has it from pyproject.toml.
"""

from __future__ import annotations

import re
from functools import cache

from meshwright.errors import MeshwrightError

_MODULES = {"orbax-checkpoint": "orbax.checkpoint"}
"""Modules whose names are not their distribution's with `_` for `-`."""

_OF_EXTRA = re.compile(r"""([\w.-]+)[^;]*; *extra *== *["']([\w-]+)["']""")
"""A requirement of an extra on all platforms. One with more markers may not be needed here, so it is not looked for."""


def require_extra(what: str, *extras: str) -> None:
    """Raise where a package is missing from each of some extras; nothing is imported.

    Args:
        what: the command or function that needs them, for the message.
        extras: any one of them is enough; the message names the first.
    """
    missing = [[package for package in _packages().get(extra, ()) if not _is_installed(package)] for extra in extras]
    if all(missing):
        raise _error(what, extras[0], missing[0])


def missing_extra(what: str, error: ModuleNotFoundError) -> MeshwrightError | None:
    """Return the error for an import that failed because an extra is not installed; None if no extra has the module."""
    wanted = (error.name or "").partition(".")[0]
    for extra, packages in _packages().items():
        if found := [package for package in packages if _module(package).partition(".")[0] == wanted]:
            return _error(what, extra, found)
    return None


def _error(what: str, extra: str, packages: list[str]) -> MeshwrightError:
    names = ", ".join(packages[:2]) + (f" and {len(packages) - 2} more" if len(packages) > 2 else "")
    return MeshwrightError(f"{what} needs pip install meshwright[{extra}]; not installed: {names}")


@cache
def _packages() -> dict[str, list[str]]:
    """The distributions that each extra brings by itself, in pyproject.toml's order; empty in a tree not installed."""
    from importlib.metadata import PackageNotFoundError, requires  # A plan does not wait for it.

    try:
        requirements = requires("meshwright") or []
    except PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for requirement in requirements:
        if (match := _OF_EXTRA.fullmatch(requirement)) and match[1] != "meshwright":
            found.setdefault(match[2], []).append(match[1])
    return found


def _module(package: str) -> str:
    """The module that a distribution is imported as."""
    return _MODULES.get(package, package.replace("-", "_"))


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(_module(package)) is not None
    except ModuleNotFoundError:  # The package that a submodule is in.
        return False
