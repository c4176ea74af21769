"""Import a function by name."""

from __future__ import annotations

import importlib
from typing import Any

from meshwright.errors import MeshwrightError


def load_function(name: str) -> Any:
    """Import `module:function`."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise MeshwrightError(f"cannot import {error.name!r} for {name}; it must be importable where you are") from None
    except AttributeError:
        raise MeshwrightError(
            f"module {module} has no {function or 'function'!r}; name it as module:function"
        ) from None
