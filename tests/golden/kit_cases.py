"""The rows of the correctness kit as cases: as they are on simulated CPU devices, and wider on TPUs and GPUs.

Only `make_records.py` reads this. The test takes the cases from the file, so that a later change of the rows leaves the
records as they are.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import train

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from kit_rows import REPEATED, ROWS, Row

CHIPS = {
    "cpu": {1: "cpu:1", 2: "cpu:2", 4: "cpu:4", 8: "cpu:8"},
    "v5e": {4: "v5e:2x2", 8: "v5e:2x4"},
    "h100": {1: "h100:1", 2: "h100:2", 4: "h100:4", 8: "h100:8"},
}


def kit_cases() -> dict[str, dict[str, Any]]:
    """A case for each row on each kind of chip that has as many devices."""
    rows = dict(enumerate([*ROWS, *REPEATED]))
    return {
        f"kit {number:03} {row} on {chip}": _case(row, hardware, is_wide=chip != "cpu")
        for chip, sizes in CHIPS.items()
        for number, row in rows.items()
        if (hardware := sizes.get(row.mesh.num_devices))
    }


def _case(row: Row, hardware: str, *, is_wide: bool) -> dict[str, Any]:
    """A row as plain data; wide as `benchmarks/strategy_matrix.py` has it."""
    model = {name: value for name, value in asdict(row.model).items() if name != "name"}
    if not model["experts"]:
        del model["experts"]
    if is_wide:
        model |= {"embed": 1024, "mlp": 4096, "head_dim": 128, "vocab": 32_768}
        if "experts" in model:
            model["experts"] |= {"mlp": 512, "shared_mlp": 1024 * bool(model["experts"]["shared_mlp"])}
    dtypes = {} if is_wide else {"compute_dtype": "f32"}
    default = vars(type(row.strategy)())
    changed = {name: value for name, value in vars(row.strategy).items() if value != default[name]}
    return train(
        "tiny",
        hardware,
        str(row.mesh),
        16,
        1024 if is_wide else 32,
        workload={"remat": row.remat} | dtypes,
        changes=model,
        **changed,
    )
