"""`meshwright serve`: `command` runs one server, `replicas` a front before several, `plan` reads a serving plan."""

from meshwright.cli.serve.args import EXAMPLES, Args
from meshwright.cli.serve.command import run

__all__ = ["EXAMPLES", "Args", "run"]
