"""`meshwright plan` of an image model: rank its meshes of dp and fsdp, and print why the first is first."""

from __future__ import annotations

import json

from meshwright.cli.plan.args import ImageArgs
from meshwright.cli.typed import check_all_read
from meshwright.description.hardware.system import System
from meshwright.description.step.images import ImageWorkload
from meshwright.options.values import read_count, read_mesh
from meshwright.pictures.tables import collective_table, console, mesh_name, show, speed, table
from meshwright.pictures.text import folded, reasons, terms
from meshwright.planning.images import ImageRanking, plan_image_mesh, rank_images
from meshwright.planning.options import IMAGE_OPTIONS, read_images
from meshwright.planning.why.images import image_gap, why_images
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_seconds


def plan_images(args: ImageArgs) -> int:
    """Print the ranking of an image model's meshes, or the figures of one. Return 1 if none fits, else 0."""
    workload, system = read_images(args.model, {name: getattr(args, name) for name in IMAGE_OPTIONS})
    mesh = None if args.mesh is None else read_mesh(args.mesh, system.num_devices)
    as_json = args.json
    # A single mesh is one line, and JSON has all meshes.
    top = 1 if mesh or as_json else read_count("--top", args.top)
    check_all_read(args, "with --mesh" if mesh else "with --json" if as_json else "here")
    if mesh is None:
        ranking = rank_images(workload, system)
    else:
        ranking = ImageRanking((plan_image_mesh(workload, mesh, system),), 1)
    if as_json:
        best = ranking.candidates[0]
        candidates = [
            record.to_json()
            | {"images_per_second": workload.batch / (record.step_seconds or 1.0)}
            | {"gap_to_best": image_gap(record, best).to_json()}
            for record in ranking.candidates
        ]
        why = [fact.to_json() for fact in why_images(ranking, workload, system)]
        print(json.dumps({"candidates": candidates, "why": why}, indent=2))
    else:
        _print(ranking, workload, system, top)
    return 0 if ranking.num_fit else 1


def _print(ranking: ImageRanking, workload: ImageWorkload, system: System, top: int) -> None:
    """Print the best mesh, then why, then the runners-up, then the parts of step time and memory."""
    out, best, model = console(), ranking.candidates[0], workload.model
    size = f"{workload.batch} images of {model.image_size} × {model.image_size}"
    show(out, f"{model.name} · train · {size} · {workload.compute_dtype} · SGD with momentum · {system}")
    meshes = "1 mesh" if ranking.num_meshes == 1 else f"{ranking.num_meshes} meshes"
    print(f"{meshes}, {len(ranking.candidates)} legal, {ranking.num_fit} fit\n")
    room = f"{show_bytes(best.memory_bytes['peak'])} of {show_bytes(system.usable_bytes)}"
    fits = "" if best.fits else "   DOES NOT FIT"
    answer = f"{mesh_name(best)}   {speed(best)}   {_rate(best, workload)}   {room}   {best.bound} bound{fits}"
    show(out, f"  {answer}", style="bold")
    print(reasons(why_images(ranking, workload, system)))
    for note in best.notes:
        print(folded(f"note: {note}"))
    print()
    columns = ("", "mesh", "step", "MFU", "", "memory", "bound by", "loses because")
    rows = [_row(place, record, best, workload) for place, record in enumerate(ranking.candidates[:top], start=1)]
    show(out, table(columns, rows, left=(1, 6, 7), folds=-1))
    print()
    print(terms("step", {name: show_seconds(time) for name, time in best.breakdown_seconds.items()}))
    parts = {name: show_bytes(size) for name, size in best.memory_bytes.items() if name != "peak"}
    print(terms("memory", parts))
    if best.collectives:
        print()
        show(out, collective_table(best))


def _rate(record: Record, workload: ImageWorkload) -> str:
    """Return the images a second as text."""
    return f"{workload.batch / (record.step_seconds or 1.0):,.0f} images/s"


def _row(place: int, record: Record, best: Record, workload: ImageWorkload) -> tuple[str, ...]:
    """Return a candidate's row of the ranking, with its gap to the plan `best`. place: its rank, from 1."""
    step, mfu = show_seconds(record.step_seconds or 0.0), show_percent(record.mfu or 0.0)
    rate = _rate(record, workload)
    memory = show_bytes(record.memory_bytes["peak"])
    return str(place), mesh_name(record), step, mfu, rate, memory, record.bound or "", str(image_gap(record, best))
