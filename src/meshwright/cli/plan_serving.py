"""`meshwright plan … --for prefill` and `--for decode`: every layout to serve on, and why the first is first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from meshwright.cli.common import Subject, subject_model
from meshwright.cli.tables import collective_table, console, folded, show, table, terms
from meshwright.errors import MeshwrightError
from meshwright.hardware import System, parse_system
from meshwright.mesh import MeshShape
from meshwright.planner import (
    ServingPlan,
    ServingPoint,
    ServingRanking,
    bound_in_words,
    prefill_share,
    rank_serving,
    serving_plan_to_data,
    serving_reason,
    thresholds,
    why_serving,
    write_serving_plan,
)
from meshwright.units import parse_seconds, show_bytes, show_percent, show_seconds
from meshwright.workload import Serving

PROMPT_LEN, OUTPUT_LEN = 1024, 256
"""The tokens of a prompt and of an answer where none are said; the screen names them."""


@dataclass(frozen=True)
class ServingArgs:
    """What a plan is for, and what a server is asked to do."""

    purpose: Annotated[Literal["train", "prefill", "decode"], tyro.conf.arg(name="for")] = "train"
    """What to plan: steps of training, prompts that a server reads, or tokens that it writes."""
    latency: str | None = None
    """Serving: what a step may take, as 30ms, of decode for a token, of prefill for a batch of prompts."""
    prompt_len: int | None = None
    """Serving: tokens of a prompt (1024 where nothing is said)."""
    output_len: int | None = None
    """Serving: tokens of an answer (256 where nothing is said; prefill has none)."""
    weight_dtype: str | None = None
    """Serving: what weights are kept in: bf16 where nothing is said, int8, fp8, int4, …"""
    kv_dtype: str | None = None
    """Serving: what keys and values are kept in (bf16)."""
    compute_dtype: str | None = None
    """Serving: what products are computed in (bf16): int8 or fp8 where the chip has a peak for it."""


def check_training(args: ServingArgs) -> None:
    """Raise where something is said that training has no use for."""
    said = [f"--{name.replace('_', '-')}" for name, value in vars(args).items() if value is not None]
    if said := [name for name in said if name != "--purpose"]:
        raise MeshwrightError(f"{said[0]} is of serving; say --for decode or --for prefill")


INSTEAD = {"batch_tokens": "batch", "seq_len": "prompt-len", "dtype": "compute-dtype"}
"""What says for serving what an option says for training."""


def read_serving(args: ServingArgs, subject: Subject, others: Mapping[str, object]) -> tuple[Serving, System]:
    """The serving and the system that the arguments mean.

    others: what `meshwright plan` was told beside them, by name; whatever is neither None nor False is refused.
    """
    assert args.purpose != "train"
    if subject.on is None:
        raise MeshwrightError(f"{subject.model} wants --on, as --on v5e:4x4")
    foreign = {name: getattr(subject, name) for name in (*INSTEAD, "remat")} | dict(others)
    for name in (name for name, value in foreign.items() if value is not None and value is not False):
        hint = f"it takes --{INSTEAD[name]}" if name in INSTEAD else "leave it out"
        raise MeshwrightError(f"--{name.replace('_', '-')} is of training, and this is --for {args.purpose}; {hint}")
    system = parse_system(subject.on, hardware_file=subject.hardware)
    plain = "f32" if system.chip.kind == "cpu" else "bf16"
    serving = Serving(
        model=subject_model(subject),
        phase=args.purpose,
        prompt_len=PROMPT_LEN if args.prompt_len is None else args.prompt_len,
        output_len=(OUTPUT_LEN if args.purpose == "decode" else 1) if args.output_len is None else args.output_len,
        batch=subject.batch,
        weight_dtype=args.weight_dtype or plain,
        kv_dtype=args.kv_dtype or plain,
        compute_dtype=args.compute_dtype or plain,
        latency_seconds=parse_seconds(args.latency) if args.latency else None,
    )
    return serving, system


def plan_serving(
    serving: Serving,
    system: System,
    *,
    mesh: MeshShape | None = None,
    top: int = 8,
    as_json: bool = False,
    output: Path | None = None,
) -> int:
    """Print how to serve a model on a system, and write the first plan where a file is said; the exit code, 0.

    mesh: the one to look at; all there are where none is said.
    """
    ranking = rank_serving(serving, system, mesh)
    best = ranking.candidates[0]
    if output is not None:
        write_serving_plan(best, output)
    if as_json:
        print(json.dumps(_data(ranking, system), indent=2))
        return 0
    _print_answer(ranking, system)
    _print_candidates(ranking, system, top)
    _print_frontier(ranking, top)
    _print_terms(best)
    if output is not None:
        print(f"\n wrote  {output}")
    return 0


def _data(ranking: ServingRanking, system: System) -> dict[str, object]:
    """The ranking as plain data: plans, the frontier, and of the best plan its thresholds and prefill systems."""
    best = ranking.candidates[0]
    data: dict[str, object] = {
        "candidates": [serving_plan_to_data(plan) for plan in ranking.candidates],
        "frontier": [
            {
                "mesh": point.layout.mesh.degrees,
                "cache": point.layout.cache,
                "batch": point.batch,
                "step_seconds": point.seconds,
                "tokens_per_second": point.tokens_per_second,
            }
            for point in ranking.frontier
        ],
    }
    if best.serving.phase == "decode":
        data["thresholds"] = {f"{name}_batch": batch for name, batch in asdict(thresholds(best, system)).items()}
        share = prefill_share(best, system)
        data["prefill_systems"] = share.systems if share else None
    return data


def _print_answer(ranking: ServingRanking, system: System) -> None:
    """What is served, the answer, and why."""
    best, serving = ranking.candidates[0], ranking.candidates[0].serving
    asked = f" · {show_seconds(serving.latency_seconds)} asked for" if serving.latency_seconds else ""
    answers = f" + {serving.output_len}" if serving.phase == "decode" else ""
    print(f"{serving.model.name} · {serving.phase} · {serving.prompt_len}{answers} tokens · {system}{asked}")
    print(
        f"weights {serving.weight_dtype}, cache {serving.kv_dtype}, products {serving.compute_dtype};"
        f" {ranking.num_layouts} layouts, {len(ranking.candidates)} legal, {ranking.num_fit} fit\n"
    )
    unit = "a token" if serving.phase == "decode" else "a batch"
    room = f"{show_bytes(best.predicted.memory_bytes['peak'])} of {show_bytes(system.usable_bytes)}"
    verdict = "   DOES NOT FIT" if not best.predicted.fits else "   TOO LATE" if not best.is_in_time else ""
    answer = (
        f"  {best.layout}   batch {best.batch:,}   {show_seconds(best.seconds)} {unit}"
        f"   {best.tokens_per_second:,.0f} tok/s   {room}{verdict}"
    )
    show(console(), answer, style="bold")
    for line in why_serving(best, system):
        print(folded(line))
    print()


def _print_candidates(ranking: ServingRanking, system: System, top: int) -> None:
    """The best batch of each layout, and why it loses."""
    best = ranking.candidates[0]
    columns = ("", "mesh", "cache by", "batch", "step", "tok/s", "memory", "bound by", "loses because")
    rows = [
        (
            str(place),
            str(plan.mesh),
            plan.cache,
            f"{plan.batch:,}",
            show_seconds(plan.seconds),
            f"{plan.tokens_per_second:,.0f}",
            show_bytes(plan.predicted.memory_bytes["peak"]),
            bound_in_words(plan.predicted),
            serving_reason(plan, best, system),
        )
        for place, plan in enumerate(ranking.candidates[:top], start=1)
    ]
    show(console(), table(columns, rows, left=(1, 2, 7, 8)))


def _print_frontier(ranking: ServingRanking, top: int) -> None:
    """The frontier of latency and throughput."""
    if not ranking.frontier:
        return
    print("\n frontier: no layout that fits has both a shorter step and more tokens a second")
    rows = [
        (
            show_seconds(point.seconds),
            f"{point.tokens_per_second:,.0f}",
            f"{point.batch:,}",
            str(point.layout.mesh),
            point.layout.cache,
        )
        for point in thinned(ranking.frontier, top)
    ]
    show(console(), table(("step", "tok/s", "batch", "mesh", "cache by"), rows, left=(3, 4)))


def thinned(points: tuple[ServingPoint, ...], count: int) -> list[ServingPoint]:
    """At most so many of the points, evenly, the first and the last among them."""
    if len(points) <= max(count, 2):
        return list(points)
    steps = max(count, 2) - 1
    return [points[round(index * (len(points) - 1) / steps)] for index in range(steps + 1)]


def _print_terms(best: ServingPlan) -> None:
    """The terms of the step and of memory, and the collectives."""
    record = best.predicted
    print()
    print(terms("step", {name: show_seconds(time) for name, time in record.breakdown_seconds.items()}))
    sizes = {name: show_bytes(size) for name, size in record.memory_bytes.items() if name != "peak"}
    print(terms("memory", sizes))
    if record.mfu is not None:
        print(terms("MFU", {"": show_percent(record.mfu)}))
    if record.collectives:
        print()
        show(console(), collective_table(record))
