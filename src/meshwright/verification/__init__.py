"""A plan beside the program that its compiler makes, and beside a measured run."""

from meshwright.verification.comparison import Row, compare, in_plans_terms
from meshwright.verification.library import plan_and_measured, verify
from meshwright.verification.plans import Verification, verify_all, verify_plan

__all__ = [
    "Row",
    "Verification",
    "compare",
    "in_plans_terms",
    "plan_and_measured",
    "verify",
    "verify_all",
    "verify_plan",
]
