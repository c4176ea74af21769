"""The words of a command line and of a `--config` file, read into a command's dataclass."""

from meshwright.cli.words.options import Option, declared_options
from meshwright.cli.words.read import canonical, read_words, without_options
from meshwright.cli.words.spell import spelled

__all__ = ["Option", "canonical", "declared_options", "read_words", "spelled", "without_options"]
