"""The arguments of `meshwright train`: the run, its processes, and the groups of options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from meshwright.options.declare import CompileCache, Json, Mesh, given_options, option, positional
from meshwright.options.plan import StrategyArgs, WorkloadArgs
from meshwright.options.processes import ProcessArgs
from meshwright.options.training import DataArgs, OptimizerArgs, PreferenceArgs, SavingArgs, StartArgs, WatchArgs


@dataclass(frozen=True)
class RunArgs:
    """The run."""

    mesh: Mesh = None
    """fsdp=-1,tp=4, or dp,fsdp,tp,sp as 1,-1,4,1. One degree may be -1. Default: the planner chooses."""
    steps: Annotated[str | None, option("N")] = None
    """Total number of steps, also with --resume. Default: 200; a resumed run keeps its own."""
    output: Annotated[Path | None, option("DIRECTORY", "-o")] = None
    """The run directory. Default: runs/MODEL."""
    resume: Annotated[bool, option()] = False
    """Continue from the last complete checkpoint of the run MODEL; with -o, of the run there, or start one."""
    change: Annotated[bool, option()] = False
    """With --resume: replace settings of the run by those given here."""
    allow: Annotated[str | None, option("KINDS")] = None
    """With --resume: accept a checkpoint with other data, dtype, optimizer or tokenizer, as data,dtype."""
    anyway: Annotated[bool, option()] = False
    """Train even if the plan does not fit, or text is bytes and the vocabulary is larger than 256."""
    config: Annotated[Path | None, option("FILE")] = None
    """A YAML file of options, also `model`, or a plan's file. Typed options override it."""
    dry_run: Annotated[bool, option()] = False
    """Compile the step, print its memory and the run's time, and stop. Nothing is written."""
    compile_cache: CompileCache = None
    """Directory in which compiled programs are cached, at most 4 GiB, or off. Default: the user's cache."""
    json: Json = False
    """Print the measured record, with the first and last loss, instead of the bar."""


@dataclass(frozen=True)
class Args:
    """Train a model on a mesh: a progress bar, and a run directory with config, metrics and checkpoints."""

    model: Annotated[str, positional("MODEL")]
    """A preset (tiny, llama3-8b, …), a Hugging Face directory or config.json, a plan.yaml, or with --resume a run."""
    workload: WorkloadArgs = field(default_factory=WorkloadArgs)
    run: RunArgs = field(default_factory=RunArgs)
    start: StartArgs = field(default_factory=StartArgs)
    data: DataArgs = field(default_factory=DataArgs)
    preference: PreferenceArgs = field(default_factory=PreferenceArgs)
    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs)
    saving: SavingArgs = field(default_factory=SavingArgs)
    watching: WatchArgs = field(default_factory=WatchArgs)
    strategy: StrategyArgs = field(default_factory=StrategyArgs)
    process: ProcessArgs = field(default_factory=ProcessArgs)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the run's plan."""
        return given_options(self.workload, self.strategy) | {"mesh": self.run.mesh}

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the run that are not in its plan."""
        own = given_options(self.start, self.data, self.preference, self.optimizer, self.saving, self.watching)
        return own | {"adapter": self.workload.adapter}
