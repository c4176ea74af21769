"""Compare a plan with the program that its compiler makes, and with a measured run."""

from meshwright.verification.compare import Row, StaticOverhead, compare, in_plans_terms
from meshwright.verification.differences import Cause, Difference
from meshwright.verification.verify import Verification, static_overhead, verify, verify_all

__all__ = [
    "Cause",
    "Difference",
    "Row",
    "StaticOverhead",
    "Verification",
    "compare",
    "in_plans_terms",
    "static_overhead",
    "verify",
    "verify_all",
]
