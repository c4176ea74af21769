"""The options of `meshwright train` beside those of its plan; `training.settings` has their fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.cli.arguments import option


@dataclass(frozen=True)
class StartArgs:
    """What a new run begins with."""

    weights: Annotated[Path | None, option("DIRECTORY")] = None
    """Begin with the weights and the tokenizer of this Hugging Face directory. Default: MODEL, where it is one."""
    from_scratch: Annotated[bool, option()] = False
    """Of a directory with weights take the config.json and the tokenizer. Default: its weights begin the run."""
    seed: Annotated[int | None, option("N")] = None
    """Decides the first parameters and the order of the data. Default: 0."""


@dataclass(frozen=True)
class DataArgs:
    """The data."""

    data: Annotated[tuple[str, ...], option("PATH…")] = ()
    """Text files, or folders of .txt, .md and .py. Default: the sources of Python's standard library."""


@dataclass(frozen=True)
class OptimizerArgs:
    """The optimizer; --optimizer, beside how a step is run, says which."""

    learning_rate: Annotated[float | None, option("RATE")] = None
    """At the end of the warm-up; it then falls to a tenth. Default: 0.003; of trained weights 0.00002."""


@dataclass(frozen=True)
class SavingArgs:
    """Checkpoints."""

    save_every: Annotated[int | None, option("N")] = None
    """Steps between checkpoints; 0 keeps the last only. Default: 0; a run that goes on has its own."""
    grace_seconds: Annotated[float | None, option("SECONDS")] = None
    """How long SIGTERM leaves to end the step and save it; then the command ends without. Default: 30."""
