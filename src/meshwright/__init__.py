"""Plan, prove, run and show sharded computation in JAX.

    import meshwright as mw

    plan = mw.plan("llama3-8b", on="v5p:4x4x4", batch=512, seq_len=8192)
    mesh, rules = plan.mesh(), plan.rules

Public names are imported on first use: planning needs no JAX, so it does not wait for its import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.description.hardware.system import System
    from meshwright.description.step.strategy import Strategy
    from meshwright.description.step.workload import Workload
    from meshwright.errors import MeshwrightError
    from meshwright.execution.loading.library import load
    from meshwright.execution.models.generation.sampling import Sampling
    from meshwright.execution.models.inference.loaded import Chat
    from meshwright.execution.training.library import train
    from meshwright.mesh import MeshShape
    from meshwright.pictures.answers.cases import matmul_cases
    from meshwright.pictures.answers.chips import chips
    from meshwright.pictures.answers.collective import collective
    from meshwright.pictures.answers.devices import devices
    from meshwright.pictures.answers.matmul import matmul
    from meshwright.pictures.answers.pipeline import pipeline
    from meshwright.pictures.report import report
    from meshwright.pictures.showing import show
    from meshwright.planning.library import plan
    from meshwright.planning.plan import Plan
    from meshwright.proof.inspection.functions import inspect
    from meshwright.proof.program_plans.fit.library import fit
    from meshwright.proof.programs.apply import apply
    from meshwright.proof.verification.library import verify
    from meshwright.record import Record
    from meshwright.serving.library import serve

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
    "apply",
    "chips",
    "collective",
    "devices",
    "fit",
    "inspect",
    "load",
    "matmul",
    "matmul_cases",
    "pipeline",
    "plan",
    "report",
    "serve",
    "show",
    "train",
    "verify",
]

_HOMES = {
    "Chat": "meshwright.execution.models.inference.loaded",
    "MeshShape": "meshwright.mesh",
    "MeshwrightError": "meshwright.errors",
    "Plan": "meshwright.planning.plan",
    "Record": "meshwright.record",
    "Sampling": "meshwright.execution.models.generation.sampling",
    "Strategy": "meshwright.description.step.strategy",
    "System": "meshwright.description.hardware.system",
    "Workload": "meshwright.description.step.workload",
    "apply": "meshwright.proof.programs.apply",
    "chips": "meshwright.pictures.answers.chips",
    "collective": "meshwright.pictures.answers.collective",
    "devices": "meshwright.pictures.answers.devices",
    "fit": "meshwright.proof.program_plans.fit.library",
    "inspect": "meshwright.proof.inspection.functions",
    "load": "meshwright.execution.loading.library",
    "load_ipython_extension": "meshwright.proof.inspection.magic",
    "matmul": "meshwright.pictures.answers.matmul",
    "matmul_cases": "meshwright.pictures.answers.cases",
    "pipeline": "meshwright.pictures.answers.pipeline",
    "plan": "meshwright.planning.library",
    "report": "meshwright.pictures.report",
    "serve": "meshwright.serving.library",
    "show": "meshwright.pictures.showing",
    "train": "meshwright.execution.training.library",
    "verify": "meshwright.proof.verification.library",
}
"""The module to import each name from: the public names, and the function that `%load_ext meshwright` calls."""


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the module's names, including public names that are not loaded yet."""
    return sorted({*globals(), *__all__})
