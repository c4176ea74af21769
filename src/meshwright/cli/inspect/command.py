"""`meshwright inspect`: report what the compiled program of any function or HLO text does, and its mistakes."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from meshwright.cli.kept import kept_plan
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.cli.words.spell import spelled
from meshwright.description.hardware.system import parse_system
from meshwright.errors import DoesNotFitError, MeshwrightError
from meshwright.mesh import parse_axes
from meshwright.options.declare import Json, Mesh, option, positional
from meshwright.pictures.screens.inspection import print_buffers, print_screen
from meshwright.pictures.text import next_line
from meshwright.proof.inspection.script import read_script, simulate_devices
from meshwright.support.files import check_outputs

if TYPE_CHECKING:
    from meshwright.proof.inspection.inspection import Inspection

EXAMPLES = (
    "meshwright inspect my_module:make_step --mesh dp=2,fsdp=4",
    "meshwright inspect my_module:make_step --mesh fsdp=16,tp=4 --on v5p:4x4x4 --html report.html",
    "meshwright inspect train.py --on v5e:4x4",
    "meshwright inspect plan.yaml",
    "meshwright inspect module.after_optimizations.txt --mesh data=2,model=4 --on v5e:2x4",
)

_USUAL_DEVICES = 8
"""Simulated devices of a script without --on and --mesh."""

_MOST_AT_IMPORT = 1024
"""The most devices that are simulated for a module, which may make a mesh when it is imported; more take seconds."""


@dataclass(frozen=True)
class Args:
    """Compile any JAX function, script or plan's step, or read HLO text, and report mistakes.

    MODULE:FUNCTION or FILE.py:FUNCTION takes a mesh and returns jax.jit(…).lower(…), or (f, args).
    A SCRIPT, 'FILE.py --its-option', runs on simulated devices until it calls its step again;
    FILE.py:NAME takes another of its jitted functions.
    """

    subject: Annotated[str, positional("MODULE:FUNCTION|SCRIPT|DUMP|PLAN|RUN")]
    """A function that takes a mesh, a script, a file of HLO text (.gz too), or a plan.yaml or a run, for its step."""
    mesh: Mesh = None
    """Axes and degrees, outermost first, any names: dp=2,fsdp=4. Default: a plan's or a script's own."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware to compile for, as v5p:4x4x4 or h100:16; for a dump, its hardware. Default: simulated devices.
    """
    axes: Annotated[Literal["explicit", "auto"] | None, option("explicit|auto")] = None
    """Type of the mesh's axes. Default: explicit, then auto if that does not lower, with a note."""
    effort: Annotated[Literal["fast", "default"], option("fast|default")] = "default"
    """Effort of the TPU compiler: fast for a first look, default for the program that will run. Default: default."""
    state: Annotated[tuple[str, ...], option("NAME…")] = ()
    """The arguments that are a step's state, whose new values it returns. Default: the arguments that it updates."""
    html: Annotated[Path | None, option("FILE", "-o")] = None
    """Write one page with everything, and the step's timeline if it was simulated."""
    trace: Annotated[Path | None, option("FILE")] = None
    """Write the simulated step as a trace for ui.perfetto.dev, gzipped if the name ends in .gz. TPUs and GPUs only.
    """
    memory: bool = False
    """Also print the largest buffers at the peak of memory: shape, bytes, and the source line of each."""
    check: bool = False
    """Exit with 1 if there is a finding that counts, for use as a test."""
    ignore: Annotated[tuple[str, ...], option("ID[:GLOB]…")] = ()
    """Findings that do not count, by id; with a colon, only in matching files: padded-arrays:models/*.py."""
    baseline: Annotated[Path | None, option("FILE")] = None
    """A file from --write-baseline: its findings do not count, even if their lines have moved."""
    write_baseline: Annotated[Path | None, option("FILE")] = None
    """Write the present findings, without ignored ones, as a baseline to commit."""
    sarif: Annotated[Path | None, option("FILE")] = None
    """Write the findings that count as SARIF 2.1.0, for code scanning."""
    json: Json = False
    """Print {"name", "record", "flops_by_scope", "findings", …} instead of the tables."""


def run(args: Args) -> int:
    """Compile or read the program, and print it; return 1 if it does not fit, or has findings and --check is given."""
    page, trace, as_json, is_check, memory = args.html, args.trace, args.json, args.check, args.memory
    check_outputs(page, trace, args.write_baseline, args.sarif)
    try:
        found = _inspection(args)
    except DoesNotFitError as error:
        from meshwright.description.hlo.parser import parse_hlo
        from meshwright.proof.simulate.buffers import read_buffers

        print(f"error: {error}", file=sys.stderr)
        if error.hlo:
            print_buffers(read_buffers(parse_hlo(error.hlo)).live)
        return 1
    if memory and not found.buffers:
        raise MeshwrightError(f"{found.name} has no schedule, so nothing tells its buffers; leave --memory out")
    if page is not None:
        found.html(page, trace=trace)
    if trace is not None:
        found.trace(trace)
    if args.write_baseline is not None:
        found.write_baseline(args.write_baseline)
    if args.sarif is not None:
        found.sarif(args.sarif)
    if as_json:
        data = found.to_json()
        if memory:
            data["buffers"] = [vars(one) | {"shape": str(one.shape)} for one in found.buffers]
        print(json.dumps(data, indent=2))
    else:
        print_screen(found, memory=memory)
        if page is None:
            print(next_line(spelled("inspect", args, html="report.html")))
        else:
            test = spelled("inspect", args, without=("html", "trace", "memory", "write_baseline", "sarif"), check=True)
            print(next_line(test, note="as a test"))
    return int(is_check and bool(found.findings))


def _inspection(args: Args) -> Inspection:
    """Compile or read the program that the arguments name, and return its inspection."""
    options: dict[str, Any] = {"state": args.state or None, "ignore": args.ignore, "baseline": args.baseline}
    if (plan := kept_plan(args.subject)) is not None:
        effort = args.effort if plan.system.chip.kind == "tpu" else "default"
        _check_trace(args, plan.hardware)
        check_all_read(args, f"with {args.subject}, which is already planned")
        with waiting(f"compiling {plan.workload.model.name} on {plan.mesh} for {plan.hardware}"):
            from meshwright.proof.inspection.functions import inspect

            return inspect(plan, effort=effort, **options)
    script = read_script(args.subject)
    is_run = script is not None and not script.takes_mesh(has_mesh=args.mesh is not None)
    if args.subject.endswith(".ipynb"):
        raise MeshwrightError(
            f"{args.subject} is a notebook; a cell of it inspects a call: %load_ext meshwright, then %inspect"
            " step(state, batch)"
        )
    if args.mesh is None and not is_run:
        raise MeshwrightError("--mesh is missing; it has every axis of the program, as dp=2,fsdp=4")
    mesh = None if args.mesh is None else parse_axes(args.mesh)
    if script is None and Path(args.subject).is_file():
        _check_trace(args, args.on)
        check_all_read(args, "with a dump, which is already compiled")
        from meshwright.proof.inspection.functions import inspect

        return inspect(args.subject, mesh=mesh, on=args.on, **options)
    if script is None and ":" not in args.subject:
        raise MeshwrightError(f"{args.subject!r} is neither a file nor module:function")
    devices = f"cpu:{math.prod(mesh.values())}" if mesh is not None else None
    on = args.on or devices
    count = parse_system(on).num_devices if on else _USUAL_DEVICES
    if is_run or count <= _MOST_AT_IMPORT:
        simulate_devices(count)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # this process only reads; another one compiles
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    _check_trace(args, on)
    options["types"] = args.axes if mesh is not None else None
    options["effort"] = args.effort if on is None or parse_system(on).chip.kind == "tpu" else "default"
    check_all_read(args, f"on {on}" if on else "with a script without --mesh and --on")
    with waiting(f"compiling {args.subject} for {on or 'simulated devices'}"):
        from meshwright.proof.inspection.functions import inspect

        return inspect(args.subject, mesh=mesh, on=on, **options)


def _check_trace(args: Args, on: str | None) -> None:
    """Raise if --trace is given without a simulated step to write: no hardware `on`, a CPU, or --effort fast."""
    if args.trace is not None and (on is None or on.startswith("cpu") or args.effort == "fast"):
        raise MeshwrightError("--trace needs --on a TPU or GPUs, and --effort default: else no step is simulated")
