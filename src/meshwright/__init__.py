"""Plans, proves, runs and shows sharded computation in JAX.

The names below are loaded when they are first used: planning needs no JAX, and must not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.inspection import inspect as inspect
    from meshwright.planner.search import rank as plan
    from meshwright.training.loop import train as train
    from meshwright.verification import verify as verify
    from meshwright.viz import show as show

__all__ = ["inspect", "plan", "show", "train", "verify"]

_HOMES = {
    "inspect": ("meshwright.inspection", "inspect"),
    "plan": ("meshwright.planner", "rank"),
    "show": ("meshwright.viz", "show"),
    "train": ("meshwright.training", "train"),
    "verify": ("meshwright.verification", "verify"),
}


def __getattr__(name: str) -> Any:
    """The public function of that name."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    module, function = _HOMES[name]
    return getattr(importlib.import_module(module), function)
