"""`meshwright plan`: the best mesh and way to run a model on chips, why, and what comes near it.

Each kind of plan has its arguments (`plan_args`) and a file: of training the ranking (`plan_screen`), meshes beside
each other (`plan_compare`), sweeps (`plan_sweep`), ops (`plan_ops`); image models (`plan_images`); serving
(`plan_serving`).
"""

from __future__ import annotations

from typing import Any

from meshwright.cli.arguments import given_options
from meshwright.cli.plan_args import Args, ImageArgs, ServeArgs
from meshwright.errors import MeshwrightError
from meshwright.files import check_output
from meshwright.hardware import System
from meshwright.planner import (
    Plan,
    find_meshes,
    plan_one_mesh,
    read_count,
    read_mesh,
    read_strategy,
    read_workload,
    remats,
)
from meshwright.record import Record
from meshwright.step import Remat, Workload

EXAMPLES = (
    "meshwright plan llama3-8b --on v5p:4x4x4 --batch 512 --seq-len 8192 -o plan.yaml",
    "meshwright plan llama3-8b --on h100:64 --batch 512 --compare 1,64,1,1 8,8,1,1",
    "meshwright plan llama3-8b --on v5e:4x4 --serve decode --latency 30ms",
    "meshwright plan resnet50 --on a100-80gb:8 --batch 256",
    "meshwright plan llama3-8b --serve decode --help",
)


def run(args: Args | ServeArgs | ImageArgs) -> int:
    """Print the plan that is asked for, and write it where a file is named."""
    if isinstance(args, ServeArgs):
        from meshwright.cli.plan_serving import plan_serving

        return plan_serving(args)
    if isinstance(args, ImageArgs):
        from meshwright.cli.plan_images import plan_images

        return plan_images(args)
    return _Training(args).run()


class _Training:
    """A training plan as its arguments ask for it."""

    def __init__(self, args: Args) -> None:
        self.args = args
        _check_together(args)
        options = given_options(args.workload) | {"param_dtype": args.fixed.param_dtype}
        self.policies: tuple[Remat, ...] = remats(args.workload.remat)
        self.workload, self.system = read_workload(args.model, options)
        self.fields: dict[str, Any] = read_strategy(
            {name: value for name, value in vars(args.fixed).items() if name != "param_dtype"}
        )
        if args.search.runnable and self.fields:
            name = next(iter(self.fields)).replace("_", "-")
            raise MeshwrightError(f"--{name} is for what can be planned; --runnable plans how train runs it today")
        self.top = read_count("--top", args.search.top)

    def run(self) -> int:
        """Print the sweep, the comparison or the ranking."""
        search_args, output = self.args.search, self.args.output
        if output.output is not None:
            check_output(output.output)
        if output.plot is not None:
            from meshwright.viz.charts import check_chart_file

            check_chart_file(output.plot)
        if search_args.sweep:
            from meshwright.cli.plan_sweep import plan_sweep

            plan_sweep(search_args.sweep, self.workload, self.system, self._best, plot=output.plot, as_json=output.json)
        elif search_args.compare:
            from meshwright.cli.plan_compare import compare_data, print_compared

            plans = [self._of_mesh(mesh) for mesh in search_args.compare]
            (compare_data if output.json else print_compared)(plans)
        else:
            self._rank()
        return 0

    def _rank(self) -> None:
        """The best plans, and the mesh that is asked for beside them."""
        from meshwright.cli.plan_screen import plan_data, print_plan

        output = self.args.output
        asked = self._of_mesh(self.args.search.mesh) if self.args.search.mesh is not None else None
        ranking = find_meshes(
            self.workload, self.system, self.policies, self.fields, top=self.top, runnable=self.args.search.runnable
        )
        if output.output is not None:
            (asked or ranking.plans[0]).write(output.output)
        if output.plot is not None:
            from meshwright.cli.plan_sweep import plot_plan

            plot_plan(ranking.plans, output.plot)
        if output.json:
            plan_data(ranking, asked, with_ops=output.ops)
        else:
            print_plan(ranking, asked, top=self.top, output=output.output, with_ops=output.ops)

    def _of_mesh(self, text: str) -> Plan:
        """The plan of the mesh that a text means."""
        mesh = read_mesh(text, self.system.num_devices)
        runnable = self.args.search.runnable
        return plan_one_mesh(self.workload, mesh, self.system, self.policies, self.fields, runnable=runnable)

    def _best(self, workload: Workload, system: System) -> Record:
        """The record of the best plan of another workload or system."""
        runnable = self.args.search.runnable
        return find_meshes(workload, system, self.policies, self.fields, top=1, runnable=runnable).plans[0].predicted


def _check_together(args: Args) -> None:
    """Raise where two options are given of which one would do nothing."""
    options = {"--sweep": args.search.sweep, "--compare": args.search.compare, "--mesh": args.search.mesh}
    said = [name for name, value in options.items() if value is not None and value != ()]
    if len(said) > 1:
        raise MeshwrightError(f"{said[0]} and {said[1]} do not go together; leave one out")
    if said and said[0] != "--mesh" and args.output.output is not None:
        raise MeshwrightError(f"{said[0]} writes no plan; leave -o out, and write the best with --mesh MESH -o FILE")
