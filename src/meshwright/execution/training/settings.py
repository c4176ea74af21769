"""Options of a run that are not in its plan, by the `RunConfig` field they set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.description.step.strategy import OnBadStep, RateSchedule
from meshwright.execution.data.bad_data import Rule
from meshwright.execution.training.data.config import RowKind
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.run_directory.saving import read_save_every
from meshwright.execution.training.watching import EvaluationConfig
from meshwright.planning.options import Count, PlanOptions


class Setting(NamedTuple):
    """A field of `RunConfig`, and whether a resumed run can change it.

    path: of the field, as `optimizer.learning_rate`. resume: `free`, always; `change`, with `change=True` (--change);
    `never`, because the first state or the checkpoints depend on it.
    """

    path: str
    resume: Literal["free", "change", "never"] = "change"


SETTINGS: Mapping[str, Setting] = {
    "data": Setting("data.sources"),
    "fields": Setting("data.fields"),
    "rows": Setting("data.rows"),
    "held_out": Setting("data.held_out"),
    "bad_data": Setting("data.bad_data"),
    "grace_seconds": Setting("saving.grace_seconds", resume="free"),
    "learning_rate": Setting("optimizer.learning_rate"),
    "lr_schedule": Setting("optimizer.schedule"),
    "warmup_steps": Setting("optimizer.warmup_steps"),
    "first_rate": Setting("optimizer.first_rate"),
    "decay_steps": Setting("optimizer.decay_steps"),
    "decay_share": Setting("optimizer.decay_share"),
    "final_rate": Setting("optimizer.final_rate"),
    "weight_decay": Setting("optimizer.weight_decay"),
    "no_decay": Setting("optimizer.no_decay"),
    "b1": Setting("optimizer.b1"),
    "b2": Setting("optimizer.b2"),
    "eps": Setting("optimizer.eps"),
    "momentum": Setting("optimizer.momentum"),
    "clip_norm": Setting("optimizer.clip_norm"),
    "rate": Setting("optimizer.rates"),
    "beta": Setting("preference.beta"),
    "label_smoothing": Setting("preference.label_smoothing"),
    "preference_loss": Setting("preference.loss"),
    "on_bad_step": Setting("strategy.on_bad_step"),
    "spike_factor": Setting("optimizer.spike_factor"),
    "max_bad_steps": Setting("optimizer.max_bad_steps"),
    "keep": Setting("saving.keep", resume="free"),
    "keep_every": Setting("saving.keep_every", resume="free"),
    "save_every": Setting("saving.every", resume="free"),
    "seed": Setting("seed"),
    "eval_every": Setting("evaluating.every", resume="free"),
    "eval_batches": Setting("evaluating.batches", resume="free"),
    "eval_data": Setting("evaluating.data", resume="free"),
    "eval_tasks": Setting("evaluating.tasks", resume="free"),
    "profile": Setting("watching.profile", resume="free"),
    "wandb": Setting("watching.wandb", resume="free"),
    "adapter": Setting("adapter", resume="never"),
    "weights": Setting("weights", resume="never"),
}
"""The settings by the names of their options, in the library and at the command (`--learning-rate`)."""


class TrainOptions(PlanOptions, total=False):
    """What a run is, beside its plan; each name is one of `SETTINGS`.

    data: files, folders or stores of tokens, each with a weight as `wiki.jsonl=0.7` or none with one; by default the
    sources of Python's standard library. fields: the template of all records, or that of each source by its path;
    rows, held_out, bad_data: those of `DataConfig`.
    learning_rate: at the end of the warm-up (0.003; of trained weights 0.00002; of dpo 0.000001). lr_schedule to
    max_bad_steps: the fields of `Optimizer`; rate has its `rates`. beta, label_smoothing, preference_loss: those of
    `Preference`, for objective `dpo`, whose data are records with prompt, chosen and rejected. on_bad_step: `skip`
    leaves bad steps out, `stop` ends the run. save_every: between checkpoints, steps or a time as `30m` (30m); 0 writes
    the last only. keep: how many of the last are kept (2); keep_every: of every so many steps the first is kept too.
    grace_seconds: how long a run may take to save and end after a SIGTERM (30). seed: decides the first parameters and
    the order of the data (0). weights: the Hugging Face directory whose weights and tokenizer a new run begins with,
    where it is not the model's own. wandb: the project of Weights & Biases that metrics go to as well (none). profile:
    the first and the last step of a trace, as `10:15` (none).
    eval_every: steps between evaluations (0 for none); eval_batches: the most batches of each (all); eval_data: what
    they are on (the held-out share); eval_tasks: files of multiple-choice questions that are answered too (none).
    """

    data: str | Sequence[str] | None
    fields: str | Sequence[str] | Mapping[str, str] | None
    rows: RowKind | None
    held_out: float | None
    bad_data: Rule | None
    grace_seconds: float | None
    learning_rate: float | None
    lr_schedule: RateSchedule | None
    warmup_steps: int | None
    first_rate: float | None
    decay_steps: int | None
    decay_share: float | None
    final_rate: float | None
    weight_decay: float | None
    no_decay: str | Sequence[str] | None
    b1: float | None
    b2: float | None
    eps: float | None
    momentum: float | None
    clip_norm: float | None
    rate: str | Sequence[str] | None
    beta: float | None
    label_smoothing: float | None
    preference_loss: Literal["dpo", "ipo"] | None
    on_bad_step: OnBadStep | None
    spike_factor: float | None
    max_bad_steps: int | None
    keep: int | None
    keep_every: int | None
    save_every: Count | None
    seed: int | None
    eval_every: int | None
    eval_batches: int | None
    eval_data: str | Sequence[str] | None
    eval_tasks: str | Sequence[str] | None
    wandb: str | None
    profile: str | None
    weights: str | Path | None


def get_setting(config: RunConfig, name: str) -> Any:
    """Return the value of a setting in a config."""
    return reduce(getattr, SETTINGS[name].path.split("."), config)


def with_settings(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a config with some settings replaced.

    Raises:
        MeshwrightError: a value that is not valid for its field.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name == "fields":
            value = _templates(value)
        elif name in _LISTS:
            value = as_texts(value)
        part, _, field = SETTINGS[name].path.rpartition(".")
        of = parts.setdefault(part, {})
        if name == "save_every":
            of |= read_save_every(value)
        else:
            of[field] = value
    if parts.get("evaluating", {}).get("every") == 0:
        # A run that was evaluated is so no longer: what it was evaluated on goes with it.
        config = replace(config, evaluating=EvaluationConfig())
    own = parts.pop("", {})
    # The fields of a part all at once: some may only stand beside others.
    config = replace(config, **own, **{part: replace(getattr(config, part), **of) for part, of in parts.items()})
    if config.data.rows is not None:  # The plan must know it too.
        config = replace(config, workload=replace(config.workload, packed=config.data.rows != "windows"))
    return config


_LISTS = ("data", "no_decay", "rate", "eval_data", "eval_tasks")
"""Settings of several texts: a list, a tuple, or one text."""


def as_texts(value: Any) -> Any:
    """Return one or several texts as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _templates(value: Any) -> Any:
    """Return templates for `DataConfig`: one for all sources, or one per source."""
    if isinstance(value, Mapping):
        return tuple(f"{path}={template}" for path, template in value.items())
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
