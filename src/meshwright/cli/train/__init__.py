"""`meshwright train`: `command` runs it, with the options of `args` and `options` and the bar of `screen`."""

from meshwright.cli.train.args import Args
from meshwright.cli.train.command import EXAMPLES, run

__all__ = ["EXAMPLES", "Args", "run"]
