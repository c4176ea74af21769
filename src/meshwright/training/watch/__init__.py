"""Monitoring of a run: metric rows and curves, goodput, profiles, comparison with the plan."""

from meshwright.training.watch.evaluation import Evaluator, HeldOutPairs
from meshwright.training.watch.goodput import ACCOUNTS, goodput, note_restart, read_restarts
from meshwright.training.watch.log import RunLog, read_compiled
from meshwright.training.watch.profile import Profile, Profiler, find_profile, parse_profile, read_profile
from meshwright.training.watch.shortfall import Shortfall
from meshwright.training.watch.tasks import Tasks
from meshwright.training.watch.weights_and_biases import load_wandb

__all__ = [
    "ACCOUNTS",
    "Evaluator",
    "HeldOutPairs",
    "Profile",
    "Profiler",
    "RunLog",
    "Shortfall",
    "Tasks",
    "find_profile",
    "goodput",
    "load_wandb",
    "note_restart",
    "parse_profile",
    "read_compiled",
    "read_profile",
    "read_restarts",
]
