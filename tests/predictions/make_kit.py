"""Compile every row of the correctness kit for simulated CPU devices and write what the programs do to kit.json.gz.

    nice -n 10 python tests/predictions/make_kit.py [--hlo DIRECTORY]

Takes about ten minutes of one core. `test_stored_programs.py` compares the predictions for the same rows to this file,
so that a change of the planner is held against all compiled programs in seconds and without a compiler.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
from importlib.metadata import version
from pathlib import Path

# The same compiler options as tests/conftest.py.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
    )
)

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "execution" / "runtime"))

from compute import compile_kit_row  # noqa: E402
from kit_rows import REPEATED, ROWS  # noqa: E402
from records import KIT, write  # noqa: E402


def main() -> None:
    """Compile the rows one by one; the HLO text of each goes to a directory where one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hlo", type=Path, help="directory for the HLO text of each row")
    directory = parser.parse_args().hlo
    found = []
    for number, row in enumerate([*ROWS, *REPEATED]):
        record, hlo = compile_kit_row(row)
        found.append({"row": str(row), "compiled": record})
        if directory:
            (directory / f"{number:03}.txt.gz").write_bytes(gzip.compress(hlo.encode()))
        print(row, flush=True)
    write(KIT, found)


if __name__ == "__main__":
    main()
