"""Golden records as files: JSON in gzip, the same bytes for the same records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PLANS = Path(__file__).parent / "plans.json.gz"
KIT = Path(__file__).parent / "kit.json.gz"


def write(path: Path, records: Any) -> None:
    """Write records with sorted keys and no time stamp."""
    text = json.dumps(records, sort_keys=True, indent=0)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> Any:
    """Read records that `write` wrote."""
    return json.loads(gzip.decompress(path.read_bytes()))
