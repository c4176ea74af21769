"""Inspect any JAX function or HLO text: what its compiled program does, and its mistakes."""

from meshwright.inspection.finding import Finding
from meshwright.inspection.functions import inspect, inspect_text
from meshwright.inspection.inspection import Inspection

__all__ = ["Finding", "Inspection", "inspect", "inspect_text"]
