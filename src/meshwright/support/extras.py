"""Optional dependencies (pip extras) of some commands, and the one-line error for a missing one.

The packages of each extra are read from the installed distribution's metadata, which comes from pyproject.toml.
"""

from __future__ import annotations

import re
from functools import cache

from meshwright.errors import MeshwrightError

_MODULES = {"orbax-checkpoint": "orbax.checkpoint"}
"""Import names of the distributions whose import name is not their own with `_` for `-`."""

_OF_EXTRA = re.compile(r"""([\w.-]+)[^;]*; *extra *== *["']([\w-]+)["']""")
"""Pattern of a requirement whose only marker is its extra.

A requirement with further markers, such as a platform, may not apply here, so it is not checked.
"""


@cache  # Of an error nothing is kept: what is installed later is found.
def require_extra(what: str, *extras: str) -> None:
    """Raise unless at least one of the given extras is completely installed; imports nothing.

    Args:
        what: the command or function that needs them, for the message.
        extras: alternatives, of which one suffices; the message names the first.
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
    """Return the packages that each extra itself lists, in pyproject.toml order; empty if meshwright is uninstalled."""
    from importlib.metadata import PackageNotFoundError, requires  # Imported here so that a plan does not wait for it.

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
    """Return the name under which a distribution is imported."""
    return _MODULES.get(package, package.replace("-", "_"))


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(_module(package)) is not None
    except ModuleNotFoundError:  # The package that a submodule is in.
        return False
