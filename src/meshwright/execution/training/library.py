"""`meshwright.train`: start a training run, or resume one from its last checkpoint."""

from __future__ import annotations

import os
import shlex
import signal
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Unpack

from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.training.checks import check_start
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.data.pairs import load_pairs
from meshwright.execution.training.data.run_data import check_templates, default_rows, open_data
from meshwright.execution.training.loop import Outcome, run_steps
from meshwright.execution.training.preference.loss import check_preference_options
from meshwright.execution.training.pretrained import check_same_model, find_pretrained
from meshwright.execution.training.run_directory.checkpoint import Checkpoints
from meshwright.execution.training.run_directory.compatible import read_allowed
from meshwright.execution.training.run_directory.restart import what_is_left
from meshwright.execution.training.run_directory.resume import resumed_run
from meshwright.execution.training.run_directory.run import Row, RunConfig, RunStoppedError, find_config_copy, holds_run
from meshwright.execution.training.settings import with_settings
from meshwright.execution.training.update.optimizer import Optimizer, check_optimizer_options, default_warmup
from meshwright.options.given import given
from meshwright.options.keywords import TrainOptions
from meshwright.options.training import SETTINGS
from meshwright.options.values import Count, read_count
from meshwright.planning.library import PlanLike, plan_to_run
from meshwright.planning.plan import Plan
from meshwright.record import Record
from meshwright.support.extras import require_extra
from meshwright.support.files import check_new_directory

STEPS, LEARNING_RATE = 200, 3e-3
"""Default number of steps of a run, and default learning rate if it starts from random parameters."""

FINE_TUNING_RATE = 2e-5
"""Default learning rate when starting from trained weights: Llama 2's for fine-tuning (arXiv:2307.09288, 3.1)."""

PREFERENCE_RATE = 1e-6
"""Default learning rate of a run on preference pairs (arXiv:2305.18290, appendix B)."""

LORA_RATE = 2e-4
"""Default learning rate of adapters, as in QLoRA for models of up to 13B parameters (arXiv:2305.14314, table 9)."""


def train(
    what: PlanLike | RunConfig,
    directory: str | Path | None = None,
    *,
    steps: Count | None = None,
    resume: bool = False,
    change: bool = False,
    allow: str | Collection[str] | None = None,
    anyway: bool = False,
    from_scratch: bool = False,
    on_step: Callable[[Row], None] = lambda row: None,
    **options: Unpack[TrainOptions],
) -> Record:
    """Train a model on a mesh, and return the measured record.

    Args:
        what: a model as a name, a ModelConfig or a Hugging Face directory, with at least `on` and `batch` among the
            options; a plan or its file; a RunConfig; or, with resume, the directory of a run. If a Hugging Face
            directory has weights, training starts from them.
        directory: directory for the run's config, metrics and checkpoints; `runs/MODEL` by default. A RunConfig needs
            it.
        steps: total number of steps of the run, including those before a resume. Default: 200; on resume, the run's
            own.
        resume: resume the run in the directory `what` from its last complete checkpoint. If `directory` is given too,
            resume the run in `directory`, which must have the same model and settings, or start it if there is none.
        change: with resume, replace the run's settings by the options given here.
        allow: with resume, kinds of differences from the checkpoint to accept: data, dtype, optimizer, tokenizer.
            Moments of a different optimizer start anew.
        anyway: train even if the plan does not fit the memory, or the vocabulary has tokens that never occur in bytes.
        from_scratch: initialise new parameters although the directory has trained weights, and use only its config.json
            and tokenizer.
        on_step: called with the metrics of every step.
        options: the settings of the run (`TrainOptions`), and the workload, mesh and strategy options of
            `meshwright.plan`.

    Raises:
        MeshwrightError: the run cannot be started, or its devices are not present.
        RunStoppedError: the run had started and could not continue, or a signal (SIGINT, SIGTERM, SIGHUP) stopped it
            after its current step and a checkpoint. Signals that the program handles itself are left to it.
    """
    require_extra("train", "train")
    said: dict[str, Any] = dict(options) | {"from_scratch": from_scratch or None}
    if isinstance(what, RunConfig):
        said = given({**said, "steps": steps}, ("from_scratch", "steps", *TrainOptions.__annotations__))
        if said or resume or directory is None:
            wrong = (
                f"a RunConfig sets {next(iter(said))} itself; leave it out" if said else "a RunConfig needs a directory"
            )
            raise MeshwrightError(wrong)
        return _record(run_steps(what, Path(directory), on_step=on_step), what, Path(directory))
    said = given(said, (*TrainOptions.__annotations__, "from_scratch"))
    allowed = allowed_differences(allow, said, change=change)
    if (home := run_to_resume(what, directory) if resume else None) is not None:
        begun_with = what if directory is not None else None
        config, lines = resumed_run(home, steps=steps, change=change, options=said, what=begun_with, allow=allowed)
        for line in lines:
            warnings.warn(line, stacklevel=2)
        directory = home
    else:
        if change:
            raise MeshwrightError("change is for a run that continues (resume=True), and this one begins; leave it out")
        settings = {name: said.pop(name) for name in [*said] if name in SETTINGS or name == "from_scratch"}
        plan = plan_to_run(what, said | {"adapter": settings.get("adapter")})
        directory = directory or Path("runs") / plan.workload.model.name
        config = new_run(what, plan, Path(directory), steps=steps, settings=settings)
    check_start(config, anyway=anyway)
    claim_devices(config.system)
    return _record(run_steps(config, Path(directory), on_step=on_step, allow=allowed), config, Path(directory))


def _record(outcome: Outcome, config: RunConfig, directory: Path) -> Record:
    """Return the measurements of a run; raise a `RunStoppedError` if a signal ended it early."""
    if outcome.stopped_by is not None and outcome.taken < config.steps:
        line = f"stopped by {signal.Signals(outcome.stopped_by).name} after {outcome.taken} of {config.steps} steps"
        raise RunStoppedError(f"{line}; {what_is_left(config, directory)}", outcome.stopped_by)
    return outcome.record


def allowed_differences(
    allow: str | Collection[str] | None, options: Mapping[str, Any], *, change: bool
) -> frozenset[str]:
    """Return the kinds of checkpoint differences to accept: `allow`, and `data` if an option replaces the run's data.

    Args:
        allow: kinds of differences, as in `train`.
        options: options by name; None for an option that was not given.
        change: whether the options replace settings of the run.
    """
    names = [name for name, value in options.items() if value is not None and name in SETTINGS]
    has_data = change and any(SETTINGS[name].path.startswith("data.") for name in names)
    return read_allowed(allow) | ({"data"} if has_data else set())


def run_to_resume(what: Any, directory: str | Path | None) -> Path | None:
    """Return the directory of the run to resume; None if a new run starts.

    With a `directory` (-o), its run is resumed, or a new run starts if it has none, so that one command does both.
    Otherwise `what` is the directory of the run.

    Raises:
        MeshwrightError: `what` is not a path, or it is the directory of a run and `directory` is given too.
    """
    if directory is None:
        if not isinstance(what, (str, Path)):
            raise MeshwrightError(f"resume continues with the run in a directory, not with {what!r}")
        return Path(what)
    if isinstance(what, (str, Path)) and holds_run(Path(what)):
        raise MeshwrightError(f"a run that continues stays in its directory; leave {directory} out")
    return Path(directory) if (Path(directory) / "config.json").exists() else None


def new_run(what: Any, plan: Plan, directory: Path, *, steps: Count | None, settings: Mapping[str, Any]) -> RunConfig:
    """Return the config of a new run for a plan.

    Args:
        what: the model, as in `train`; if it is a directory, pretrained weights and a tokenizer are searched there.
        directory: the directory of the run, which must not have one yet.
        steps: number of steps; None for the default.
        settings: options of `SETTINGS`, and from_scratch, as in `train`, by name.

    Raises:
        MeshwrightError: a setting is not valid, or the directory already has a run.
    """
    said = given(settings, ("from_scratch", *SETTINGS))
    source = find_pretrained(what, said.pop("weights", None), from_scratch=said.pop("from_scratch", False))
    if source.weights is not None:
        check_same_model(plan.workload.model, source.weights)
    count = STEPS if steps is None else read_count("steps", steps)
    rate = LEARNING_RATE if source.weights is None else FINE_TUNING_RATE
    if plan.workload.config.lora:
        rate = LORA_RATE
    if plan.workload.objective == "dpo":
        rate = PREFERENCE_RATE
    config = RunConfig(
        workload=plan.workload,
        mesh=plan.mesh,
        hardware=plan.hardware,
        hardware_file=plan.hardware_file,
        memory_headroom=plan.memory_headroom,
        optimizer=Optimizer(learning_rate=rate, warmup_steps=default_warmup(count), decay_steps=count),
        steps=count,
        data=DataConfig(folder=os.getcwd()),
        source=_source(what),
        strategy=plan.strategy,
        weights=source.weights and str(source.weights),
        tokenizer=source.tokenizer and str(source.tokenizer),
    )
    if "adapter" in said:
        said["adapter"] = str(Path(said["adapter"]).absolute())
    check_preference_options(said, config.workload)
    config = with_settings(config, said)
    if config.workload.objective != "dpo":
        check_templates(config.data, config.evaluating.data)
        rows = "packed" if config.workload.packed and config.data.rows is None else default_rows(config.data)
        config = with_settings(config, {"rows": rows})
    check_optimizer_options(config.optimizer, said, config.strategy, config.workload.model)
    if (directory / "config.json").exists():
        if not Checkpoints(directory).steps:
            raise MeshwrightError(f"{directory} holds a run that wrote no checkpoint; delete it, or -o starts another")
        raise MeshwrightError(
            f"{directory} holds a run; `meshwright train {shlex.quote(str(directory))} --resume` continues with it,"
            f" -o starts another"
        )
    if found := [name for name in ("checkpoints", "metrics.jsonl") if (directory / name).exists()]:
        copy = find_config_copy(directory)
        raise MeshwrightError(
            f"{directory} holds {found[0]} of a run without its config.json;"
            f" {f'{copy}; ' if copy else ''}-o starts a run elsewhere"
        )
    check_new_directory(directory)
    if config.workload.objective == "dpo" and not config.data.sources:
        load_pairs((), None, config.workload)
    # Check the data now, unless they must be tokenized, which takes time.
    if config.tokenizer is None and config.workload.objective != "dpo":
        open_data(config.data, config.workload, None, seed=config.seed)
    return config


def _source(what: Any) -> str | None:
    """Return the name of a preset, or the absolute path of a model; None if the model is an object."""
    if not isinstance(what, (str, Path)):
        return None
    return str(Path(what).resolve()) if Path(what).exists() else str(what)
