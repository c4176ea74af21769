"""Golden records as files: JSON in gzip, the same bytes for the same records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PLANS = Path(__file__).parent / "plans.json.gz"
KIT = Path(__file__).parent / "kit.json.gz"
TPU = Path(__file__).parent / "tpu.json.gz"


def write(path: Path, records: Any) -> None:
    """Write records with sorted keys and no time stamp."""
    packed = gzip.compress(json.dumps(records, sort_keys=True, indent=0).encode(), mtime=0)
    # Byte 9 is the system that packed it: 3 (Unix) by Python 3.11, 255 (unknown) by 3.13.
    path.write_bytes(packed[:9] + b"\x03" + packed[10:])


def read(path: Path) -> Any:
    """Read records that `write` wrote."""
    return json.loads(gzip.decompress(path.read_bytes()))
