"""A plan: what runs on what, over which mesh, and what is predicted of it; a file that people can read and keep."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.hardware import System, lay_mesh, parse_system
from meshwright.mesh import MeshShape
from meshwright.planner.predict import predict
from meshwright.record import Record, record_from_json
from meshwright.workload import (
    DEFAULT,
    Strategy,
    Workload,
    check_mesh,
    check_positions,
    check_runnable,
    check_stage_remat,
    check_strategy,
    workload_from_data,
)

FORMAT = 1
"""The version of the file; another is refused."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A workload on a mesh of a system, run in one way, with its predicted record.

    hardware_file: the TOML file that describes the chip, where it is none of the project's own.
    """

    workload: Workload
    hardware: str
    mesh: MeshShape
    predicted: Record
    strategy: Strategy = DEFAULT
    hardware_file: str | None = None

    @property
    def system(self) -> System:
        """The system that `hardware` names."""
        return parse_system(self.hardware, hardware_file=self.hardware_file)

    @property
    def planned_only(self) -> str:
        """Why `meshwright train` cannot run this yet, in one line; nothing where it can."""
        try:
            check_mesh(self.workload, self.mesh)
            check_strategy(self.workload, self.mesh, self.strategy)
            check_runnable(self.workload.model, self.mesh, self.strategy)
            check_stage_remat(self.workload.remat, self.mesh, self.strategy)
        except MeshwrightError as error:
            return str(error)
        for name in (field.name for field in fields(Strategy) if field.name not in RUN):
            if (value := getattr(self.strategy, name)) != (runs := getattr(DEFAULT, name)):
                return f"{name}={value!r} can be planned, but what runs has {name}={runs!r}"
        is_refused = lay_mesh(self.system, self.mesh.layout).is_refused
        return f"{self.mesh} splits physical axes of {self.hardware}, which jax.make_mesh refuses" if is_refused else ""


RUN = (
    "sequence_parallel",
    "overlaps_tp",
    "num_microbatches",
    "schedule",
    "virtual_stages",
    "zero_stage",
    "attention",
    "sequence",
    "optimizer",
    "moment_dtype",
    "master_weights",
    "gradient_dtype",
    "matmul_dtype",
    "dropout",
)
"""The fields of a strategy that a step is run by; the others only say how other systems run one."""


def make_plan(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> Plan:
    """The plan of a workload on a mesh of a system; a mesh or strategy that cannot be, or does nothing, is an error."""
    check_positions(workload.model, workload.seq_len)
    check_mesh(workload, mesh)
    check_strategy(workload, mesh, strategy)
    check_kernel(system, strategy)
    return Plan(
        workload=workload,
        hardware=str(system),
        mesh=mesh,
        predicted=predict(workload, mesh, system, strategy),
        strategy=strategy,
        hardware_file=system.chip.file,
    )


def check_kernel(system: System, strategy: Strategy) -> None:
    """Raise where a system has not the kernel that a strategy names."""
    if strategy.attention == "cudnn" and system.chip.kind != "gpu":
        raise MeshwrightError(f"attention='cudnn' is a kernel of NVIDIA GPUs, {system} has none; use attention='flash'")


def as_run(plan: Plan) -> Plan:
    """The plan, as `meshwright train` runs it; one that cannot be run is an error that says why."""
    if reason := plan.planned_only:
        raise MeshwrightError(f"{reason}; `meshwright plan … --runnable` finds what can")
    return plan


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    return {
        "meshwright_plan": FORMAT,
        "workload": asdict(plan.workload),
        "hardware": plan.hardware,
        "hardware_file": plan.hardware_file,
        "mesh": plan.mesh.degrees,
        "strategy": asdict(plan.strategy),
        "predicted": plan.predicted.to_json(),
    }


def plan_from_data(data: dict[str, Any], *, name: str) -> Plan:
    """The plan that `plan_to_data` wrote; `name` is what an error calls it."""
    if not isinstance(data, dict) or data.get("meshwright_plan") != FORMAT:
        raise MeshwrightError(f"{name} is not a plan of format {FORMAT}; `meshwright plan … -o {name}` writes one")
    try:
        return Plan(
            workload=workload_from_data(data["workload"]),
            hardware=data["hardware"],
            hardware_file=data.get("hardware_file"),
            mesh=MeshShape(**data["mesh"]),
            strategy=Strategy(**data.get("strategy", {})),
            predicted=record_from_json(data["predicted"]),
        )
    except (KeyError, TypeError) as error:
        raise MeshwrightError(f"{name} is not a whole plan: {error}") from None


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan as YAML, whole or not at all."""
    import yaml  # A tenth of a second that plans without a file need not wait for.

    partial = path.with_name(path.name + ".partial")
    partial.write_text(yaml.safe_dump(plan_to_data(plan), sort_keys=False, allow_unicode=True))
    partial.rename(path)


def read_plan(path: Path) -> Plan:
    """The plan in a YAML file."""
    import yaml

    if not path.is_file():
        raise MeshwrightError(f"no plan {str(path)!r}; `meshwright plan … -o {path}` writes one")
    try:
        return plan_from_data(yaml.safe_load(path.read_text()), name=str(path))
    except yaml.YAMLError as error:
        raise MeshwrightError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
