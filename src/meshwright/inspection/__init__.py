"""What is wrong with a compiled program, and the inspection of any JAX function that finds it."""

from meshwright.inspection.find import find
from meshwright.inspection.finding import Finding, FindingKind
from meshwright.inspection.inspect import inspect, inspect_named, inspect_text
from meshwright.inspection.inspection import Inspection
from meshwright.inspection.subject import Rules, Subject

__all__ = [
    "Finding",
    "FindingKind",
    "Inspection",
    "Rules",
    "Subject",
    "find",
    "inspect",
    "inspect_named",
    "inspect_text",
]
