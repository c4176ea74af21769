"""The screen of `meshwright plan`: the plan, the reasons and runners-up in about 20 lines; all with --explain."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.cli.plan.columns import comparison
from meshwright.description.step.model import LearnedPositions, ModelConfig
from meshwright.pictures.tables import collective_table, console, show, speed, table
from meshwright.pictures.text import folded, next_line, reasons, terms
from meshwright.planning.evidence.runs import EVIDENCE_COLUMNS, evidence_rows, nearest_runs, step_range
from meshwright.planning.plan import Plan, make_plan
from meshwright.planning.search import Ranking
from meshwright.planning.ties import RATIO_ERROR
from meshwright.planning.why.fixes import ways_to_fit
from meshwright.planning.why.gap import gap_to
from meshwright.planning.why.nearby import chips_that_fit, nearby
from meshwright.planning.why.rules import rules_of_thumb
from meshwright.planning.why.step import answer, computed_mfu, how, why
from meshwright.planning.why.training_run import TrainingRun
from meshwright.units import show_bytes, show_count, show_percent, show_rate, show_seconds


@dataclass(frozen=True)
class Shown:
    """The contents of a screen of training plans.

    asked: the plan of the --mesh option. beyond: the best plan that cannot run yet, if it is better. run: time and cost
    of training on a number of tokens. trained: the model's trained sequence length, 0 if unknown.
    """

    ranking: Ranking
    asked: Plan | None = None
    beyond: Plan | None = None
    run: TrainingRun | None = None
    trained: int = 0


def plan_data(shown: Shown, *, with_ops: bool) -> None:
    """Print the contents of the screen and all details as JSON."""
    ranking, asked = shown.ranking, shown.asked
    best = ranking.plans[0]
    data: dict[str, Any] = {
        "candidates": [candidate(plan, best) for plan in ranking.plans],
        "num_meshes": ranking.num_meshes,
        "num_ways": ranking.num_candidates,
        "num_tied": ranking.num_tied,
        "why": [fact.to_json() for fact in why(best)],
        "rules_of_thumb": [fact.to_json() for fact in rules_of_thumb(best)],
        "nearby": [fact.to_json() for fact in nearby(best)],
        "notes": notes_of(asked or best, shown.trained),
    }
    if (found := step_range(best)) is not None:
        data["range"] = found.to_json()
        data["evidence"] = [asdict(run) | {"error": run.error} for run in nearest_runs(asked or best, 8)]
    if asked is not None:
        data["requested"] = candidate(asked, best)
    if shown.beyond is not None:
        data["beyond"] = candidate(shown.beyond, best)
    if shown.run is not None:
        data["training_run"] = shown.run.to_json()
    if not best.predicted.fits:
        data["fixes"] = [
            {
                "changes": [str(change) for change in fix.changes],
                "flags": [change.flag for change in fix.changes],
                "peak_bytes": fix.peak_bytes,
                "step_seconds": fix.step_seconds,
                "extra_seconds": fix.extra_seconds,
            }
            for fix in ways_to_fit(best.workload, best.mesh, best.system, best.strategy)
        ]
    if with_ops:
        from meshwright.cli.plan.ops import ops_data

        data["ops"] = ops_data(asked or best)
    print(json.dumps(data, indent=2))


def candidate(plan: Plan, best: Plan) -> dict[str, Any]:
    """Return a plan as plain data: record, strategy, why it loses to the best, why train cannot run it (or None)."""
    return plan.predicted.to_json() | {
        "remat": plan.workload.remat,
        "strategy": asdict(plan.strategy),
        "gap_to_best": gap_to(plan, best).to_json(),
        "planned_only": plan.planned_only or None,
    }


def print_plan(shown: Shown, *, output: Path | None, is_explained: bool, with_ops: bool, with_evidence: bool) -> None:
    """Print the best plan, then why, then the runners-up; with --explain also the parts of its step time and memory."""
    ranking, asked = shown.ranking, shown.asked
    best = ranking.plans[0]
    _print_answer(shown, is_explained=is_explained)
    if not best.predicted.fits:
        _print_fixes(best)
    _print_candidates(ranking)
    if asked is not None:
        _print_asked(asked, best, is_explained=is_explained)
    if is_explained:
        print()
        if asked is None:
            print_terms(best)
        _print_section("rules of thumb", map(str, rules_of_thumb(best)))
        _print_section("nearby", map(str, nearby(best)))
        print()
        show(console(), collective_table(best.predicted))
    if with_evidence:
        runs = nearest_runs(asked or best, 8)
        print()
        if not runs:
            print(folded(f"no published run is on chips like {best.system.chip.name}"))
        else:
            show(console(), table(EVIDENCE_COLUMNS, evidence_rows(runs), left=(0, 1, 2)))
    for note in notes_of(asked or best, shown.trained):
        print(folded(f"note: {note}"))
    if with_ops:
        from meshwright.cli.plan.ops import print_ops

        print_ops(asked or best)
    print(_next(shown, output, is_explained=is_explained))


def print_head(plan: Plan) -> None:
    """Print the subject of the plan, and in one line the mesh, speed, memory and bound."""
    workload, system = plan.workload, plan.system
    tokens = f"{workload.sequences:,} × {workload.seq_len:,} tokens{workload.in_pairs}"
    devices = f"{show_count(system.num_devices, 'device')} of {show_bytes(system.usable_bytes)}"
    what = f"{workload.model.name} · {workload.task} · {tokens} · {workload.compute_dtype}"
    show(console(), f"{what} · {plan.hardware} ({devices})")
    print()
    record = plan.predicted
    rate = show_rate(record.tokens_per_second or 0.0, "tok/s")
    memory = f"{show_bytes(record.memory_bytes['peak'])} of {show_bytes(system.usable_bytes)}"
    fits = "" if record.fits else "   DOES NOT FIT"
    line = f"  {plan.mesh}   {plan_speed(plan)}   {rate}   {memory}   {record.bound} bound{fits}"
    show(console(), line, style="bold")


def plan_speed(plan: Plan) -> str:
    """Return step time and MFU as text."""
    return speed(replace(plan.predicted, mfu=computed_mfu(plan)))


def _print_answer(shown: Shown, *, is_explained: bool) -> None:
    """Print the best plan, its strategy and the reasons; also the best plan that cannot run yet, if it is better."""
    best = shown.ranking.plans[0]
    print_head(best)
    print_why(best, is_explained=is_explained)
    if (found := step_range(best)) is not None:
        print(folded(f"range: {found}"))
    if shown.run is not None:
        print(folded(f"run: {shown.run}"))
    if best.planned_only:
        print(folded(f"train: {best.planned_only}"))
    if (beyond := shown.beyond) is not None:
        now, then = best.predicted.step_seconds or 0.0, beyond.predicted.step_seconds or 0.0
        gain = f"{show_percent(1 - then / now)} faster" if best.predicted.fits else "fits"
        says = f"{beyond.mesh} {run_as(beyond)}, {plan_speed(beyond)}, {gain}, but {beyond.planned_only}"
        print(folded(f"beyond: {says}"))
    print()


def print_why(plan: Plan, *, is_explained: bool) -> None:
    """Print how a plan runs and what limits its speed; with --explain, all reasons."""
    print(folded(f"how: {how(plan)}"))
    print(reasons((why if is_explained else answer)(plan)))


def _print_fixes(best: Plan) -> None:
    """Print how much memory is missing, and changes that would make a plan fit."""
    lacking = best.predicted.memory_bytes["peak"] - best.system.usable_bytes
    print(folded(f"nothing fits: this is the closest, and needs {show_bytes(lacking)} a device more than there is"))
    fixes = ways_to_fit(best.workload, best.mesh, best.system, best.strategy)
    for fix in fixes[:5]:
        extra = f"{'+' if fix.extra_seconds >= 0 else '-'}{show_seconds(abs(fix.extra_seconds))}"
        changes = ", ".join(map(str, fix.changes))
        takes = f"step {show_seconds(fix.step_seconds)} ({extra})"
        planned = make_plan(fix.workload, fix.mesh, best.system, fix.strategy)
        untrained = "; train cannot run it" if planned.planned_only else ""
        print(folded(f"to fit: {changes}: {show_bytes(fix.peak_bytes)}, {takes}{untrained}"))
    if not fixes:
        more = chips_that_fit(best)
        found = f"{more.hardware} is, with {more.mesh}, {plan_speed(more)}" if more else "nor is 64x the chips"
        print(folded(f"to fit: no change of mesh, policy or optimizer is enough; {found}"))
    print()


def _print_candidates(ranking: Ranking) -> None:
    """Print the best plan and runners-up, each compared with the first."""
    plans = ranking.plans
    best, has_mfu = plans[0], computed_mfu(plans[0]) is not None
    columns = ("", "mesh", "run as", "step", *(("MFU",) if has_mfu else ()), "memory", "compared with the first")
    rows = [
        (
            str(place),
            str(plan.mesh),
            run_as(plan),
            show_seconds(plan.predicted.step_seconds or 0.0),
            *((show_percent(computed_mfu(plan) or 0.0),) if has_mfu else ()),
            show_bytes(plan.predicted.memory_bytes["peak"]),
            str(gap_to(plan, best)),
        )
        for place, plan in enumerate(plans, start=1)
    ]
    show(console(), table(columns, rows, left=(1, 2, len(columns) - 1), folds=-1))
    if ranking.num_tied > 1:
        within = f"they differ by less than {show_percent(RATIO_ERROR)}, the error of such a comparison"
        print(folded(f"1 to {ranking.num_tied} tie: {within}; the simplest is first"))
    if any(plan.strategy.num_microbatches > 1 or plan.strategy.zero_stage < 3 for plan in plans):
        print(folded("run as: remat policy, m microbatches, v virtual stages, z ZeRO stage where it is not 3"))
    meshes = f"{ranking.num_meshes:,} mesh{'es' if ranking.num_meshes > 1 else ''}"
    configurations = show_count(ranking.num_candidates, "configuration")
    were = "was" if ranking.num_priced == 1 else "were"
    print(folded(f"searched {meshes}, {configurations}; {ranking.num_priced:,} {were} predicted in full"))


def run_as(plan: Plan) -> str:
    """Return remat policy, microbatches, virtual stages and ZeRO stage of a plan as short text: `none m16 v2 z2`."""
    strategy = plan.strategy
    words = [plan.workload.remat]
    words += [f"m{strategy.num_microbatches}"] if strategy.num_microbatches > 1 else []
    words += [f"v{strategy.virtual_stages}"] if strategy.virtual_stages > 1 else []
    words += ["gpipe"] if strategy.schedule == "gpipe" and plan.mesh.pp > 1 else []
    words += [f"z{strategy.zero_stage}"] if strategy.zero_stage < 3 and plan.mesh.fsdp > 1 else []
    return " ".join(words)


def _print_asked(asked: Plan, best: Plan, *, is_explained: bool) -> None:
    """Print the mesh that --mesh names, compared with the best."""
    print()
    if (asked.mesh, asked.workload, asked.strategy) == (best.mesh, best.workload, best.strategy):
        print(f"asked for: {asked.mesh}, which is the best")
        return
    record = asked.predicted
    fits = "" if record.fits else "   DOES NOT FIT"
    show(console(), f"  asked for: {asked.mesh}   {plan_speed(asked)}   {record.bound} bound{fits}", style="bold")
    print(folded(f"loses because: {gap_to(asked, best)}"))
    print_why(asked, is_explained=is_explained)
    print()
    show(console(), comparison([best, asked]))


def print_terms(best: Plan) -> None:
    """Print the parts of a plan's step time, then the parts of its memory per device."""
    record = best.predicted
    print(terms("step", {name: show_seconds(time) for name, time in record.breakdown_seconds.items() if time}))
    parts = {name: show_bytes(size) for name, size in record.memory_bytes.items() if name != "peak" and size}
    print(terms("memory", parts))


def print_details(plan: Plan, *, is_explained: bool) -> None:
    """Print the notes of an existing plan; with --explain, first the parts of step time and memory, and collectives."""
    if is_explained:
        print()
        print_terms(plan)
        print()
        show(console(), collective_table(plan.predicted))
    for note in plan.predicted.notes:
        print(folded(f"note: {note}"))


def _print_section(title: str, lines: Iterable[str]) -> None:
    """Print lines under a title."""
    print(f"\n {title}")
    for line in lines:
        print(folded(line))


def notes_of(plan: Plan, trained: int) -> list[str]:
    """Return notes on a plan's figures. trained: the model's trained sequence length, 0 if unknown."""
    notes, model = list(plan.predicted.notes), plan.workload.model
    positions = model.positions if isinstance(model, ModelConfig) else LearnedPositions(rows=trained)
    if not isinstance(positions, LearnedPositions) and 0 < trained < plan.workload.seq_len:
        kind = "alibi" if positions == "alibi" else "rotary"
        notes.append(f"{model.name} was trained on {trained:,} tokens; {kind} positions continue beyond")
    return notes


def _next(shown: Shown, output: Path | None, *, is_explained: bool) -> str:
    """Return the screen's last line, which suggests the next command."""
    chosen = shown.asked or shown.ranking.plans[0]
    if output is not None:
        if not chosen.planned_only:
            return next_line(f"meshwright verify {shlex.quote(str(output))}", note=str(chosen.mesh))
        return f"\n wrote  {output} ({chosen.mesh}); train and verify cannot run it yet"
    more = "--compare MESH…, --sweep chips=64..1024" if is_explained else "--explain, --ops, --compare MESH…"
    return next_line("-o plan.yaml, then meshwright verify plan.yaml", more)
