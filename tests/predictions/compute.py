"""Every call that the golden records make into meshwright: where the library renames a function, this file follows.

A case is plain data (`cases.py`), and so is its record: numbers under names, and lists of collectives, each
`[kind, axes, phase, bytes, count, array]`, with `seconds` and `exposed seconds` behind where they are priced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.records import read_hlo
from meshwright.description.step.model import Experts, ModelConfig
from meshwright.description.step.serving import Serving, ServingLayout
from meshwright.description.step.strategy import DEFAULT, FrameworkProfile, Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import parse_mesh
from meshwright.planning.cost.arguments import argument_bytes
from meshwright.planning.cost.comm_volume import (
    dropless_padding_collectives,
    step_collectives,
    untaken_branch_collectives,
)
from meshwright.planning.cost.flops import (
    attention_flops,
    dropless_padding_flops,
    model_flops,
    step_flops,
    untaken_branch_flops,
)
from meshwright.planning.cost.memory import host_bytes, offloaded_bytes, step_memory
from meshwright.planning.cost.rates.hbm import hbm_bytes
from meshwright.planning.cost.serving_seconds import serving_collectives, serving_flops
from meshwright.planning.plan import Plan, make_plan
from meshwright.planning.search import rank
from meshwright.planning.serving.plan import make_serving_plan
from meshwright.planning.serving.search import rank_serving
from meshwright.proof.verification.comparison import compare, in_plans_terms
from meshwright.proof.verification.differences import Difference
from meshwright.proof.verification.plans import static_overhead
from meshwright.record import Collective, Record, record_from_json

Case = Mapping[str, Any]

ROOT = Path(__file__).parents[2]


def compute(case: Case) -> dict[str, Any]:
    """The record of a case."""
    kinds = {"train": _train, "serve": _serve, "published": _published}
    return kinds[case["kind"]](case)


def _train(case: Case) -> dict[str, Any]:
    """A train step on one mesh by one strategy, and the result of searches where the case asks for them."""
    system = parse_system(case["hardware"])
    mesh = parse_mesh(case["mesh"], num_devices=system.num_devices)
    workload = Workload(model=_model(case), batch=case["batch"], seq_len=case["seq_len"], **case["workload"])
    strategy = _strategy(case["strategy"])
    kind = system.chip.kind
    record = make_plan(workload, mesh, system, strategy).predicted
    found = {
        **_predicted(record),
        "flops by phase": asdict(step_flops(workload, mesh, strategy)),
        "attention flops by phase": asdict(attention_flops(workload, mesh, strategy)),
        "model flops": model_flops(workload),
        "dropless padding flops": {
            "ragged": dropless_padding_flops(workload, mesh, strategy, has_ragged=True),
            "blocks": dropless_padding_flops(workload, mesh, strategy, has_ragged=False),
        },
        "useful collectives": _unmerged(step_collectives(workload, mesh, strategy)),
        "executed collectives": _unmerged(step_collectives(workload, mesh, strategy, counted="executed")),
        "dropless padding collectives": {
            "ragged": _unmerged(dropless_padding_collectives(workload, mesh, strategy, is_ragged=True)),
            "padded": _unmerged(dropless_padding_collectives(workload, mesh, strategy, is_ragged=False)),
        },
        "memory": step_memory(workload, mesh, strategy, kind=kind),
        "argument bytes": argument_bytes(workload, mesh, strategy, kind=kind),
        "host bytes": host_bytes(workload, mesh, strategy),
        "offloaded bytes": offloaded_bytes(workload, mesh, strategy),
        "hbm bytes by phase": hbm_bytes(workload, mesh),
    }
    if mesh.pp > 1 and strategy.profile.spmd_pipeline:
        found["untaken branch flops"] = untaken_branch_flops(workload, mesh, strategy)
        found["untaken branch collectives"] = _unmerged(untaken_branch_collectives(workload, mesh, strategy))
    for name, choices in case["search"].items():
        if choices.get("is_runnable") and kind == "gpu":
            choices = choices | {"attention": "scores"}  # What train ran on GPUs when the records were written.
        found[name] = _ranked(rank(workload, system, top=4, **choices))
    return found


PROFILE = {
    "fuses": "fused_elementwise",
    "fuses_loss": "fused_loss",
    "flat_buffers": "flat_buffers",
    "lists_shards": "shard_lists",
    "reruns_blocks": "recomputes_whole_blocks",
    **{name: name for name in ("spmd_pipeline", "overlaps_gradients", "overlaps_weights")},
}
"""The fields of a strategy that have become those of a framework's profile."""


def _strategy(fields: Mapping[str, Any]) -> Strategy:
    """The strategy of a case."""
    profile = FrameworkProfile(**{PROFILE[name]: value for name, value in fields.items() if name in PROFILE})
    return Strategy(profile=profile, **{name: value for name, value in fields.items() if name not in PROFILE})


def _serve(case: Case) -> dict[str, Any]:
    """A decode step or a prefill on one layout at one batch, and the best layouts where the case asks for them."""
    system = parse_system(case["hardware"])
    mesh = parse_mesh(case["mesh"], num_devices=system.num_devices)
    serving = Serving(model=_model(case), batch=case["batch"], **case["serving"])
    layout = ServingLayout(mesh, case["cache"])
    plan = make_serving_plan(serving, layout, system)
    found = {
        **_predicted(plan.predicted),
        "memory": dict(plan.predicted.memory_bytes),
        "model flops": serving_flops(serving, case["batch"]),
        "useful collectives": _unmerged(serving_collectives(serving, layout, case["batch"])),
    }
    for name, choices in case["search"].items():
        ranking = rank_serving(replace(serving, batch=None, **choices), system)
        found[name] = {
            "layouts": ranking.num_layouts,
            "best": [
                {"layout": str(each.layout), "batch": each.batch, "seconds": each.seconds}
                for each in ranking.candidates[:4]
            ],
            "frontier": [
                {"layout": str(point.layout), "batch": point.batch, "seconds": point.seconds}
                for point in ranking.frontier
            ],
        }
    return found


def _published(case: Case) -> dict[str, Any]:
    """The time and the memory that are predicted for every row of the table of published runs."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from published_runs import score

    scored, refused = score(json.loads((ROOT / case["file"]).read_text())["records"])
    return {
        "refused": [row["id"] for row in refused],
        **{item.row["id"]: {"seconds": item.predicted, "peak": item.peak_bytes} for item in scored},
    }


def _model(case: Case) -> ModelConfig:
    """A preset with the changes of a case; those of its experts stand under `experts`."""
    model, changes = PRESETS[case["model"]], dict(case["changes"])
    if "experts" in changes:
        experts = changes.pop("experts")
        changes["experts"] = replace(model.experts, **experts) if model.experts else Experts(**experts)
    return replace(model, **changes)


def _predicted(record: Record) -> dict[str, Any]:
    """What a predicted record says, but its notes."""
    return {
        "step seconds": record.step_seconds,
        "breakdown seconds": dict(record.breakdown_seconds),
        "mfu": record.mfu,
        "flops": record.flops,
        "tokens per second": record.tokens_per_second,
        "bound": record.bound,
        "fits": record.fits,
        "predicted collectives": [[*_traits(move), move.seconds, move.exposed_seconds] for move in record.collectives],
    }


def _unmerged(moves: Iterable[Collective]) -> list[list[Any]]:
    """Collectives as lists, in an order that does not depend on where they come from."""
    return sorted(_traits(move) for move in moves)


def _traits(move: Collective) -> list[Any]:
    """What is compared of a collective, and the array that it moves, which is not."""
    return [move.kind, ",".join(move.axes), move.phase, move.bytes, move.count, move.array]


def _ranked(ranking: Any) -> dict[str, Any]:
    """The best plans of a search and the size of its space."""
    return {
        "meshes": ranking.num_meshes,
        "candidates": ranking.num_candidates,
        "best": [
            {
                "mesh": str(plan.mesh),
                "remat": plan.workload.remat,
                "strategy": _changed(plan.strategy),
                "seconds": plan.predicted.step_seconds,
                "peak": plan.predicted.memory_bytes["peak"],
            }
            for plan in ranking.plans
        ],
    }


def _changed(strategy: Strategy) -> dict[str, Any]:
    """The fields of a strategy that are other than the default."""
    values = ((field.name, getattr(strategy, field.name)) for field in fields(strategy))
    changed = {name: value for name, value in values if name != "profile" and value != getattr(DEFAULT, name)}
    of_profile = ((old, getattr(strategy.profile, new), getattr(DEFAULT.profile, new)) for old, new in PROFILE.items())
    return changed | {old: value for old, value, default in of_profile if value != default}


def models() -> list[str]:
    """The names of all models."""
    return [*PRESETS]


def remats() -> tuple[str, ...]:
    """All remat policies."""
    return get_args(get_type_hints(Workload)["remat"])


def strategy_fields() -> dict[str, tuple[Any, set[Any]]]:
    """The fields of a strategy, as cases name them: the default of each and, where it takes a few words, these."""
    found = {}
    for name, hint in get_type_hints(Strategy).items():
        if name == "profile":
            found |= {old: (getattr(DEFAULT.profile, new), set()) for old, new in PROFILE.items()}
            continue
        if name == "reference_mesh":  # No step was recorded that runs a reference.
            continue
        words = {word for option in get_args(hint) for word in (get_args(option) or (option,))}
        found[name] = getattr(DEFAULT, name), words - {type(None)}
    return found


def compile_kit_row(row: Any) -> tuple[dict[str, Any], str]:
    """The program of a row of `kit_rows.py` on simulated CPU devices as a record, and its HLO text."""
    import jax

    from meshwright.description.step.legality import check_runnable
    from meshwright.description.step.rules import rules_of
    from meshwright.execution.runtime.mesh import build_mesh
    from meshwright.execution.runtime.sharding_context import ShardingContext
    from meshwright.execution.training.step import abstract_batch, abstract_state, train_step
    from meshwright.execution.training.update.optimizer import Optimizer

    check_runnable(row.model, row.mesh, row.strategy)
    mesh = build_mesh(row.mesh, jax.devices()[: row.mesh.num_devices])
    layout = ShardingContext(row.mesh, rules_of(row.strategy))
    optimizer = Optimizer(warmup_steps=1, decay_steps=10, first_rate=0.0)
    with jax.set_mesh(mesh):
        state = abstract_state(row.workload, layout, optimizer, mesh, row.strategy)
        batch = abstract_batch(row.workload, layout, mesh, row.strategy)
        step = train_step(row.workload, layout, optimizer, row.strategy).lower(state, batch).compile()
    memory, hlo = step.memory_analysis(), step.as_text() or ""
    # Adafactor leaves one element of a moment that it does not keep; nothing reads it and no program takes it.
    unread = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state["optimizer"]) if leaf.shape == (1,))
    record = in_plans_terms(read_hlo(hlo, row.mesh.layout, hardware=f"cpu:{row.mesh.num_devices}"))
    size = memory.argument_size_in_bytes + unread
    return {"record": record.to_json(), "argument bytes": size}, hlo


def kit_differences(row: Any, compiled: Mapping[str, Any]) -> list[str]:
    """What the plan of a row of `kit_rows.py` says otherwise than its compiled program, but for what is explained."""
    plan: Plan = make_plan(row.workload, row.mesh, parse_system(f"cpu:{row.mesh.num_devices}"), row.strategy)
    predicted_arguments = argument_bytes(row.workload, row.mesh, row.strategy)
    known = {Difference.DROPLESS_PADDING, Difference.UNTAKEN_BRANCHES}
    quantities = compare(
        plan.predicted,
        record_from_json(compiled["record"]),
        argument_bytes=compiled["argument bytes"],
        overhead=static_overhead(plan),
    )
    judged = [each for each in quantities if each.unit in ("flop", "B") and not each.quantity.startswith("memory")]
    found = [each for each in judged if not each.is_equal and not known & {cause.difference for cause in each.causes}]
    lines = [f"{each.quantity}: planned {each.predicted}, compiled {each.compiled}" for each in found]
    if predicted_arguments != compiled["argument bytes"]:
        lines.append(f"arguments: planned {predicted_arguments}, compiled {compiled['argument bytes']}")
    return lines
