"""How long the planner's search takes over its whole space, and how little of it has to be priced.

    .venv/bin/python benchmarks/plan_search.py [--json]

Each case is searched once from cold caches; seconds are the process's own, so that other work on the machine does not
count. The goal is Llama-3-405B on 8,192 devices in under two seconds on 2 cores; the search runs on one.
"""

import argparse
import json
import subprocess
import sys

CASES = (
    ("llama3-405b", "h100:8192", 2048, 8192),
    ("llama3-405b", "v5p:16x16x32", 2048, 8192),
    ("gpt3-175b", "a100-80gb:8192", 1536, 2048),
    ("mixtral-8x7b", "h100:512", 1024, 4096),
    ("deepseek-v3", "h100:2048", 4096, 4096),
)

SEARCH = """
import json, sys, time
from meshwright.description.hardware.system import parse_system
from meshwright.planning.search import rank
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload

name, hardware, batch, seq_len = sys.argv[1:]
workload = Workload(model=PRESETS[name], batch=int(batch), seq_len=int(seq_len))
began = time.process_time()
ranking = rank(workload, parse_system(hardware), top=1)
seconds = time.process_time() - began
print(json.dumps({"model": name, "hardware": hardware, "mesh": str(ranking.plans[0].mesh), "seconds": seconds,
                  "meshes": ranking.num_meshes, "ways": ranking.num_candidates, "priced": ranking.num_priced}))
"""


def search(case: tuple) -> dict:
    """One search in a process of its own."""
    words = [sys.executable, "-c", SEARCH, *map(str, case)]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    found = [search(case) for case in CASES]
    if as_json:
        print(json.dumps(found))
        return
    for row in found:
        counts = f"{row['meshes']:6,} meshes {row['ways']:8,} ways {row['priced']:5,} priced"
        rate = f"{row['ways'] / row['seconds']:9,.0f} ways a second"
        print(f"{row['model']:<14}{row['hardware']:<16}{row['mesh']:<28}{row['seconds']:5.2f} s {counts} {rate}")


if __name__ == "__main__":
    main()
