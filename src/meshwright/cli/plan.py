"""`meshwright plan`: every legal mesh priced and ranked, and why the first is first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.cli.common import Subject, read_subject
from meshwright.cli.tables import collective_table, console, folded, headline, mesh_name, show, speed, table, terms
from meshwright.hardware import System
from meshwright.mesh import MeshShape, parse_mesh
from meshwright.planner import Plan, Ranking, make_plan, rank, reason, why, write_plan
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_seconds
from meshwright.workload import Workload


@dataclass(frozen=True)
class Args:
    """From a model, chips and a batch to a mesh: memory, every collective and the step time, and why.

    Example: meshwright plan llama3-8b --on v5p:4x4x4 --batch 512 --seq-len 8192 -o plan.yaml
    """

    subject: Annotated[Subject, tyro.conf.arg(name="")]
    mesh_dim: str | None = None
    """Price this mesh alone: dp,fsdp,tp,sp as 1,-1,4,1, or names, as fsdp=-1,tp=4. One degree may be -1."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Where to write the plan, as YAML that verify and train read."""
    top: int = 8
    """The candidates to print."""
    json: bool = False
    """Print {"candidates": [record, …]}, best first, instead of the table."""


def run(args: Args) -> int:
    """Print the ranking, and write the plan where one is asked for."""
    workload, system = read_subject(args.subject)
    if args.mesh_dim is None:
        ranking = rank(workload, system)
    else:
        mesh = parse_mesh(args.mesh_dim, num_devices=system.num_devices)
        ranking = Ranking((make_plan(workload, mesh, system).predicted,), 1)
    if args.json:
        print(json.dumps({"candidates": [record.to_json() for record in ranking.candidates]}, indent=2))
    else:
        _print(ranking, workload, system, args.top)
    if args.output is not None:
        best = ranking.candidates[0]
        write_plan(
            Plan(workload=workload, hardware=str(system), mesh=MeshShape(**best.mesh), predicted=best), args.output
        )
        if not args.json:
            print(f" next   meshwright verify {args.output}")
    return 0


def _print(ranking: Ranking, workload: Workload, system: System, top: int) -> None:
    """The answer first, then why, then the runners-up, then the terms."""
    out, best = console(), ranking.candidates[0]
    meshes = f"{ranking.num_meshes} meshes, {len(ranking.candidates)} legal, {ranking.num_fit} fit"
    print(f"{headline(workload, str(system))}\n{meshes}\n")
    room = f"{show_bytes(best.memory_bytes['peak'])} of {show_bytes(system.usable_bytes)}"
    fits = "" if best.fits else "   DOES NOT FIT"
    show(out, f"  {mesh_name(best)}   {speed(best)}   {room}   {best.bound} bound{fits}", style="bold")
    for line in why(best, workload, system):
        print(folded(line))
    print()
    columns = ("", "mesh", "step", "MFU", "memory", "bound by", "loses because")
    rows = [_row(place, record, best) for place, record in enumerate(ranking.candidates[:top], start=1)]
    show(out, table(columns, rows, left=(1, 5, 6)))
    print()
    print(terms("step", {name: show_seconds(time) for name, time in best.breakdown_seconds.items()}))
    parts = {name: show_bytes(size) for name, size in best.memory_bytes.items() if name != "peak"}
    print(terms("memory", parts), end="\n\n")
    show(out, collective_table(best))


def _row(place: int, record: Record, best: Record) -> tuple[str, ...]:
    """A candidate's line."""
    step, mfu = show_seconds(record.step_seconds or 0.0), show_percent(record.mfu or 0.0)
    memory = show_bytes(record.memory_bytes["peak"])
    return str(place), mesh_name(record), step, mfu, memory, record.bound or "", reason(record, best)
