"""Dumps of the partitioner's passes; used in the process that compiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_PASSES = "shardy-xla|spmd-partitioning"

# The names of these passes are the same for CPU, TPU and GPU but for a prefix; those of other passes differ.
_TEXTS = {
    "annotated": re.compile(r"\.before_[\w-]*shardy-xla\."),
    "propagated": re.compile(r"\.before_[\w-]*spmd-partitioning\."),
    "partitioned": re.compile(r"\.after_[\w-]*spmd-partitioning\."),
}


def dump_options(directory: str) -> dict[str, Any]:
    """Options for `lowered.compile` that dump the module before and after the partitioner's passes."""
    return {"xla_dump_to": directory, "xla_dump_hlo_pass_re": _PASSES}


def read_dumps(directory: str) -> dict[str, str]:
    """The module texts of `CompiledProgram`, all '' where the program was not partitioned, as for one device."""
    files = sorted(Path(directory).glob("*.txt"))
    found = {name: [file for file in files if part.search(file.name)] for name, part in _TEXTS.items()}
    was_partitioned = all(found.values())
    return {name: made[0].read_text(errors="replace") if was_partitioned else "" for name, made in found.items()}


def read_optimized_dump(directory: str) -> str:
    """The optimized module that a compiler dumped before it failed; '' if it failed earlier."""
    files = sorted(Path(directory).glob("*.after_optimizations.txt"))
    return files[-1].read_text(errors="replace") if files else ""
