"""Import a function by name."""

from __future__ import annotations

import importlib
import importlib.util
import site
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import meshwright
from meshwright.errors import MeshwrightError


def is_installed(file: Path) -> bool:
    """Whether a file is part of Python, of an installed package or of meshwright; False for a file of the user."""
    return any(file.resolve().is_relative_to(path) for path in _installed())


@cache
def _installed() -> tuple[Path, ...]:
    own, library = Path(meshwright.__file__).parent, sysconfig.get_paths()["stdlib"]
    return tuple(Path(path).resolve() for path in (*site.getsitepackages(), library, own))


def load_function(name: str) -> Any:
    """Return the function named by `module:function` or `file.py:function`; imports its module or file.

    The file may import other files in its directory.

    Raises:
        MeshwrightError: the import fails, or the module lacks the function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise MeshwrightError(f"{name!r} is not module:function")
    try:
        return getattr(
            _load_file(Path(module)) if module.endswith(".py") else importlib.import_module(module), function
        )
    except ModuleNotFoundError as error:
        raise MeshwrightError(f"cannot import {error.name!r} for {name}; it must be importable where you are") from None
    except AttributeError as error:
        frame = _last_frame(error)
        if frame.startswith(__file__):
            raise MeshwrightError(f"module {module} has no {function!r}; name it as module:function") from None
        raise MeshwrightError(f"importing {module} fails: {error} ({frame})") from error
    except SyntaxError as error:
        raise MeshwrightError(f"{error.filename}:{error.lineno} does not parse: {error.msg}") from None
    except Exception as error:  # A user's module may raise anything while it is imported.
        said = str(error).strip().partition("\n")[0]
        raise MeshwrightError(
            f"importing {module} fails: {type(error).__name__}: {said} ({_last_frame(error)})"
        ) from error


def _load_file(path: Path) -> ModuleType:
    """Import a file and return its module, which has the file's name without `.py`."""
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _last_frame(error: Exception) -> str:
    """Return the innermost file:line of an error's traceback outside installed packages; '' if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if "site-packages" not in one.filename and "importlib" not in one.filename]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
