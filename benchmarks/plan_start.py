"""How long `meshwright plan` takes from a cold start, beside a bare start of Python and one that imports JAX.

    .venv/bin/python benchmarks/plan_start.py [--json]

Wall time, the best of several runs each. The goal is a plan in under a second.
"""

import argparse
import json
import subprocess
import sys

from timing import best_seconds

PLAN = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--seq-len", "8192"]
CASES = {
    "python": ["-c", "pass"],
    "plan": ["-m", "meshwright.cli.main", *PLAN],
    "import jax": ["-c", "import jax"],
}


def start(words: list[str]) -> None:
    """Run this Python with some arguments."""
    subprocess.run([sys.executable, *words], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    seconds = {name: best_seconds(lambda words=words: start(words), runs=5) for name, words in CASES.items()}
    print(json.dumps(seconds) if as_json else "\n".join(f"{name:<12}{best:6.2f} s" for name, best in seconds.items()))


if __name__ == "__main__":
    main()
