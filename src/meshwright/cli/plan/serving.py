"""`meshwright plan … --serve prefill` and `--serve decode`: rank the layouts of a server, and print the reasons."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict

from meshwright.cli.plan.args import ServeArgs
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.options.declare import given_options
from meshwright.options.values import read_count, read_mesh
from meshwright.pictures.tables import collective_table, console, show, table
from meshwright.pictures.text import folded, next_line, reasons, terms
from meshwright.planning.files import check_data_file
from meshwright.planning.options import read_serving
from meshwright.planning.serving.plan import serving_plan_to_data, write_serving_plan
from meshwright.planning.serving.search import ServingPoint, ServingRanking, rank_serving
from meshwright.planning.why.serving import TERMS, longest_term, prefill_share, serving_gap, thresholds, why_serving
from meshwright.units import show_bytes, show_percent, show_seconds


def plan_serving(args: ServeArgs) -> int:
    """Print how to serve a model on chips, and write the best plan to a file if --output is given.

    Return 1 if it does not fit or is slower than --latency, else 0.
    """
    options = given_options(args.served, args.formats)
    phase = options.pop("serve")
    if phase == "prefill" and options["output_len"] is not None:
        raise MeshwrightError("--output-len has no effect with --serve prefill, which generates nothing; leave it out")
    serving, system = read_serving(args.model, phase, options)
    mesh = None if args.output.mesh is None else read_mesh(args.output.mesh, system.num_devices)
    path, as_json = args.output.output, args.output.json
    top = None if as_json else read_count("--top", args.output.top)
    # JSON has everything, so that --explain has no effect with it.
    is_explained = as_json or args.output.explain
    if path is not None:
        check_data_file(path)
    check_all_read(args, "with --json" if as_json else "here")
    with waiting(f"planning {serving.model.name} on {system}"):
        ranking = rank_serving(serving, system, mesh)
    best = ranking.candidates[0]
    if path is not None:
        write_serving_plan(best, path)
    if top is None:
        print(json.dumps(_data(ranking, system), indent=2))
    else:
        _print_answer(ranking, system)
        _print_candidates(ranking, system, top)
        if is_explained:
            _print_frontier(ranking, top)
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
        if path is not None and phase == "decode":
            print(next_line(shlex.join(["meshwright", "serve", args.model, "--plan", str(path)])))
        elif path is not None:
            print(f"\n wrote  {path}")
        else:
            print(next_line(*(() if is_explained else ("--explain",)), "-o serve.yaml"))
    return 0 if best.predicted.fits and best.is_in_time else 1


def _data(ranking: ServingRanking, system: System) -> dict[str, object]:
    """Return the ranking as plain data: plans, reasons and the frontier.

    For decode also the batches at which the best plan's bound changes, and how many prefill systems keep it busy.
    """
    best = ranking.candidates[0]
    data: dict[str, object] = {
        "candidates": [
            serving_plan_to_data(plan) | {"gap_to_best": serving_gap(plan, best, system).to_json()}
            for plan in ranking.candidates
        ],
        "why": [fact.to_json() for fact in why_serving(best, system)],
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
    """Print the subject, the best plan and the reasons."""
    best, serving = ranking.candidates[0], ranking.candidates[0].serving
    asked = f" · {show_seconds(serving.latency_seconds)} asked for" if serving.latency_seconds else ""
    answers = f" + {serving.output_len}" if serving.phase == "decode" else ""
    chunks = "" if serving.chunk is None else f" in chunks of {serving.chunk}"
    show(
        console(),
        f"{serving.model.name} · {serving.phase} · {serving.prompt_len}{answers} tokens{chunks} · {system}{asked}",
    )
    show(
        console(),
        f"weights {serving.weight_dtype}, cache {serving.kv_dtype}, matmuls {serving.compute_dtype};"
        f" {ranking.num_layouts} layouts, {len(ranking.candidates)} legal, {ranking.num_fit} fit",
    )
    print()
    unit = "a token" if serving.phase == "decode" else "a batch" if serving.chunk is None else "a chunk"
    room = f"{show_bytes(best.predicted.memory_bytes['peak'])} of {show_bytes(system.usable_bytes)}"
    verdict = "   DOES NOT FIT" if not best.predicted.fits else "   TOO LATE" if not best.is_in_time else ""
    answer = (
        f"  {best.layout}   batch {best.batch:,}   {show_seconds(best.seconds)} {unit}"
        f"   {best.tokens_per_second:,.0f} tok/s   {room}{verdict}"
    )
    show(console(), answer, style="bold")
    print(reasons(why_serving(best, system)))
    for note in best.predicted.notes:
        print(folded(f"note: {note}"))
    print()


def _print_candidates(ranking: ServingRanking, system: System, top: int) -> None:
    """Print the best batch of each layout, and why the layout loses."""
    best = ranking.candidates[0]
    columns = ("", "mesh", "cache by", "batch", "step", "tok/s", "memory", "bound by", "compared with the first")
    rows = [
        (
            str(place),
            str(plan.mesh),
            plan.cache,
            f"{plan.batch:,}",
            show_seconds(plan.seconds),
            f"{plan.tokens_per_second:,.0f}",
            show_bytes(plan.predicted.memory_bytes["peak"]),
            TERMS[longest_term(plan).term],
            str(serving_gap(plan, best, system)),
        )
        for place, plan in enumerate(ranking.candidates[:top], start=1)
    ]
    show(console(), table(columns, rows, left=(1, 2, 7, 8), folds=-1))


def _print_frontier(ranking: ServingRanking, top: int) -> None:
    """Print the frontier of latency and throughput."""
    if not ranking.frontier:
        return
    print()
    show(console(), " frontier: no layout that fits has both a shorter step and more tokens a second")
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
    """Return at most `count` points, evenly spaced, with the first and last."""
    if len(points) <= max(count, 2):
        return list(points)
    steps = max(count, 2) - 1
    return [points[round(index * (len(points) - 1) / steps)] for index in range(steps + 1)]
