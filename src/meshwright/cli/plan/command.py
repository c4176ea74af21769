"""`meshwright plan`: the best mesh and strategy to run a model on chips, the reasons, and alternatives.

Each kind of plan has its own arguments (`args`) and modules: ranking for training (`screen`), comparison of meshes
(`compare`), sweeps (`sweep`), ops (`ops`), existing plans in a file or a run (`kept`), serving (`serving`), any JAX
function (`programs`), settings of other frameworks (`exchange`).
"""

from __future__ import annotations

from typing import Any

from meshwright.cli.kept import kept_plan
from meshwright.cli.plan.args import Args, ImportArgs, ProgramArgs, ServeArgs
from meshwright.cli.plan.exchange import export_plan, print_imported, read_export
from meshwright.cli.plan.kept import print_kept
from meshwright.cli.plan.programs import NAMED
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.description.families.load import RESNETS, trained_seq_len
from meshwright.description.frameworks.framework import framework_fields
from meshwright.description.hardware.system import System
from meshwright.description.step.workload import Remat, Workload
from meshwright.mesh import MeshShape
from meshwright.options.declare import given_options
from meshwright.options.values import read_compared, read_count, read_mesh, read_price, read_price_of
from meshwright.pictures.charts import check_chart_file
from meshwright.planning.files import check_data_file
from meshwright.planning.library import (
    ALWAYS_CHOSEN,
    find_beyond,
    find_meshes,
    plan_one_mesh,
    plan_systems,
)
from meshwright.planning.options import read_strategy, read_workload, remats
from meshwright.planning.plan import Plan
from meshwright.planning.search import Ranking
from meshwright.planning.sweep import Sweep, read_sweep, swept_options
from meshwright.planning.why.training_run import training_run
from meshwright.support.files import check_outputs

EXAMPLES = (
    "meshwright plan llama3-8b --on v5p:4x4x4 --batch 512 --seq-len 8192 -o plan.yaml",
    "meshwright plan llama3-8b --on h100:64 --batch 512 --compare 1,64,1,1 8,8,1,1",
    "meshwright plan llama3-8b --on v5e:4x4 --serve decode --latency 30ms",
    "meshwright plan plan.yaml --ops",
    "meshwright plan resnet50 --on a100-80gb:8 --batch 256 --compiled 0",
    "meshwright plan my_module:make_step --on v5e:4x4",
    "meshwright plan llama3-8b --on v5p:4x4x4 --batch 512 --remat block --zero-stage 3 --export maxtext llama3.yml",
    "meshwright plan --import llama3.yml --on v5p:4x4x4",
    "meshwright plan llama3-8b --serve decode --help",
)

KINDS: dict[str, type] = {
    "a training plan": Args,
    "a serving plan (--serve decode)": ServeArgs,
    "a plan of a function": ProgramArgs,
    "the plan of another framework's settings (--import FILE)": ImportArgs,
}
"""The kinds of plans, as messages name them."""

HINTS = {
    ServeArgs: {"--batch-tokens": "--batch", "--seq-len": "--prompt-len"},
    Args: {"--prompt-len": "--seq-len"},
}
"""For each kind of plan, the options of other kinds, with the option to use instead."""


def args_of(words: list[str]) -> type:
    """Return the dataclass that the words of a `plan` command are arguments of, without parsing them.

    --serve: serving. --import: settings of another framework. A function, a script or a ResNet's name: programs.
    Otherwise: training.
    """
    if any(word.split("=")[0] == "--import" for word in words):
        return ImportArgs
    if any(NAMED.fullmatch(word) or word.lower() in RESNETS for word in words if not word.startswith("-")):
        return ProgramArgs
    if any(word.split("=")[0] == "--serve" for word in words):
        return ServeArgs
    return Args


def run(args: Args | ServeArgs | ProgramArgs | ImportArgs) -> int:
    """Print the requested plan, and write it if a file is named."""
    if isinstance(args, ImportArgs):
        return print_imported(args)
    if isinstance(args, ServeArgs):
        from meshwright.cli.plan.serving import plan_serving

        return plan_serving(args)
    if isinstance(args, ProgramArgs):
        from meshwright.cli.plan.programs import print_program_plan

        return print_program_plan(args)
    kept = kept_plan(args.model)
    return _Training(args).run() if kept is None else print_kept(args, kept)


class _Training:
    """The options of a training plan, and the modes in which it is printed."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.sweep = None if args.search.sweep is None else read_sweep(args.search.sweep)
        # The swept option is not read, so that typing it too is an error.
        options = given_options(args.workload, without=self.sweep.replaced if self.sweep else ())
        if self.sweep is not None:
            options = swept_options(self.sweep, options)
        self.policies: tuple[Remat, ...] = remats(args.workload.remat)
        self.workload, self.system = read_workload(args.model, options)
        self.fields: dict[str, Any] = framework_fields(args.search.framework, self.system.chip.kind)
        self.fields |= read_strategy(given_options(args.strategy), self.system.num_devices)
        self.searched = self.fields
        self.include_planned = args.search.include_planned or bool(args.search.framework)

    def run(self) -> int:
        """Print the sweep, the comparison or the ranking; return 1 if nothing that was requested fits, else 0."""
        # Each mode reads its own options; `check_all_read` rejects any other option that was typed.
        if self.sweep is not None:
            return self._sweep(self.sweep)
        if self.args.search.compare:
            return self._compare(self.args.search.compare)
        if self.args.search.compare_systems:
            return self._compare_systems(self.args.search.compare_systems)
        return self._rank()

    def _sweep(self, sweep: Sweep) -> int:
        """Print the best plan for each of several values."""
        from meshwright.cli.plan.sweep import plan_sweep

        plot, as_json = self.args.output.plot, self.args.output.json
        if plot is not None:
            check_chart_file(plot)
        check_all_read(self.args, "with --sweep")
        return plan_sweep(sweep, self.workload, self.system, self._best, plot=plot, as_json=as_json)

    def _compare(self, texts: tuple[str, ...]) -> int:
        """Compare the meshes that --compare names."""
        from meshwright.cli.plan.compare import compare_data, print_compared

        meshes = read_compared(texts, self.system.num_devices)
        as_json = self.args.output.json
        check_all_read(self.args, "with --compare")
        with waiting(f"planning {len(meshes)} meshes"):
            plans = [self._of_mesh(mesh) for mesh in meshes]
        if as_json:
            compare_data(plans)
        else:
            print_compared(plans, trained_seq_len(self.args.model))
        return 0 if any(plan.predicted.fits for plan in plans) else 1

    def _compare_systems(self, names: tuple[str, ...]) -> int:
        """Compare the best plans on --on and on the systems that --compare-systems names."""
        from meshwright.cli.plan.systems import print_systems, systems_data

        search = self.args.search
        tokens = None if search.tokens is None else read_count("--tokens", search.tokens)
        price = None if tokens is None else search.price
        as_json, framework = self.args.output.json, search.framework
        options = given_options(self.args.workload)
        strategy = given_options(self.args.strategy)
        check_all_read(self.args, "with --compare-systems")
        with waiting(f"planning {self.workload.model.name} on {len(names) + 1} systems"):
            plans = plan_systems(
                self.args.model, (self.system, *names), options, strategy,
                framework=framework, include_planned=self.include_planned,
            )  # fmt: skip
        runs = [
            None
            if tokens is None
            else training_run(
                plan.predicted,
                plan.system.num_chips,
                tokens,
                None if price is None else read_price_of(price, plan.system.chip.name),
            )
            for plan in plans
        ]
        (systems_data if as_json else print_systems)(plans, runs)
        return 0 if any(plan.predicted.fits for plan in plans) else 1

    def _rank(self) -> int:
        """Rank the best plans, and compare the mesh that --mesh names with them."""
        from meshwright.cli.plan.screen import Shown, plan_data, print_plan

        search_args, output = self.args.search, self.args.output
        mesh = None if search_args.mesh is None else read_mesh(search_args.mesh, self.system.num_devices)
        if mesh is not None:  # Options that a search always chooses itself apply to the requested mesh only.
            self.searched = {name: value for name, value in self.fields.items() if name not in ALWAYS_CHOSEN}
        top = read_count("--top", search_args.top)
        tokens = None if search_args.tokens is None else read_count("--tokens", search_args.tokens)
        price = None if tokens is None or search_args.price is None else read_price(search_args.price)
        path, plot, with_ops, as_json = output.output, output.plot, output.ops, output.json
        export = read_export(output.export)
        with_evidence = as_json or output.evidence
        # JSON has everything, so that --explain has no effect with it.
        is_explained = as_json or output.explain
        if path is not None:
            check_data_file(path)
        if plot is not None:
            check_chart_file(plot)
        check_outputs(path, plot, export and export.path)
        check_all_read(self.args)
        with waiting(f"planning {self.workload.model.name} on {self.system}"):
            asked = None if mesh is None else self._of_mesh(mesh)
            ranking = self._find(self.workload, self.system, top=top)
            best = ranking.plans[0]
            is_wanted = not best.planned_only and (is_explained or not best.predicted.fits)
            is_wanted = is_wanted and not self.include_planned
            beyond = find_beyond(best, self.policies, self.searched) if is_wanted else None
        chosen = asked or best
        if path is not None:
            chosen.write(path)
        if plot is not None:
            from meshwright.cli.plan.sweep import plot_plan

            with waiting(f"drawing {plot}"):
                plot_plan(ranking.plans, plot)
        run = None if tokens is None else training_run(chosen.predicted, self.system.num_chips, tokens, price)
        shown = Shown(ranking=ranking, asked=asked, beyond=beyond, run=run, trained=trained_seq_len(self.args.model))
        if as_json:
            plan_data(shown, with_ops=with_ops)
        else:
            print_plan(shown, output=path, is_explained=is_explained, with_ops=with_ops, with_evidence=with_evidence)
        export_plan(chosen, export, as_json=as_json)
        return 0 if chosen.predicted.fits else 1

    def _of_mesh(self, mesh: MeshShape) -> Plan:
        """Return the plan of a mesh."""
        planned = self.include_planned
        return plan_one_mesh(self.workload, mesh, self.system, self.policies, self.fields, include_planned=planned)

    def _best(self, workload: Workload, system: System) -> Plan:
        """Return the best plan of another workload or system."""
        return self._find(workload, system, top=1).plans[0]

    def _find(self, workload: Workload, system: System, *, top: int) -> Ranking:
        """Return the best plans of a workload on a system, among those that can run or (--include-planned) all."""
        planned = self.include_planned
        return find_meshes(workload, system, self.policies, self.searched, top=top, include_planned=planned)
