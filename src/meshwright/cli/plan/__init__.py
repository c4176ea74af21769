"""`meshwright plan`: `command` runs it for training; `serving` and `images` are the other kinds of plans."""

from meshwright.cli.plan.args import HINTS, KINDS, Args, args_of
from meshwright.cli.plan.command import EXAMPLES, run

__all__ = ["EXAMPLES", "HINTS", "KINDS", "Args", "args_of", "run"]
