"""Write what plans print as their evidence: published runs, each with its measured and predicted step time.

    .venv/bin/python benchmarks/published_evidence.py

Reads the tables in `tests/data`, writes `src/meshwright/planning/evidence/published.json`. To be run again when
predictions have changed: `tests/planning/test_planning_evidence.py` compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from published_runs import score

ROOT = Path(__file__).parents[1]
TABLES = ("published_runs.json", "published_runs_2.json")
FILE = ROOT / "src" / "meshwright" / "planning" / "evidence" / "published.json"


def main() -> None:
    """Write the file."""
    runs = evidence()
    FILE.write_text(json.dumps(runs, indent=0) + "\n")
    print(f"{FILE}: {len(runs)} runs")


def evidence() -> list[dict[str, Any]]:
    """Every published run of training with a measured step time, as plain data."""
    rows = [row for name in TABLES for row in json.loads((ROOT / "tests" / "data" / name).read_text())["records"]]
    return [
        {
            "name": item.row["id"],
            "source": item.row["source"]["url"],
            "framework": item.framework,
            "chip": setting.system.chip.name,
            "kind": setting.system.chip.kind,
            "model": item.row["model"]["name"],
            "parameters": item.row["model"]["params"],
            "has_experts": setting.workload.model.experts is not None,  # pyright: ignore[reportAttributeAccessIssue]
            "num_devices": setting.mesh.num_devices,
            "mesh": str(setting.mesh),
            "seq_len": setting.workload.seq_len,
            "measured_seconds": float(f"{item.measured:.4g}"),
            "predicted_seconds": float(f"{item.predicted:.4g}"),
        }
        for item in score([row for row in rows if row["kind"] == "train"])[0]
        if item.measured and (setting := item.setting)
    ]


if __name__ == "__main__":
    main()
