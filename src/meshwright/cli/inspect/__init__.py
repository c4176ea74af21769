"""`meshwright inspect`: `command` runs it, `screen` prints the result."""

from meshwright.cli.inspect.command import EXAMPLES, Args, run

__all__ = ["EXAMPLES", "Args", "run"]
