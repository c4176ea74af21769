"""A plan: workload, system, mesh, strategy and prediction, as an object and as a file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from meshwright.description.families.registry import workload_from_data
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import System, parse_system
from meshwright.description.step.legality import check_mesh, check_positions, check_runnable, check_strategy
from meshwright.description.step.model import Model
from meshwright.description.step.reference import check_reference
from meshwright.description.step.rules import logical_rules, stream_rules
from meshwright.description.step.sequence import attention_ops
from meshwright.description.step.stages import check_stage_remat
from meshwright.description.step.strategy import DEFAULT, Strategy, strategy_from_data
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.options.values import read_mesh
from meshwright.planning.files import has_fields, read_data, write_data
from meshwright.planning.prediction import predict
from meshwright.planning.why.training_run import TrainingRun
from meshwright.record import Record
from meshwright.support.field_types import from_data
from meshwright.support.files import as_path, write_file
from meshwright.support.notebook import card
from meshwright.units import show_degrees

FORMAT = 1
"""The version of the file format; other versions are refused."""

_OF_DATA = ("batch", "sequence", "residual_sequence", "activation")
"""Logical axes of activations."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A workload on a mesh of a system with a strategy, and its predicted record.

    `plan.mesh` is the shape of the mesh, and `plan.mesh()` returns the `jax.sharding.Mesh`. `plan.shardings(tree)` and
    `plan.rules` describe how arrays are sharded.

    Attributes:
        hardware: the system as text, such as `v5p:4x4x4`.
        hardware_file: the TOML file of a custom chip.
        memory_headroom: see `System`.
        alternatives: the meshes ranked after this one by the search; not written to a file.
        training_run: the time and cost of training on a number of tokens, if requested; not written to a file.
    """

    workload: Workload
    hardware: str
    mesh: MeshShape
    predicted: Record
    strategy: Strategy = DEFAULT
    hardware_file: str | None = None
    memory_headroom: float | None = None
    alternatives: tuple[Plan, ...] = field(default=(), compare=False, repr=False)
    training_run: TrainingRun | None = field(default=None, compare=False, repr=False)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a plan from a YAML or JSON file."""
        return read_plan(as_path(path))

    def write(self, path: str | Path) -> None:
        """Write the plan to a file, completely or not at all: as JSON if its name ends in `.json`, else as YAML."""
        write_plan(self, as_path(path))

    def export(self, framework: str, path: str | Path) -> Mapping[str, str]:
        """Write the plan as settings of another framework: maxtext, torchtitan, megatron or levanter.

        The settings are read back and compared with the plan. Returns, for each field of the plan that the settings
        leave out, the reason: the framework decides it itself.

        Raises:
            MeshwrightError: the framework cannot run the plan; the message names the field.
        """
        from meshwright.planning.exchange.export import export_settings

        exported = export_settings(framework, self.workload, self.mesh, self.strategy, self.system)
        write_file(as_path(path), exported.text)
        return exported.unsaid

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data, in the format of its file."""
        return plan_to_data(self)

    @property
    def rules(self) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
        """Pairs (logical axis, its mesh axes), in the form that `flax.linen.logical_axis_rules` takes."""
        shown: dict[str, str | tuple[str, ...] | None] = {}
        rules = logical_rules(self.strategy)
        # Flax gives a mesh axis to the first rule that has it: an activation's batch must get fsdp, not its width.
        for name in (*_OF_DATA, *(name for name in rules if name not in _OF_DATA)):
            axes = rules[name]
            live = tuple(axis for axis in axes if self.mesh.degree(axis) > 1)
            shown[name] = live if len(live) > 1 else live[0] if live else None
        return tuple(shown.items())

    def shardings(
        self,
        tree: Any,
        axes: Mapping[str, Sequence[str | None] | Literal["replicated"]] | None = None,
        mesh: Any = None,
    ) -> Any:
        """Return a `NamedSharding` for every leaf of a tree of arrays (or of anything with a shape).

        Without `axes` the tree holds the parameters of the plan's own model, and each leaf is found by its path
        (`layers.query`). With `axes` the tree may be any program's. The keys of `axes` are regular expressions for
        whole paths (`.*attention.*kernel`); the first match is used. A value is the logical axis of each dim, None for
        a dim that is not split, or "replicated" for the whole array. `"*": "replicated"` applies to leaves that no
        expression matches. NNX paths match with and without the `.value` at their end. Scalars need no rule.

        mesh: the result of `plan.mesh(types="auto")`, for programs that leave shardings to the compiler; by default
        `plan.mesh()`, whose axes are explicit.

        Raises:
            MeshwrightError: a leaf has no rule, an expression matches no leaf, or a degree does not divide a dim.
        """
        from meshwright.execution.runtime.carry import plan_shardings

        return plan_shardings(self, tree, axes, mesh)

    def __str__(self) -> str:
        """Format workload, mesh and prediction in two lines."""
        workload = self.workload
        tokens = f"{workload.sequences:,} × {workload.seq_len:,} tokens{workload.in_pairs}"
        return f"{workload.model.name} · {workload.task} · {tokens} · {self.hardware}\n{self.mesh}   {self.predicted}"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the plan, the meshes ranked after it, and the terms of step time and memory."""
        title, answer = str(self).split("\n")
        meshes = [(str(plan.mesh), str(plan.predicted)) for plan in self.alternatives[:5]]
        others = (("other meshes", ""), meshes)
        return card(title, answer, (others, *self.predicted.tables()), self.predicted.notes)

    @property
    def system(self) -> System:
        """The system that `hardware` names, with the plan's memory headroom."""
        system = parse_system(self.hardware, hardware_file=self.hardware_file)
        return replace(system, memory_headroom=self.memory_headroom)

    @property
    def planned_only(self) -> str:
        """Why `meshwright train` cannot run this plan yet, in one line; '' if it can."""
        if name := self.strategy.profile.name:
            return f"it is planned as {name} runs it; without --framework it is planned as meshwright does"
        try:
            check_mesh(self.workload, self.mesh, stream_rules(self.strategy.tp_stream))
            check_strategy(self.workload, self.mesh, self.strategy)
            check_runnable(self.workload.model, self.mesh, self.strategy)
            check_stage_remat(self.workload.remat, self.mesh, self.strategy)
            check_reference(self.workload, self.mesh, self.strategy, runs=True)
        except MeshwrightError as error:
            return str(error)
        for name in (known.name for known in fields(Strategy) if known.name not in RUN):
            if (value := getattr(self.strategy, name)) != (runs := getattr(DEFAULT, name)):
                return f"{name}={value} can be planned, but what runs has {name}={runs}"
        is_refused = lay_mesh(self.system, self.mesh.layout).is_refused
        return f"{self.mesh} splits physical axes of {self.hardware}, which jax.make_mesh refuses" if is_refused else ""


RUN = (
    "tp_stream",
    "collective_matmul",
    "num_microbatches",
    "schedule",
    "virtual_stages",
    "zero_stage",
    "attention",
    "sp_method",
    "optimizer",
    "moment_dtype",
    "master_weights",
    "gradient_dtype",
    "matmul_dtype",
    "dropout",
    "reference_mesh",
)
"""Strategy fields that describe how a step runs in meshwright; the other fields describe other frameworks."""


def make_plan(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> Plan:
    """Return the plan of a workload on a mesh. Raises if the mesh or the strategy is illegal, or has no effect."""
    check_positions(workload.model, workload.seq_len)
    check_mesh(workload, mesh, stream_rules(strategy.tp_stream))
    check_strategy(workload, mesh, strategy)
    check_reference(workload, mesh, strategy)
    check_kernel(workload.model, system, strategy)
    return predicted_plan(workload, mesh, system, strategy)


def predicted_plan(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> Plan:
    """Return the plan of a workload on a mesh that is already known to be legal."""
    return Plan(
        workload=workload,
        hardware=str(system),
        mesh=mesh,
        predicted=predict(workload, mesh, system, strategy),
        strategy=strategy,
        hardware_file=system.chip.file,
        memory_headroom=system.memory_headroom,
    )


def check_kernel(model: Model, system: System, strategy: Strategy) -> None:
    """Raise if a system does not have the attention kernel that a strategy names, for the heads of a model."""
    if strategy.attention != "cudnn":
        return
    if system.chip.kind != "gpu":
        raise MeshwrightError(f"attention='cudnn' is a kernel of NVIDIA GPUs, {system} has none; use attention='flash'")
    widest = max((op.qk_dim for op in attention_ops(model)), default=0)
    if widest > system.chip.attention_head_dim:
        raise MeshwrightError(
            f"attention='cudnn' takes heads of up to {system.chip.attention_head_dim} dims on {system.chip.name}, model"
            f" {model.name} has {widest}; use attention='flash' or 'scores'"
        )


def as_run(plan: Plan) -> Plan:
    """Return the same plan. Raises if `meshwright train` cannot run it, with the reason."""
    if reason := plan.planned_only:
        is_of_model = bool(plan.workload.model.planned_only)  # Then no plan of the model runs.
        hint = "" if is_of_model else "; `meshwright plan` without --include-planned finds what can"
        raise MeshwrightError(f"{reason}{hint}")
    return plan


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data, in the format of its file."""
    return {
        "meshwright_plan": FORMAT,
        "workload": asdict(plan.workload),
        "hardware": plan.hardware,
        "hardware_file": plan.hardware_file,
        "memory_headroom": plan.memory_headroom,
        "mesh": plan.mesh.degrees,
        "strategy": asdict(plan.strategy),
        "predicted": plan.predicted.to_json(),
    }


def plan_from_data(data: Any, *, name: str) -> Plan:
    """Return the plan in plain data from `plan_to_data`, with a new prediction. name: the file's name, for errors."""
    if has_fields(data) and "meshwright_serving_plan" in data:
        raise MeshwrightError(
            f"{name} is a plan to serve, which `meshwright serve MODEL --plan {shlex.quote(name)}` runs;"
            f" `meshwright plan` without --serve makes plans to train"
        )
    if not has_fields(data) or data.get("meshwright_plan") is not FORMAT:
        raise MeshwrightError(
            f"{name} is not a plan of format {FORMAT}; `meshwright plan … -o {shlex.quote(name)}` writes one"
        )
    fields = {field: value for field, value in data.items() if field != "meshwright_plan"}
    try:
        if "strategy" not in fields:
            raise MeshwrightError("strategy is missing")
        read = from_data(Plan, fields, readers={Workload: workload_from_data, Strategy: strategy_from_data})
        system = read.system
        made = make_plan(read.workload, read_mesh(read.mesh, system.num_devices), system, read.strategy)
        check_predicted(read.predicted, read.mesh)
    except MeshwrightError as error:
        raise MeshwrightError(f"{name} is not a whole plan: {error}") from None
    return replace(made, predicted=predicted_again(made.predicted, read.predicted, name=name))


def predicted_again(new: Record, stored: Record, *, name: str) -> Record:
    """Return `new`, the new prediction of a plan, with a note if the plan's file has another prediction (`stored`).

    They differ if the file was edited or cut off, or was written by another version. name: the file's name.
    """
    if replace(new, notes=()) == replace(stored, notes=()):
        return new
    note = f"predicted again: {name} was edited, or written by another version, and has {stored}"
    return replace(new, notes=(note, *new.notes))


def check_predicted(found: Record, mesh: MeshShape) -> None:
    """Raise if the prediction in a plan file is impossible, or is of another mesh than the plan's."""
    if found.step_seconds is None or found.step_seconds <= 0:
        raise MeshwrightError(f"predicted.step_seconds is {found.step_seconds}; it is a number above 0")
    if found.fits is None:
        raise MeshwrightError("predicted.fits is None; it is True or False")
    if found.mesh != mesh.degrees:
        raise MeshwrightError(
            f"predicted.mesh is {show_degrees(found.mesh)}; it is the plan's, {show_degrees(mesh.degrees)}"
        )


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan to a file, completely or not at all: as JSON if its name ends in `.json`, else as YAML."""
    write_data(plan_to_data(plan), path)


def read_plan(path: Path) -> Plan:
    """Return the plan in a YAML or JSON file, with a new prediction. Raises if there is no file, or no plan in it."""
    if not path.is_file():
        raise MeshwrightError(f"no plan {str(path)!r}; `meshwright plan … -o {shlex.quote(str(path))}` writes one")
    return plan_from_data(read_data(path), name=str(path))


def is_plan_file(path: str | Path) -> bool:
    """Whether a path is a plan file: every `.yaml` and `.yml`, and other files if their contents are a plan."""
    path = Path(path)
    if path.suffix.lower() in (".yaml", ".yml") or not path.is_file() or not os.access(path, os.R_OK):
        return path.suffix.lower() in (".yaml", ".yml")
    with path.open(encoding="utf-8", errors="replace") as file:
        return "meshwright_plan" in (head := file.read(200)) or "meshwright_serving_plan" in head
