"""`meshwright plan`: the best mesh and way to run a model on chips, why, and what comes near it.

Each kind of plan has a file: of training the ranking (`plan_screen`), meshes beside each other (`plan_compare`), sweeps
(`plan_sweep`), ops (`plan_ops`); image models (`plan_images`); serving (`plan_serving`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from meshwright.cli.common import Subject, read_subject, remats
from meshwright.cli.plan_serving import ServingArgs, check_training, plan_serving, read_serving
from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.mesh import MeshShape, parse_mesh
from meshwright.planner import Plan, Ranking, find_best, plan_mesh, rank, write_plan
from meshwright.workload import RESNETS, Attention, Dtype, Optimizer, Workload


@dataclass(frozen=True)
class Choices:
    """What the planner is not to choose; what is left out it chooses, or takes as written here."""

    num_microbatches: int | None = None
    """Parts of a device's batch that run one after the other."""
    zero_stage: Literal[1, 2, 3] | None = None
    """What fsdp shards: 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    attention: Attention | None = None
    """flash, a fused kernel (on TPUs and GPUs where nothing is said), cudnn, that of NVIDIA, or scores in memory."""
    optimizer: Optimizer | None = None
    """What keeps moments (adamw)."""
    param_dtype: Dtype | None = None
    """What parameters, gradients and moments are kept in (f32)."""

    @property
    def strategy(self) -> dict[str, Any]:
        """What is said of the strategy."""
        return {name: value for name, value in vars(self).items() if name != "param_dtype" and value is not None}


@dataclass(frozen=True)
class Args:
    """From a model, chips and a batch to a mesh: memory, every collective and the step time, and why.

    Example: meshwright plan llama3-8b --on v5p:4x4x4 --batch 512 --seq-len 8192 -o plan.yaml
    Meshes beside each other: meshwright plan llama3-8b --on h100:64 --batch 512 --compare 1,64,1,1 8,8,1,1
    """

    subject: Annotated[Subject, tyro.conf.arg(name="")]
    mesh_dim: str | None = None
    """Lay this mesh beside the best: dp,fsdp,tp,sp as 1,-1,4,1, or names, as fsdp=-1,tp=4. One degree may be -1. The
    file of -o is then of this one."""
    compare: tuple[str, ...] = ()
    """Lay these meshes beside each other instead of searching, each as in --mesh-dim."""
    runnable: bool = False
    """Plan only what train runs today, on these chips."""
    choices: Annotated[Choices, tyro.conf.arg(name="")] = field(default_factory=Choices)
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Where to write the plan, as YAML that verify and train read."""
    top: int = 8
    """The candidates to print."""
    sweep: str | None = None
    """The best for each of several values, as chips=64..1024, batch=96,192,384 or seq-len=2k..32k."""
    plot: Path | None = None
    """Draw the candidates, or the sweep, to this file (.svg, .png or .pdf)."""
    ops: bool = False
    """Print every product of the best mesh's step in the notation too: sizes, flops, collectives, what binds it."""
    serving: Annotated[ServingArgs, tyro.conf.arg(name="")] = field(default_factory=ServingArgs)
    json: bool = False
    """Print {"candidates": [record, …]}, best first, instead of the tables; --mesh-dim adds "asked", --ops "ops"."""


def run(args: Args) -> int:
    """Print the plan that is asked for, and write it where a file is named."""
    if args.subject.model in RESNETS:
        return _images(args)
    if args.serving.purpose != "train":
        return _serving(args)
    check_training(args.serving)
    if args.runnable and args.choices.strategy:
        name = next(iter(args.choices.strategy)).replace("_", "-")
        raise MeshwrightError(f"--{name} is for what can be planned; --runnable plans how train runs it today")
    workload, system = read_subject(args.subject)
    if args.choices.param_dtype:
        workload = replace(workload, param_dtype=args.choices.param_dtype)
    if args.sweep:
        return _sweep(args, workload, system)
    if args.compare:
        return _compare(args, workload, system)
    return _train(args, workload, system)


def _train(args: Args, workload: Workload, system: System) -> int:
    """The best plans of training, and the mesh that is asked for beside them."""
    from meshwright.cli.plan_screen import plan_data, print_plan

    asked = _of_mesh(args, workload, system, args.mesh_dim) if args.mesh_dim else None
    ranking = rank(
        workload,
        system,
        remats=remats(args.subject),
        top=max(1, args.top),
        is_runnable=args.runnable,
        **args.choices.strategy,
    )
    chosen = asked or ranking.plans[0]
    if args.output is not None:
        write_plan(chosen, args.output)
    if args.plot is not None:
        _plot(args.plot, ranking, workload, system)
    if args.json:
        plan_data(ranking, asked, with_ops=args.ops)
    else:
        print_plan(ranking, asked, top=args.top, output=args.output, with_ops=args.ops)
    return 0


def _of_mesh(args: Args, workload: Workload, system: System, text: str) -> Plan:
    """The plan of the mesh that a text means."""
    mesh = parse_mesh(text, num_devices=system.num_devices)
    if args.runnable:
        from meshwright.planner import make_plan

        return make_plan(workload, mesh, system)
    return plan_mesh(workload, mesh, system, remats=remats(args.subject), **args.choices.strategy)


def _compare(args: Args, workload: Workload, system: System) -> int:
    """Meshes beside each other."""
    from meshwright.cli.plan_compare import compare_data, print_compared

    plans = [_of_mesh(args, workload, system, text) for text in args.compare]
    if args.json:
        compare_data(plans)
    else:
        print_compared(plans)
    return 0


def _sweep(args: Args, workload: Workload, system: System) -> int:
    """The best for each of several values."""
    from meshwright.cli.plan_sweep import plan_sweep

    def best(workload: Workload, system: System):
        if args.runnable:
            return rank(workload, system, remats=remats(args.subject), top=1, is_runnable=True).plans[0].predicted
        return find_best(workload, system, remats=remats(args.subject), **args.choices.strategy).predicted

    plan_sweep(args.sweep or "", workload, system, best, plot=args.plot, as_json=args.json)
    return 0


def _plot(path: Path, ranking: Ranking, workload: Workload, system: System) -> None:
    """Draw the candidates."""
    from meshwright.cli.plan_sweep import plot_plan

    plot_plan([plan.predicted for plan in ranking.plans], path, workload, system)


def _images(args: Args) -> int:
    """The meshes of an image model."""
    from meshwright.cli.plan_images import plan_images

    check_training(args.serving)
    others = vars(args.choices) | {
        "for": None if args.serving.purpose == "train" else args.serving.purpose,
        "compare": args.compare or None,
        **{name: getattr(args, name) for name in ("runnable", "output", "sweep", "plot", "ops")},
    }
    return plan_images(args.subject, args.mesh_dim, top=args.top, as_json=args.json, others=others)


def _serving(args: Args) -> int:
    """The layouts to serve a model on."""
    others = vars(args.choices) | {
        "compare": args.compare or None,
        **{name: getattr(args, name) for name in ("runnable", "sweep", "plot", "ops")},
    }
    serving, system = read_serving(args.serving, args.subject, others)
    mesh: MeshShape | None = parse_mesh(args.mesh_dim, num_devices=system.num_devices) if args.mesh_dim else None
    return plan_serving(serving, system, mesh=mesh, top=args.top, as_json=args.json, output=args.output)
