"""How long reading a large compiled program takes, beside one pass of a regular expression over the same text.

    .venv/bin/python benchmarks/hlo_reading.py [--megabytes N] [--json]

The text is a small train step compiled for 8 simulated devices with its loop bodies repeated under names of their own,
as a model whose layers are not scanned has them. Seconds are the process's own.
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import toy_programs as toys

from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.records import read_hlo

MESH = {"fsdp": 2, "tp": 4}


def seconds(call) -> float:
    """The least processor time of three calls."""
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        call()
        best = min(best, time.process_time() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    text = toys.unrolled(toys.train_step(toys.cpu_mesh(**MESH)).compile().as_text(), options.megabytes * 1_000_000)
    figures = {
        "regular expression": seconds(lambda: re.findall(r"[\w.\-]+", text)),
        "parse_hlo": seconds(lambda: parse_hlo(text)),
        "read_hlo": seconds(lambda: read_hlo(text, MESH, hardware="cpu:8")),
    }
    if options.json:
        print(json.dumps({"bytes": len(text), **figures}))
        return
    for name, taken in figures.items():
        ratio = taken / figures["regular expression"]
        print(f"{name:<20}{taken:6.2f} s  {ratio:5.1f}x  {len(text) / taken / 1e6:6.1f} MB/s")


if __name__ == "__main__":
    main()
