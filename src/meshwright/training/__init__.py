"""Training: the step, its data and state, and the loop that takes steps and keeps what it measured."""

from meshwright.training.checkpoint import Checkpoints
from meshwright.training.data import load_corpus
from meshwright.training.loop import Row, is_first_process, measured, train
from meshwright.training.optimizer import Optimizer
from meshwright.training.run import RunConfig, read_config, read_metrics
from meshwright.training.step import abstract_state, initial_state, lower_train_step, train_step

__all__ = [
    "Checkpoints",
    "Optimizer",
    "Row",
    "RunConfig",
    "abstract_state",
    "initial_state",
    "is_first_process",
    "load_corpus",
    "lower_train_step",
    "measured",
    "read_config",
    "read_metrics",
    "train",
    "train_step",
]
