"""`meshwright generate`: `command` for typed prompts, `data` for a file of them."""

from meshwright.cli.generate.args import Args
from meshwright.cli.generate.command import EXAMPLES, run

__all__ = ["EXAMPLES", "Args", "run"]
