"""A plan beside the program that its compiler makes, and beside a measured run."""

from meshwright.verification.compare import Row, compare, in_plans_terms
from meshwright.verification.verify import Verification, verify, verify_all

__all__ = [
    "Row",
    "Verification",
    "compare",
    "in_plans_terms",
    "verify",
    "verify_all",
]
