"""A campaign of faults: break runs, servers and files at random, and count how often each promise was tried and broken.

    .venv/bin/python benchmarks/faults.py --minutes 60 --seed 1 [--parts training,serving,files] [--json FILE]
    .venv/bin/python benchmarks/faults.py --trials training:100007 files:100009

Each trial draws from a seed of its own, prints what it did, and may be repeated alone with `--trials`. Training and
serving run the real commands in processes of their own. docs/reliability.md lists the promises.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Eight simulated devices share few cores: their programs need not be fast, but soon compiled.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import fault_files
import fault_serving
import fault_training
from fault_trials import Trial

# Imported once, and not by each command.
import meshwright.cli.serve.command
import meshwright.cli.train.command
import meshwright.cli.train.on_devices
import meshwright.execution.training.library  # noqa: F401

PARTS: dict[str, tuple[float, tuple[str, ...]]] = {
    "training": (0.6, fault_training.PROMISES),
    "serving": (0.25, fault_serving.PROMISES),
    "files": (0.15, fault_files.PROMISES),
}
"""Each part's share of the time, and its promises."""


def run_trial(part: str, seed: int, root: Path, *, requests: int, most_bytes: int) -> Trial:
    """Run one trial and print it."""
    trial, began = Trial(part, seed, root), time.monotonic()
    runs: dict[str, Callable[[], None]] = {
        "training": lambda: fault_training.train(trial),
        "serving": lambda: fault_serving.serve(trial, requests),
        "files": lambda: fault_files.files(trial, most_bytes),
    }
    try:
        runs[part]()
    except Exception:
        trial.broke.append(("the trial itself", traceback.format_exc()))
    seconds = time.monotonic() - began
    print(f"{part}:{seed}  {'; '.join(trial.did)}  {'BROKE' if trial.broke else 'ok'}  {seconds:.0f} s", flush=True)
    for promise, why in trial.broke:
        print(f"    {promise}\n" + "".join(f"        {line}\n" for line in why.splitlines()[-30:]), flush=True)
    if not trial.broke:
        shutil.rmtree(trial.folder, ignore_errors=True)
    return trial


def campaign(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Run the trials that are named, or some until the time is over; the counts."""
    began, trials = time.monotonic(), list[Trial]()
    named = (text.split(":") for text in args.trials)
    for part, seed in ((part, int(seed)) for part, seed in named) if args.trials else drawn(args, began):
        trials.append(run_trial(part, seed, root, requests=args.requests, most_bytes=args.bytes))
    return results(trials, began, args.seed)


def drawn(args: argparse.Namespace, began: float) -> Iterator[tuple[str, int]]:
    """Yield trials until the time is over, each part for its share of it."""
    used, number = dict.fromkeys(args.parts, 0.0), 0
    while (now := time.monotonic()) < began + args.minutes * 60:
        part = min(args.parts, key=lambda one: used[one] / PARTS[one][0])
        yield part, args.seed * 100_000 + number
        used[part], number = used[part] + time.monotonic() - now, number + 1


def results(trials: list[Trial], began: float, seed: int) -> dict[str, Any]:
    """The counts of some trials as data."""
    rows = [
        {
            "part": part,
            "promise": promise,
            "tried": sum(trial.tried.get(promise, 0) for trial in trials if trial.part == part),
            "broke": sum(promise == broken for trial in trials if trial.part == part for broken, _ in trial.broke),
        }
        for part, (_, promises) in PARTS.items()
        for promise in promises
    ]
    broke = [
        {"trial": f"{trial.part}:{trial.seed}", "did": trial.did, "promise": promise, "why": why}
        for trial in trials
        for promise, why in trial.broke
    ]
    return {
        "seed": seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "trials": {part: sum(trial.part == part for trial in trials) for part in PARTS},
        "promises": rows,
        "broke": broke,
    }


def table(found: dict[str, Any]) -> str:
    """The counts as the table of docs/reliability.md."""
    lines = ["| part | promise | tried | broke |", "| --- | --- | --- | --- |"]
    lines += [f"| {row['part']} | {row['promise']} | {row['tried']:,} | {row['broke']} |" for row in found["promises"]]
    return "\n".join(lines)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=[*PARTS])
    parser.add_argument("--trials", nargs="+", default=[], help="PART:SEED …, repeated alone")
    parser.add_argument("--requests", type=int, default=1500, help="of a trial of serving")
    parser.add_argument("--bytes", type=int, default=1500, help="changed at most in a file")
    parser.add_argument("--json", type=Path, help="file for the counts")
    parser.add_argument("--folder", type=Path, help="kept afterwards; default: a temporary one")
    return parser.parse_args(words)


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="faults_") as temporary:
        root = args.folder or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        found = campaign(args, root)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["broke"] else 0


if __name__ == "__main__":
    sys.exit(main())
