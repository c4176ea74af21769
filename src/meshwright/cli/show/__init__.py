"""`meshwright show` is `command`, and `meshwright show pipeline` is `pipeline`."""

from meshwright.cli.show.command import EXAMPLES, Args, run

__all__ = ["EXAMPLES", "Args", "run"]
