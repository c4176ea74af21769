"""From a workload and a system to a mesh: every legal one priced and ranked, and the choice as a plan to keep."""

from meshwright.planner.explain import reason, why
from meshwright.planner.plan import Plan, make_plan, read_plan, write_plan
from meshwright.planner.predict import predict
from meshwright.planner.search import Ranking, find_best, price, rank
from meshwright.planner.sweep import Point, Sweep, read_sweep, run_sweep

__all__ = [
    "Plan",
    "Point",
    "Ranking",
    "Sweep",
    "find_best",
    "make_plan",
    "predict",
    "price",
    "rank",
    "read_plan",
    "read_sweep",
    "reason",
    "run_sweep",
    "why",
    "write_plan",
]
