"""`meshwright generate`: `command` runs it for prompts that are typed or read, `data` for a file of them."""

from meshwright.cli.generate.args import Args
from meshwright.cli.generate.command import EXAMPLES, run

__all__ = ["EXAMPLES", "Args", "run"]
