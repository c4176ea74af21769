"""The arguments of `meshwright plan`, one dataclass for each kind: training, serving, any function."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from meshwright.options.declare import Json, Mesh, ShareText, option, positional
from meshwright.options.plan import StrategyArgs, WorkloadArgs
from meshwright.options.serving import FormatArgs, ServedArgs

Model = Annotated[str, positional("MODEL")]
Output = Annotated[Path | None, option("FILE", "-o")]
Top = Annotated[str, option("N")]


@dataclass(frozen=True)
class SearchArgs:
    """What to search and print."""

    mesh: Mesh = None
    """Compare this mesh with the best, and write it with -o, as fsdp=16,tp=4."""
    compare: Annotated[tuple[str, ...], option("MESH…")] = ()
    """Compare these meshes with each other instead of searching."""
    compare_systems: Annotated[tuple[str, ...], option("CHIPS…")] = ()
    """Compare the best plan on --on with the best on these systems, as h100:64 v5e:16x16."""
    sweep: Annotated[str | None, option("KEY=VALUES")] = None
    """Sweep values of one key: chips=64..1024, batch=96,192,384 or seq-len=2k..32k."""
    include_planned: Annotated[bool, option()] = False
    """Include plans that meshwright cannot train yet. Default: only plans that can run, if there are any."""
    framework: Annotated[str | None, option("NAME")] = None
    """Predict steps as another framework runs them: megatron-core, maxtext, torchtitan, …. Default: meshwright."""
    tokens: Annotated[str | None, option("N")] = None
    """Print the days and chip hours of training on this many tokens, as 15T."""
    price: Annotated[str | None, option("AMOUNT")] = None
    """With --tokens: price of a chip hour, as 4.2, to print the cost. With --compare-systems: h100=2.5,v5e=1.2.
    """
    top: Top = "5"
    """How many meshes to print. Default: 5."""


@dataclass(frozen=True)
class OutputArgs:
    """Output."""

    output: Output = None
    """Write the plan, as YAML or .json, for verify and train."""
    export: Annotated[tuple[str, ...], option("FRAMEWORK FILE")] = ()
    """Write the plan as settings of maxtext, torchtitan, megatron or levanter."""
    plot: Annotated[Path | None, option("FILE")] = None
    """Draw the candidates, or the sweep, to this file (.svg, .png or .pdf)."""
    evidence: Annotated[bool, option()] = False
    """Also print the published runs most like the plan, and how far their predictions were off."""
    explain: Annotated[bool, option()] = False
    """Also print terms of step and memory, collectives, rules of thumb, nearby plans, and faster plans not run yet."""
    ops: Annotated[bool, option()] = False
    """Also print every op of the best mesh's step in the notation: sizes, flops, collectives and bound."""
    json: Json = False
    """Print data instead of tables: {"candidates": [record, …], "why", "nearby", …}."""


@dataclass(frozen=True)
class Args:
    """Find the best mesh for a model on some chips: memory, every collective, the step time, and why."""

    model: Model
    """A preset (llama3-8b, …), a config.json, or a plan.yaml or a run to print again. See also --serve, resnet50."""
    workload: WorkloadArgs = field(default_factory=WorkloadArgs)
    search: SearchArgs = field(default_factory=SearchArgs)
    strategy: StrategyArgs = field(default_factory=StrategyArgs)
    output: OutputArgs = field(default_factory=OutputArgs)


@dataclass(frozen=True)
class ServingOutputArgs:
    """Output."""

    mesh: Mesh = None
    """Plan only this mesh: tp=4, or dp,fsdp,tp,sp as 1,1,4,1. Default: all."""
    top: Top = "5"
    """How many layouts to print. Default: 5."""
    output: Output = None
    """Write the best plan, as YAML or .json."""
    explain: Annotated[bool, option()] = False
    """Also print the frontier of latency and throughput, the terms of step and memory, and the collectives."""
    json: Json = False
    """Print data instead of tables: {"candidates": [plan, …], "frontier", …}."""


@dataclass(frozen=True)
class ServeArgs:
    """Find the best mesh and batch to serve a model on some chips, and the frontier of latency and throughput."""

    model: Model
    """A preset (llama3-8b, …) or the path of a Hugging Face config.json."""
    served: ServedArgs = field(default_factory=ServedArgs)
    formats: FormatArgs = field(default_factory=FormatArgs)
    output: ServingOutputArgs = field(default_factory=ServingOutputArgs)


@dataclass(frozen=True)
class ProgramArgs:
    """Find the mesh of any JAX function, and which dims its axes split: the best layouts are compiled and compared."""

    model: Annotated[str, positional("MODULE:FUNCTION|SCRIPT|RESNET")]
    """A function without arguments that returns (step, its arguments), or a script, as for inspect; or resnet50, …."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware, as v5e:4x4. Needed."""
    batch: Annotated[str | None, option("N")] = None
    """Images of a step of resnet18, 34, 50, 101 or 152, which need it; other programs have none."""
    mesh: Mesh = None
    """Plan only this mesh, with axes of any names: data=4,model=4. Default: every mesh."""
    compiled: Annotated[str, option("N")] = "3"
    """How many of the best layouts to compile, 0 for none. Default: 3."""
    json: Json = False
    """Print {"mesh", "table", "store", "classes", "predicted": record, …} instead of tables."""


@dataclass(frozen=True)
class ImportArgs:
    """Read the settings of another framework, show what each option means here, and predict the step."""

    import_: Annotated[Path, option("FILE")]
    """YAML of MaxText or Levanter, TOML of torchtitan, or flags of Megatron-LM, LWM or EasyLM. Needed."""
    model: Annotated[str | None, positional("MODEL")] = None
    """A preset (llama3-8b, …) or a config.json, if the file does not describe the model."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware, as v5p:4x4x4. Needed."""
    framework: Annotated[str | None, option("NAME")] = None
    """Predict the step as this framework runs it, as maxtext or megatron-core. Default: as meshwright does."""
    hardware: Annotated[Path | None, option("FILE")] = None
    """A TOML file with your own chip, whose name --on then accepts."""
    memory_headroom: ShareText = None
    """Fraction added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""
    output: Output = None
    """Write the plan, as YAML or .json, for verify and train."""
    explain: Annotated[bool, option()] = False
    """Also print the terms of step and memory, and the collectives."""
    json: Json = False
    """Print data instead of tables: {"framework", "options", "without_effect", "plan"}."""
