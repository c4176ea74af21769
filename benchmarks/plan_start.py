"""How long `meshwright plan` takes from a cold start, beside a bare start of Python and one that imports JAX.

    .venv/bin/python benchmarks/plan_start.py [--json]

Wall time, the best of several runs each. The goal is a plan in under a second.
"""

import argparse
import json
import subprocess
import sys
import time

PLAN = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--seq-len", "8192"]
CASES = {
    "python": ["-c", "pass"],
    "plan": ["-m", "meshwright.cli.main", *PLAN],
    "import jax": ["-c", "import jax"],
}


def best_seconds(words: list[str], runs: int = 5) -> float:
    """The shortest of several runs of this Python with some arguments."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    seconds = {name: best_seconds(words) for name, words in CASES.items()}
    print(json.dumps(seconds) if as_json else "\n".join(f"{name:<12}{time:6.2f} s" for name, time in seconds.items()))


if __name__ == "__main__":
    main()
