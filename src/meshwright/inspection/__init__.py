"""What is wrong with a compiled program, and the inspection of any JAX function that finds it."""

from meshwright.inspection.finding import Finding
from meshwright.inspection.functions import inspect, inspect_text
from meshwright.inspection.inspection import Inspection

__all__ = ["Finding", "Inspection", "inspect", "inspect_text"]
