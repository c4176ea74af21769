"""The options of `meshwright train` beside those of its plan; `training.settings` has their fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from meshwright.cli.arguments import option
from meshwright.data import Rule
from meshwright.step import OnBadStep, RateSchedule


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

    data: Annotated[
        tuple[str, ...],
        option(
            "PATH…",
            help="Files (text, .jsonl, .parquet, .arrow), folders of them and what `tokenize` writes; all with a"
            " weight, as a.jsonl=0.7, or none. Default: the sources of Python's standard library.",
        ),
    ] = ()
    fields: Annotated[
        tuple[str, ...],
        option(
            "TEMPLATE…",
            help="Of records: parts with commas between, fields joined by +, in [] what has no loss:"
            " [question+prompt],answer; of one source as qa.jsonl=[question],answer. Default: messages, input_ids or"
            " text, as the first record has them.",
        ),
    ] = ()
    rows: Annotated[Literal["windows", "packed", "padded"] | None, option("windows|packed|padded")] = None
    """Windows of one long text, several documents a row, or one and padding. Default: windows of text, else packed."""
    held_out: Annotated[float | None, option("SHARE")] = None
    """The share of documents or windows that is left out of training, for evaluation. Default: 0."""
    bad_data: Annotated[Rule | None, option("error|skip")] = None
    """A record that cannot be used: stop and name it, or leave it out and count it. Default: error."""


@dataclass(frozen=True)
class PreferenceArgs:
    """Pairs of a chosen and a rejected answer, of --objective dpo."""

    beta: Annotated[float | None, option("NUMBER")] = None
    """What holds the policy near the frozen reference; a higher one holds it nearer. Default: 0.1."""
    label_smoothing: Annotated[float | None, option("SHARE")] = None
    """The share of pairs taken to be the wrong way round. Default: 0."""
    preference_loss: Annotated[Literal["dpo", "ipo"] | None, option("dpo|ipo")] = None
    """ipo holds the margin of a pair at 1 / (2 beta), where dpo lets it grow. Default: dpo."""


@dataclass(frozen=True)
class OptimizerArgs:
    """The optimizer; --optimizer, beside how a step is run, says which."""

    learning_rate: Annotated[float | None, option("RATE")] = None
    """The highest, at the end of the warm-up. Default: 0.003; of trained weights 0.00002; of dpo 0.000001."""
    lr_schedule: Annotated[RateSchedule | None, option("NAME")] = None
    """What it does then: cosine or linear, falling to the end; wsd, falling at the end; constant. Default: cosine."""
    warmup_steps: Annotated[int | None, option("N")] = None
    """Steps in which it rises. Default: a tenth of all, at most 2000."""
    first_rate: Annotated[float | None, option("SHARE")] = None
    """What the first step has of it. Default: 1 / the warm-up's steps."""
    decay_steps: Annotated[int | None, option("N")] = None
    """The step at which the schedule ends. Default: --steps."""
    decay_share: Annotated[float | None, option("SHARE")] = None
    """Of wsd, the share of the steps after the warm-up in which it falls. Default: 0.2."""
    final_rate: Annotated[float | None, option("SHARE")] = None
    """What is left of it at the end. Default: 0.1."""
    rate: Annotated[tuple[str, ...], option("PATTERN=FACTOR…")] = ()
    """Another rate for some parameters, as embedding=0.1 or layers.*=0.5; of two for one the later counts."""
    weight_decay: Annotated[float | None, option("SHARE")] = None
    """What a step takes of a weight, times the learning rate. Default: 0.1."""
    no_decay: Annotated[tuple[str, ...], option("PATTERN…")] = ()
    """Parameters without weight decay. Default: norms, biases and tables that tokens are looked up in."""
    b1: Annotated[float | None, option("SHARE")] = None
    """How much of the first moment a step keeps (AdamW, Lion). Default: 0.9."""
    b2: Annotated[float | None, option("SHARE")] = None
    """How much of the second moment a step keeps; of Lion the first. Default: 0.95."""
    eps: Annotated[float | None, option("NUMBER")] = None
    """What AdamW adds to the root of the second moment. Default: 1e-8."""
    momentum: Annotated[float | None, option("SHARE")] = None
    """How much of its moment Muon keeps. Default: 0.95."""
    clip_norm: Annotated[float | None, option("NORM")] = None
    """The most that the norm of all gradients may be; 0 for any. Default: 1."""
    on_bad_step: Annotated[OnBadStep | None, option("stop|skip")] = None
    """What becomes of a step whose loss or gradients are no numbers, or spikes. Default: stop."""
    spike_factor: Annotated[float | None, option("NUMBER")] = None
    """A spike: gradients whose norm is this often the median of the steps before. Default: none is one."""
    max_bad_steps: Annotated[int | None, option("N")] = None
    """With --on-bad-step skip: as many in a row stop the run. Default: 10."""


@dataclass(frozen=True)
class SavingArgs:
    """Checkpoints."""

    save_every: Annotated[int | None, option("N")] = None
    """Steps between checkpoints; 0 writes the last only. Default: 0; a run that goes on has its own."""
    save_minutes: Annotated[float | None, option("MINUTES")] = None
    """Minutes between checkpoints. Default: none by the clock."""
    keep: Annotated[int | None, option("N")] = None
    """How many of the last checkpoints are kept. Default: 2."""
    keep_every: Annotated[int | None, option("N")] = None
    """Of every N steps keep the first checkpoint too, for good. Default: none."""
    grace_seconds: Annotated[float | None, option("SECONDS")] = None
    """How long SIGTERM leaves to end the step and save it; then the command ends without. Default: 30."""


@dataclass(frozen=True)
class WatchArgs:
    """What is seen of a run, beside its screen, metrics.jsonl and the events of TensorBoard."""

    eval_every: Annotated[int | None, option("N")] = None
    """Steps between evaluations on --held-out, --eval-data, --eval-tasks; also after the last. Default: 0, none."""
    eval_batches: Annotated[int | None, option("N")] = None
    """The most batches of an evaluation. Default: all that are held out."""
    eval_data: Annotated[tuple[str, ...], option("PATH…")] = ()
    """Evaluate on these, of the same kinds as --data. Default: what --held-out leaves out of training."""
    eval_tasks: Annotated[tuple[str, ...], option("FILE…")] = ()
    """Answer these multiple-choice questions at each evaluation, files as `eval --task` takes. Default: none."""
    profile: Annotated[str | None, option("FIRST:LAST")] = None
    """Trace these steps, as 10:15, for Perfetto and xprof, and print the collectives that ran. Default: none."""
    wandb: Annotated[str | None, option("PROJECT")] = None
    """Send the metrics to this project of Weights & Biases too (pip install wandb). Default: no."""
