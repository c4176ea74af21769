"""Plan, prove, run and show sharded computation in JAX.

    import meshwright as mw

    plan = mw.plan("llama3-8b", on="v5p:4x4x4", batch=512, seq_len=8192)
    mesh, rules = plan.mesh(), plan.rules

Names are loaded when they are first used: planning needs no JAX, and does not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.errors import MeshwrightError
    from meshwright.hardware.system import System
    from meshwright.inference.loaded import Chat
    from meshwright.inspection.functions import inspect
    from meshwright.loading.library import load
    from meshwright.mesh import MeshShape
    from meshwright.models.sampling import Sampling
    from meshwright.planner.library import plan
    from meshwright.planner.plan import Plan
    from meshwright.record import Record
    from meshwright.step.strategy import Strategy
    from meshwright.step.workload import Workload
    from meshwright.training.library import train
    from meshwright.verification.library import verify
    from meshwright.viz.report import report
    from meshwright.viz.showing import show

__version__ = "0.1.0"

__all__ = [
    "Chat",
    "MeshShape",
    "MeshwrightError",
    "Plan",
    "Record",
    "Sampling",
    "Strategy",
    "System",
    "Workload",
    "__version__",
    "inspect",
    "load",
    "plan",
    "report",
    "show",
    "train",
    "verify",
]

_HOMES = {
    "Chat": "meshwright.inference.loaded",
    "MeshShape": "meshwright.mesh",
    "MeshwrightError": "meshwright.errors",
    "Plan": "meshwright.planner.plan",
    "Record": "meshwright.record",
    "Sampling": "meshwright.models.sampling",
    "Strategy": "meshwright.step.strategy",
    "System": "meshwright.hardware.system",
    "Workload": "meshwright.step.workload",
    "inspect": "meshwright.inspection.functions",
    "load": "meshwright.loading.library",
    "plan": "meshwright.planner.library",
    "report": "meshwright.viz.report",
    "show": "meshwright.viz.showing",
    "train": "meshwright.training.library",
    "verify": "meshwright.verification.library",
}
"""The module that each public name is loaded from."""


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """The public names, those not loaded yet too."""
    return sorted({*globals(), *__all__})
