"""Training: the step, its data and state, and the loop that takes steps and records measurements."""

from meshwright.training.checks import PlanDoesNotFitError, check_start
from meshwright.training.data import read_texts
from meshwright.training.library import allowed_differences, new_run, run_to_resume, train
from meshwright.training.loop import Outcome, run_steps
from meshwright.training.pretrained import MODEL_FILES, pretrained_directory, run_tokenizer
from meshwright.training.run_directory.checkpoint import Checkpoints, Note
from meshwright.training.run_directory.restart import is_first_process, what_is_left
from meshwright.training.run_directory.resume import restore_adapters, restore_params, resumed_run
from meshwright.training.run_directory.run import RunConfig, RunStoppedError, holds_run, read_config, read_metrics
from meshwright.training.run_record import measured
from meshwright.training.step import (
    abstract_batch,
    abstract_params,
    abstract_state,
    initial_state,
    lower_train_step,
    train_step,
)
from meshwright.training.update.optimizer import Optimizer

__all__ = [
    "MODEL_FILES",
    "Checkpoints",
    "Note",
    "Optimizer",
    "Outcome",
    "PlanDoesNotFitError",
    "RunConfig",
    "RunStoppedError",
    "abstract_batch",
    "abstract_params",
    "abstract_state",
    "allowed_differences",
    "check_start",
    "holds_run",
    "initial_state",
    "is_first_process",
    "lower_train_step",
    "measured",
    "new_run",
    "pretrained_directory",
    "read_config",
    "read_metrics",
    "read_texts",
    "restore_adapters",
    "restore_params",
    "resumed_run",
    "run_steps",
    "run_to_resume",
    "run_tokenizer",
    "train",
    "train_step",
    "what_is_left",
]
