"""What 100,000 JSON lines cost a run: time to tokenise them, the wait for a batch, memory of the loader.

    .venv/bin/python benchmarks/input_pipeline.py [--documents 100000] [--steps 40]

Documents are drawn from a seed, 400 bytes in the mean. Wait: `input_seconds` over `step_seconds` of a run of the demo's
model on 8 simulated devices, its first step left out; and the time that a batch takes alone, which is what a run would
wait that read it when it needs it. Memory: of a process that reads the batches of many steps, of so many documents and
of ten times as many. Its own pages (RssAnon), and those of files that are mapped (RssFile), which the system takes back
when it needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import jax
import numpy as np

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.workload import Workload
from meshwright.execution.data.encoding import find_encoder
from meshwright.execution.data.sources import find_files
from meshwright.execution.data.store import TokenStore
from meshwright.execution.data.tokenizing import Tokenizing, tokenize
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.training.data.batches import Batches
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.data.run_data import open_data
from meshwright.mesh import MeshShape

BATCH, SEQ_LEN = 16, 256
"""The demo's."""

MEAN_BYTES = 400


def write_documents(path: Path, count: int) -> None:
    """Write JSON lines of words from a seed."""
    rng = np.random.default_rng(0)
    words = np.array(["".join(map(chr, rng.integers(97, 123, rng.integers(2, 10)))) for _ in range(5000)])
    with path.open("w") as file:
        for size in rng.exponential(MEAN_BYTES / 6.5, count).astype(int) + 2:
            file.write(json.dumps({"text": " ".join(words[rng.integers(0, len(words), size)])}) + "\n")


def make_store(directory: Path, count: int) -> Path:
    """A store of `count` documents; prints how long it took."""
    path = directory / f"{count}.jsonl"
    write_documents(path, count)
    source, began = find_files((str(path),)), time.perf_counter()
    info = tokenize(Tokenizing(source, find_encoder(source, None, None), "error", "bytes"), directory / f"{count}")
    seconds = time.perf_counter() - began
    size = f"{path.stat().st_size / 1e6:.0f} MB, {info.tokens / 1e6:.1f} M tokens (bytes)"
    print(f"{count:,} documents, {size}: tokenised in {seconds:.1f} s")
    return directory / f"{count}"


def rss() -> dict[str, float]:
    """The memory of this process in MB: its own pages and those of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        name: int(line.split()[1]) / 1024 for line in lines for name in ("RssAnon", "RssFile") if line.startswith(name)
    }


def read_batches(store: Path, steps: int) -> None:
    """Read the batches of many steps, and print time and memory: a process of its own."""
    claim_devices(parse_system("cpu:8"))
    mesh = build_mesh(MeshShape(dp=8))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("dp"))
    jax.block_until_ready(jax.device_put(np.zeros((BATCH, SEQ_LEN), np.int32), sharding))
    before = rss()
    began = time.perf_counter()
    workload = Workload(model=PRESETS["tiny"], batch=BATCH, seq_len=SEQ_LEN)
    data = open_data(DataConfig(sources=(str(store),)), workload, None, seed=0)
    batches = Batches(data, sharding, (BATCH, SEQ_LEN), seed=0)
    batches[0]
    opened = time.perf_counter() - began
    found, seconds = [], []
    for step in range(1, steps):
        began = time.perf_counter()
        jax.block_until_ready(batches._make(step))
        seconds.append(time.perf_counter() - began)
        if step in (steps // 10, steps // 2, steps - 1):
            found.append(rss())
    batches.close()
    documents = TokenStore(store).info.documents
    print(f"{documents:,} documents: open in {opened:.2f} s, a batch read in {median(seconds) * 1e3:.2f} ms")
    grown = ", ".join(
        f"{one['RssAnon'] - before['RssAnon']:.0f} + {one['RssFile'] - before['RssFile']:.0f}" for one in found
    )
    print(f"  memory beyond JAX, own + mapped, MB after a tenth, half and all of {steps:,} steps: {grown}")


def train(store: Path, directory: Path, steps: int) -> None:
    """Train the demo's model on the store, and print what it waited for batches."""
    rows: list[dict] = []
    mw.train(
        "tiny", directory / "run", on="cpu:8", mesh="1,2,4,1", batch=BATCH, seq_len=SEQ_LEN, steps=steps,
        data=(str(store),), on_step=rows.append,
    )  # fmt: skip
    waited, took = (sum(row[name] for row in rows[1:]) for name in ("input_seconds", "step_seconds"))
    step = median(row["step_seconds"] for row in rows[1:])
    print(f"the demo's model, {steps} steps of {step * 1e3:.0f} ms: waited {waited * 1e3:.2f} ms, {waited / took:.3%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--read", type=Path)
    args = parser.parse_args()
    if args.read is not None:
        read_batches(args.read, 2000)
        return
    with TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory  # What is made of the data once is made here.
        stores = [make_store(Path(directory), count) for count in (args.documents, 10 * args.documents)]
        for store in stores:
            subprocess.run([sys.executable, __file__, "--read", str(store)], check=True)
        train(stores[0], Path(directory), args.steps)


if __name__ == "__main__":
    main()
