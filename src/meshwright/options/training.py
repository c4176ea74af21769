"""Options of a run that are not in its plan, each with the field of the run's config that it sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from meshwright.description.step.strategy import OnBadStep, RateSchedule
from meshwright.options.declare import Keyword, Setting, declared_settings, option
from meshwright.options.plan import WorkloadArgs


@dataclass(frozen=True)
class StartArgs:
    """Start of a new run."""

    weights: Annotated[Path | None, option("DIRECTORY"), Setting("weights", resume="never")] = None
    """Start from the weights and tokenizer of this Hugging Face directory. Default: MODEL, if it is one."""
    from_scratch: Annotated[bool, option()] = False
    """Use only config.json and the tokenizer of a directory with weights. Default: start from its weights."""
    seed: Annotated[int | None, option("N"), Setting("seed")] = None
    """Seed of the initial parameters and the order of the data. Default: 0."""


@dataclass(frozen=True)
class DataArgs:
    """The data."""

    data: Annotated[tuple[str, ...], option("PATH…"), Setting("data.sources")] = ()
    """Files (text, .jsonl, .parquet, .arrow), folders, patterns, or token stores of `tokenize`. Give each a weight, as
    a.jsonl=0.7, or none of them. Default: the .py files of Python's standard library.
    """
    fields: Annotated[
        tuple[str, ...],
        option("TEMPLATE…"),
        Setting("data.fields"),
        Keyword("str | Sequence[str] | Mapping[str, str] | None"),
    ] = ()
    """Template of a record's text, as [question+prompt],answer: + joins fields, commas separate parts, and a part in []
    has no loss. FILE=TEMPLATE is for one source. Default: messages, input_ids or text, whichever the first record has.
    """
    rows: Annotated[
        Literal["windows", "packed", "padded"] | None, option("windows|packed|padded"), Setting("data.rows")
    ] = None
    """What a row holds: a window of a long text, several documents (packed), or one with padding (padded). Default:
    windows for text, else packed.
    """
    held_out: Annotated[float | None, option("SHARE"), Setting("data.held_out")] = None
    """Fraction of documents or windows kept for evaluation and not trained on. Default: 0."""
    bad_data: Annotated[Literal["error", "skip"] | None, option("error|skip"), Setting("data.bad_data")] = None
    """For a record that cannot be used: stop and show it, or skip and count it. Default: error."""


@dataclass(frozen=True)
class PreferenceArgs:
    """Pairs of a chosen and a rejected answer, of --objective dpo."""

    beta: Annotated[float | None, option("NUMBER"), Setting("preference.beta")] = None
    """The weight of the KL constraint: a higher beta keeps the policy nearer to the reference. Default: 0.1."""
    label_smoothing: Annotated[float | None, option("SHARE"), Setting("preference.label_smoothing")] = None
    """Conservative DPO: the assumed share of pairs whose labels are swapped. Default: 0."""
    preference_loss: Annotated[Literal["dpo", "ipo"] | None, option("dpo|ipo"), Setting("preference.loss")] = None
    """ipo regresses the margin of a pair to 1 / (2 beta); dpo lets it grow. Default: dpo."""


@dataclass(frozen=True)
class OptimizerArgs:
    """Options of the optimizer; --optimizer chooses it."""

    learning_rate: Annotated[float | None, option("RATE"), Setting("optimizer.learning_rate")] = None
    """The peak learning rate. Default: 0.003; from trained weights 0.00002, LoRA 0.0002, dpo 0.000001."""
    lr_schedule: Annotated[RateSchedule | None, option("NAME"), Setting("optimizer.schedule")] = None
    """The schedule after the warm-up: cosine, linear, wsd (constant, then a decay), constant. Default: cosine."""
    warmup_steps: Annotated[int | None, option("N"), Setting("optimizer.warmup_steps")] = None
    """Steps until the rate reaches its peak. Default: a tenth of all steps, at most 2000."""
    first_rate: Annotated[float | None, option("SHARE"), Setting("optimizer.first_rate")] = None
    """Rate of the first step, as a fraction of the peak. Default: 1 / the warm-up's steps."""
    decay_steps: Annotated[int | None, option("N"), Setting("optimizer.decay_steps")] = None
    """The step at which the schedule ends. Default: --steps."""
    decay_share: Annotated[float | None, option("SHARE"), Setting("optimizer.decay_share")] = None
    """Fraction of the steps after the warm-up in which wsd decays. Default: 0.2."""
    final_rate: Annotated[float | None, option("SHARE"), Setting("optimizer.final_rate")] = None
    """Rate at the end of the schedule, as a fraction of the peak. Default: 0.1."""
    rate: Annotated[tuple[str, ...], option("PATTERN=FACTOR…"), Setting("optimizer.rates")] = ()
    """Multiply the rate of some parameters, as embedding=0.1 or layers.*=0.5. The last match counts."""
    weight_decay: Annotated[float | None, option("SHARE"), Setting("optimizer.weight_decay")] = None
    """Decoupled weight decay, times the learning rate. Default: 0.1."""
    no_decay: Annotated[tuple[str, ...], option("PATTERN…"), Setting("optimizer.no_decay")] = ()
    """Parameters without weight decay. Default: norms, biases and embedding tables."""
    b1: Annotated[float | None, option("SHARE"), Setting("optimizer.b1")] = None
    """The decay of the first moment (AdamW, Lion). Default: 0.9."""
    b2: Annotated[float | None, option("SHARE"), Setting("optimizer.b2")] = None
    """The decay of the second moment (AdamW); Lion's second beta. Default: 0.95."""
    eps: Annotated[float | None, option("NUMBER"), Setting("optimizer.eps")] = None
    """AdamW's epsilon. Default: 1e-8."""
    momentum: Annotated[float | None, option("SHARE"), Setting("optimizer.momentum")] = None
    """Muon's momentum. Default: 0.95."""
    clip_norm: Annotated[float | None, option("NORM"), Setting("optimizer.clip_norm")] = None
    """Clip gradients to this global norm; 0 clips none. Default: 1."""
    on_bad_step: Annotated[OnBadStep | None, option("stop|skip"), Setting("strategy.on_bad_step")] = None
    """Stop at a bad step (NaN, infinity or a spike), or skip its update. Default: stop."""
    spike_factor: Annotated[float | None, option("NUMBER"), Setting("optimizer.spike_factor")] = None
    """A spike is a gradient norm above this multiple of the median of recent steps. Default: no spikes."""
    max_bad_steps: Annotated[int | None, option("N"), Setting("optimizer.max_bad_steps")] = None
    """With --on-bad-step skip: stop after this many bad steps in a row. Default: 10."""


@dataclass(frozen=True)
class SavingArgs:
    """Checkpoints."""

    save_every: Annotated[
        str | None, option("N|TIME"), Keyword("Count | None"), Setting("saving.every", resume="free")
    ] = None
    """Steps or time between checkpoints, as 500, 30m, 1h; 0: only after the last step. Default: 30m; a resumed run
    keeps its own.
    """
    keep: Annotated[int | None, option("N"), Setting("saving.keep", resume="free")] = None
    """Number of recent checkpoints to keep. Default: 2."""
    keep_every: Annotated[int | None, option("N"), Setting("saving.keep_every", resume="free")] = None
    """Also keep the first checkpoint of every N steps, permanently. Default: none."""
    grace_seconds: Annotated[float | None, option("SECONDS"), Setting("saving.grace_seconds", resume="free")] = None
    """Time after SIGTERM to finish the step and save; after it, the command ends without saving. Default: 30."""


@dataclass(frozen=True)
class WatchArgs:
    """Evaluation and profiles, besides the screen, metrics.jsonl and TensorBoard events."""

    eval_every: Annotated[int | None, option("N"), Setting("evaluating.every", resume="free")] = None
    """Steps between evaluations on --held-out, --eval-data, --eval-tasks; also after the last. Default: 0, none."""
    eval_batches: Annotated[int | None, option("N"), Setting("evaluating.batches", resume="free")] = None
    """Maximum number of batches of an evaluation. Default: all held-out batches."""
    eval_data: Annotated[tuple[str, ...], option("PATH…"), Setting("evaluating.data", resume="free")] = ()
    """Evaluate on these files; kinds as for --data. Default: the documents of --held-out."""
    eval_tasks: Annotated[tuple[str, ...], option("FILE…"), Setting("evaluating.tasks", resume="free")] = ()
    """Multiple-choice tasks of each evaluation, files as for `eval --task`. Default: none."""
    profile: Annotated[str | None, option("FIRST:LAST"), Setting("watching.profile", resume="free")] = None
    """Trace these steps, as 10:15, for Perfetto and xprof, and print their collectives. Default: none."""
    wandb: Annotated[str | None, option("PROJECT"), Setting("watching.wandb", resume="free")] = None
    """Also send the metrics to this project of Weights & Biases (pip install wandb). Default: no."""


SETTINGS = declared_settings(WorkloadArgs, StartArgs, DataArgs, PreferenceArgs, OptimizerArgs, SavingArgs, WatchArgs)
"""The settings of a run that are not in its plan, by the names of their options."""
