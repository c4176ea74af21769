"""Parse the words of a command line and of a `--config` file into a command's dataclass."""
