"""Inspect any JAX function or HLO text: what its compiled program does, and what is wrong with it."""

from meshwright.inspection.context import ProgramContext, Rules
from meshwright.inspection.finding import Finding, FindingKind
from meshwright.inspection.functions import inspect, inspect_text
from meshwright.inspection.inspection import Inspection
from meshwright.inspection.run_checks import run_checks

__all__ = [
    "Finding",
    "FindingKind",
    "Inspection",
    "ProgramContext",
    "Rules",
    "inspect",
    "inspect_text",
    "run_checks",
]
