"""What is wrong with a compiled program, and the inspection of any JAX function that finds it."""

from meshwright.findings.find import find
from meshwright.findings.finding import Finding, FindingKind
from meshwright.findings.inspect import inspect, inspect_named, inspect_text
from meshwright.findings.inspection import Inspection
from meshwright.findings.subject import Rules, Subject

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
