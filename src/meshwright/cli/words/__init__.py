"""The words of a command line and of a `--config` file, read into a command's dataclass."""
