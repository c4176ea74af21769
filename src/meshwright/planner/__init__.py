"""From a workload and a system to a mesh: every legal one priced and ranked, and the choice as a plan to keep."""

from meshwright.planner.explain import answer, computed_mfu, gap_to, training_run, why
from meshwright.planner.files import check_data_file, is_run_directory
from meshwright.planner.fit import Fix, ways_to_fit
from meshwright.planner.library import PlanLike, find_beyond, find_meshes, plan_one_mesh, plan_to_run, read_compared
from meshwright.planner.neighbours import chips_that_fit, nearby
from meshwright.planner.options import (
    IMAGE_OPTIONS,
    Count,
    MeshLike,
    PlanOptions,
    ServingOptions,
    given,
    read_count,
    read_images,
    read_mesh,
    read_price,
    read_serving,
    read_strategy,
    read_system,
    read_workload,
    remats,
)
from meshwright.planner.plan import (
    Plan,
    as_run,
    make_plan,
    plan_from_data,
    plan_to_data,
    read_plan,
    write_plan,
)
from meshwright.planner.prediction import predict
from meshwright.planner.rules import rules_of_thumb
from meshwright.planner.search import Ranking, find_best, plan_stages, rank, rank_space
from meshwright.planner.sentences import fact_data, how, say
from meshwright.planner.serving.explain import longest_term, prefill_share, serving_gap, thresholds, why_serving
from meshwright.planner.serving.plan import (
    ServingPlan,
    is_serving_plan_file,
    make_serving_plan,
    planned_speed,
    read_serving_plan,
    serving_plan_from_data,
    serving_plan_to_data,
    write_serving_plan,
)
from meshwright.planner.serving.search import (
    ServingPoint,
    ServingRanking,
    best_prefill,
    best_serving_plan,
    rank_serving,
)
from meshwright.planner.serving.sentences import TERMS
from meshwright.planner.space import runnable_space, whole_space
from meshwright.planner.sweep import Point, read_sweep, run_sweep

__all__ = [
    "IMAGE_OPTIONS",
    "TERMS",
    "Count",
    "Fix",
    "MeshLike",
    "Plan",
    "PlanLike",
    "PlanOptions",
    "Point",
    "Ranking",
    "ServingOptions",
    "ServingPlan",
    "ServingPoint",
    "ServingRanking",
    "answer",
    "as_run",
    "best_prefill",
    "best_serving_plan",
    "check_data_file",
    "chips_that_fit",
    "computed_mfu",
    "fact_data",
    "find_best",
    "find_beyond",
    "find_meshes",
    "gap_to",
    "given",
    "how",
    "is_run_directory",
    "is_serving_plan_file",
    "longest_term",
    "make_plan",
    "make_serving_plan",
    "nearby",
    "plan_from_data",
    "plan_one_mesh",
    "plan_stages",
    "plan_to_data",
    "plan_to_run",
    "planned_speed",
    "predict",
    "prefill_share",
    "rank",
    "rank_serving",
    "rank_space",
    "read_compared",
    "read_count",
    "read_images",
    "read_mesh",
    "read_plan",
    "read_price",
    "read_serving",
    "read_serving_plan",
    "read_strategy",
    "read_sweep",
    "read_system",
    "read_workload",
    "remats",
    "rules_of_thumb",
    "run_sweep",
    "runnable_space",
    "say",
    "serving_gap",
    "serving_plan_from_data",
    "serving_plan_to_data",
    "thresholds",
    "training_run",
    "ways_to_fit",
    "whole_space",
    "why",
    "why_serving",
    "write_plan",
    "write_serving_plan",
]
