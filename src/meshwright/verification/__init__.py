"""Compare a plan with the program that its compiler makes, and with a measured run."""

from meshwright.verification.comparison import Row, StaticOverhead, compare, in_plans_terms
from meshwright.verification.differences import Cause, Difference
from meshwright.verification.library import plan_and_measured, verify
from meshwright.verification.plans import Verification, static_overhead, verify_all, verify_plan
from meshwright.verification.profiles import ProfileRow, compare_profile
from meshwright.verification.serving import ServingVerification, verify_serving

__all__ = [
    "Cause",
    "Difference",
    "ProfileRow",
    "Row",
    "ServingVerification",
    "StaticOverhead",
    "Verification",
    "compare",
    "compare_profile",
    "in_plans_terms",
    "plan_and_measured",
    "static_overhead",
    "verify",
    "verify_all",
    "verify_plan",
    "verify_serving",
]
