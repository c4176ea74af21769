"""From a workload and a system to a mesh: every legal one priced and ranked, and the choice as a plan to keep."""

from meshwright.planner.explain import how, reason, why
from meshwright.planner.fit import Fix, lacking_bytes, ways_to_fit
from meshwright.planner.nearby import chips_that_fit, nearby
from meshwright.planner.plan import (
    Plan,
    as_run,
    make_plan,
    plan_from_data,
    plan_to_data,
    read_plan,
    write_plan,
)
from meshwright.planner.predict import predict
from meshwright.planner.rules_of_thumb import rules_of_thumb
from meshwright.planner.search import Ranking, find_best, plan_mesh, plan_stages, rank, rank_space
from meshwright.planner.serving import ServingPoint, ServingRanking, best_prefill, rank_serving
from meshwright.planner.serving_explain import (
    PrefillShare,
    ServingThresholds,
    bound_in_words,
    prefill_share,
    serving_reason,
    thresholds,
    why_serving,
)
from meshwright.planner.serving_plan import (
    ServingPlan,
    make_serving_plan,
    read_serving_plan,
    serving_plan_from_data,
    serving_plan_to_data,
    write_serving_plan,
)
from meshwright.planner.space import Space, Way, run_strategy, runnable_space, whole_space
from meshwright.planner.sweep import Point, Sweep, read_sweep, run_sweep

__all__ = [
    "Fix",
    "Plan",
    "Point",
    "PrefillShare",
    "Ranking",
    "ServingPlan",
    "ServingPoint",
    "ServingRanking",
    "ServingThresholds",
    "Space",
    "Sweep",
    "Way",
    "as_run",
    "best_prefill",
    "bound_in_words",
    "chips_that_fit",
    "find_best",
    "how",
    "lacking_bytes",
    "make_plan",
    "make_serving_plan",
    "nearby",
    "plan_from_data",
    "plan_mesh",
    "plan_stages",
    "plan_to_data",
    "predict",
    "prefill_share",
    "rank",
    "rank_serving",
    "rank_space",
    "read_plan",
    "read_serving_plan",
    "read_sweep",
    "reason",
    "rules_of_thumb",
    "run_strategy",
    "run_sweep",
    "runnable_space",
    "serving_plan_from_data",
    "serving_plan_to_data",
    "serving_reason",
    "thresholds",
    "ways_to_fit",
    "whole_space",
    "why",
    "why_serving",
    "write_plan",
    "write_serving_plan",
]
