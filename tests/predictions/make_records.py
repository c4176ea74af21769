"""Write the golden records: today's predictions of every case in `cases.py`.

    python tests/predictions/make_records.py [--only WORD ...]

The file is the same to the byte where no prediction has changed. With `--only`, print the records of the cases that
have one of the words in their names, and write nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES
from compute import compute
from records import PLANS, write


def main() -> None:
    """Compute and write all records, or print some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    only = parser.parse_args().only
    if only:
        for name in (name for name in CASES if any(word in name for word in only)):
            print(name, json.dumps(compute(CASES[name]), indent=2))
        return
    found = {}
    for name, case in CASES.items():
        began = time.perf_counter()
        found[name] = {"case": case, "record": compute(case)}
        print(f"{time.perf_counter() - began:6.2f} s  {name}", flush=True)
    write(PLANS, found)
    print(f"{len(found)} records, {PLANS.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
