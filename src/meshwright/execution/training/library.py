"""`meshwright.train`: a run from text or objects, from its first step or on from its last checkpoint."""

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
from meshwright.extras import require_extra
from meshwright.options.keywords import TrainOptions
from meshwright.options.training import SETTINGS
from meshwright.options.values import Count, given, read_count
from meshwright.planning.library import PlanLike, plan_to_run
from meshwright.planning.plan import Plan
from meshwright.record import Record
from meshwright.support.files import check_new_directory

STEPS, LEARNING_RATE = 200, 3e-3
"""Default settings of a run."""

FINE_TUNING_RATE = 2e-5
"""The learning rate of a run that begins with trained weights: Llama 2's for fine-tuning (arXiv:2307.09288, 3.1)."""

PREFERENCE_RATE = 1e-6
"""The learning rate of a run on preferences (arXiv:2305.18290, appendix B)."""

LORA_RATE = 2e-4
"""The learning rate of adapters: QLoRA's up to 13B parameters (arXiv:2305.14314, table 9)."""


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
    """Train a model on a mesh, and return what was measured.

    Args:
        what: a model's name or a ModelConfig, with at least `on` and `batch` among the options; a plan or its file; a
            RunConfig; with resume, the directory of a run. A Hugging Face directory with weights begins with these.
        directory: of the run, for its config, metrics and checkpoints; `runs/MODEL` by default.
        steps: the end of the whole run, steps before a resume included (200; a run that goes on has its own).
        resume: go on with the run in the directory `what`, from its last whole checkpoint; with `directory` too, go on
            with the run there, of the same model and settings, or begin it.
        change: with resume, go on with the settings given here where they are others than the run's.
        allow: with resume, go on though these of the checkpoint are others: data, dtype, optimizer, tokenizer. Moments
            of another optimizer begin afresh.
        anyway: train though the plan does not fit the memory, or the vocabulary has tokens that no text has.
        from_scratch: of a directory with trained weights take only the config.json and the tokenizer.
        on_step: called with the metrics of every step.
        options: the settings of the run (`TrainOptions`), and the workload, the mesh and how a step is run, as
            `meshwright.plan` takes them.

    Raises:
        MeshwrightError: where the run cannot be made, or its devices are not there.
        RunStoppedError: where the run had begun and could not go on, or a signal (SIGINT, SIGTERM, SIGHUP) stopped it
            after the step and the checkpoint that it was at. Signals that the program has handlers for are left to it.
    """
    require_extra("train", "train")
    said: dict[str, Any] = dict(options) | {"from_scratch": from_scratch or None}
    if isinstance(what, RunConfig):
        said = given({**said, "steps": steps}, ("from_scratch", "steps", *TrainOptions.__annotations__))
        if said or resume or directory is None:
            wrong = (
                f"a RunConfig says {next(iter(said))} itself; leave it out" if said else "a RunConfig needs a directory"
            )
            raise MeshwrightError(wrong)
        return _record(run_steps(what, Path(directory), on_step=on_step), what, Path(directory))
    allowed = allowed_differences(allow, said, change=change)
    if (home := run_to_resume(what, directory) if resume else None) is not None:
        begun_with = what if directory is not None else None
        config, lines = resumed_run(home, steps=steps, change=change, options=said, what=begun_with, allow=allowed)
        for line in lines:
            warnings.warn(line, stacklevel=2)
        directory = home
    else:
        if change:
            raise MeshwrightError("change is for a run that goes on (resume=True), and this one begins; leave it out")
        settings = {name: said.pop(name) for name in [*said] if name in SETTINGS or name == "from_scratch"}
        plan = plan_to_run(what, said | {"adapter": settings.get("adapter")})
        directory = directory or Path("runs") / plan.workload.model.name
        config = new_run(what, plan, Path(directory), steps=steps, settings=settings)
    check_start(config, anyway=anyway)
    claim_devices(config.system)
    return _record(run_steps(config, Path(directory), on_step=on_step, allow=allowed), config, Path(directory))


def _record(outcome: Outcome, config: RunConfig, directory: Path) -> Record:
    """Return the measurements; raise if a signal ended the run, so that no caller takes it for finished."""
    if outcome.stopped_by is not None and outcome.taken < config.steps:
        line = f"stopped by {signal.Signals(outcome.stopped_by).name} after {outcome.taken} of {config.steps} steps"
        raise RunStoppedError(f"{line}; {what_is_left(config, directory)}")
    return outcome.record


def allowed_differences(
    allow: str | Collection[str] | None, said: Mapping[str, Any], *, change: bool
) -> frozenset[str]:
    """Return the allowed kinds of checkpoint differences; a requested change of the data is one."""
    names = [name for name, value in said.items() if value is not None and name in SETTINGS]
    has_data = change and any(SETTINGS[name].path.startswith("data.") for name in names)
    return read_allowed(allow) | ({"data"} if has_data else set())


def run_to_resume(what: Any, directory: str | Path | None) -> Path | None:
    """Return the directory of the run to resume; None if a new one begins.

    With a directory of its own (-o) a run begins if that has none, so one command both starts and resumes a run;
    without, `what` is the directory of a run.
    """
    if directory is None:
        if not isinstance(what, (str, Path)):
            raise MeshwrightError(f"resume goes on with the run in a directory, not with {what!r}")
        return Path(what)
    if isinstance(what, (str, Path)) and holds_run(Path(what)):
        raise MeshwrightError(f"a run that goes on stays in its directory; leave {directory} out")
    return Path(directory) if (Path(directory) / "config.json").exists() else None


def new_run(what: Any, plan: Plan, directory: Path, *, steps: Count | None, settings: Mapping[str, Any]) -> RunConfig:
    """Return the config of a new run for the plan of `what`. Raises an error if the directory has a run.

    settings: those of `SETTINGS` and from_scratch, as in `train`.
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
            f"{directory} holds a run; `meshwright train {shlex.quote(str(directory))} --resume` goes on with it,"
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
    # Else it is done once, by the run: a tokenizer takes its time.
    if config.tokenizer is None and config.workload.objective != "dpo":
        open_data(config.data, config.workload, None, seed=config.seed)
    return config


def _source(what: Any) -> str | None:
    """Return a name of the model that is valid in any folder: a preset, or an absolute path."""
    if not isinstance(what, (str, Path)):
        return None
    return str(Path(what).resolve()) if Path(what).exists() else str(what)
