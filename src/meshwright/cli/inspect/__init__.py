"""`meshwright inspect`: `command` runs it, `screen` shows what it found."""

from meshwright.cli.inspect.command import EXAMPLES, Args, run

__all__ = ["EXAMPLES", "Args", "run"]
