"""The memory of a compiled program, under the names of `Record.memory_bytes`."""

from __future__ import annotations

from typing import Any

import jax


def program_memory(compiled: jax.stages.Compiled, *, on_tpu: bool) -> dict[str, int]:
    """Return a program's bytes per device, by name.

    Names are `arguments`, `outputs`, `temporaries`, `alias` (bytes of outputs that share memory with donated
    arguments), `code`, and `peak` (the maximum, at any time, of all arguments, outputs and temporaries together).
    """
    stats: Any = compiled.memory_analysis()
    names = {"arguments": "argument", "outputs": "output", "temporaries": "temp", "alias": "alias"}
    terms = {ours: int(getattr(stats, f"{theirs}_size_in_bytes")) for ours, theirs in names.items()}
    held = terms["arguments"] + terms["outputs"] - terms["alias"]
    peak = int(stats.peak_memory_in_bytes)
    if on_tpu:
        # libtpu's figure for temporaries is not its allocation: it accepts steps whose sum exceeds the memory (3.86 +
        # 13.94 of 15.75 GiB on v5e, with a peak of 15.11), and rejects steps by their peak.
        terms["temporaries"] = max(0, peak - held)
    else:
        peak = max(peak, held + terms["temporaries"])
    return terms | {"code": int(stats.generated_code_size_in_bytes), "peak": peak}
