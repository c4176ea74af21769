"""`meshwright verify`: `command` runs it for a train step; `serving` for a server's."""

from meshwright.cli.verify.command import EXAMPLES, HINTS, KINDS, Args, args_of, run

__all__ = ["EXAMPLES", "HINTS", "KINDS", "Args", "args_of", "run"]
