"""Memory and time of loading weights: a random checkpoint of bf16 onto 8 simulated devices, beside `cat` of its files.

    .venv/bin/python benchmarks/load_weights.py [--gigabytes 4] [--mesh 1,4,2,1] [--keep DIR]

Devices of XLA:CPU hold their shards in the host's memory, so what loading takes beyond them is the peak of the
process's own pages (RssAnon, which leaves out memory maps of files) less what it had before and the shards. Each figure
is of a process of its own. New memory costs its own time, in virtual machines most of all: so an array of as many bytes
is filled beside it. Cold: after the kernel was told to forget the files (POSIX_FADV_DONTNEED).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import ml_dtypes
import numpy as np

import meshwright as mw
from meshwright.description.families.llama import preset
from meshwright.description.families.registry import hugging_face_config
from meshwright.description.hardware.system import parse_system
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.weights.directory import INDEX, write_file
from meshwright.execution.weights.load import read_tensors
from meshwright.execution.weights.places import places

WIDTHS = (2048, 8192, 16, 4, 32_000)
"""Embed, mlp, heads, kv heads and vocab of a Llama with 122 MB of bf16 a layer."""

LAYER_BYTES, END_BYTES = 121_643_008, 262_148_096
"""Of a layer, and of the tables and the norm at the ends."""

FILE_BYTES = 1_000_000_000
"""Files hold tensors up to this size."""


def main() -> None:
    """Write a checkpoint, load it, print what that took."""
    parser = argparse.ArgumentParser(description="Load a random checkpoint onto 8 simulated devices, beside cat.")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="the size of the checkpoint")
    parser.add_argument("--mesh", default="1,4,2,1", help="the mesh of 8 devices")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the checkpoint is kept, and read the next time")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(load(args.child, args.mesh)))
        return
    with TemporaryDirectory() if args.keep is None else nullcontext(args.keep) as folder:
        directory = Path(folder)
        if not (directory / "config.json").is_file():
            write(directory, round((args.gigabytes * 1e9 - END_BYTES) / LAYER_BYTES))
        report(directory, args.mesh)


def write(directory: Path, layers: int) -> None:
    """Write a checkpoint of so many layers in files of 1 GB."""
    embed, mlp, heads, kv_heads, vocab = WIDTHS
    model = preset("random", (layers, embed, mlp, heads, kv_heads, vocab))
    directory.mkdir(parents=True, exist_ok=True)
    block = np.random.default_rng(0).standard_normal(1 << 24, np.float32).astype(ml_dtypes.bfloat16)
    shapes = {name: place.tensor_shape for place in places(model).values() for _, name in place.names()}
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        size += 2 * int(np.prod(shape))
        if size > FILE_BYTES:
            files.append({})
            size = 2 * int(np.prod(shape))
        files[-1][name] = shape
    weight_map = {}
    for number, held in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(held, file)
        entries = [(name, shape, "BF16") for name, shape in held.items()]
        write_file(directory / file, entries, lambda name: np.resize(block, shapes[name]))
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(hugging_face_config(model)))


def report(directory: Path, mesh: str) -> None:
    """Print a row each for `cat` and for loading, cold and warm."""
    files = sorted(directory.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    print(f"{size / 1e9:.2f} GB of bf16 in {len(files)} files, onto {mesh} of cpu:8, {os.cpu_count()} cores")
    for state in ("cold", "warm"):
        seconds = {}
        for name, command in {
            "cat": ["cat", *map(str, files)],
            "fill": [sys.executable, "-c", f"import numpy; numpy.empty({size}, numpy.uint8).fill(1)"],
            "load": [sys.executable, __file__, "--child", str(directory), "--mesh", mesh],
        }.items():
            if state == "cold":
                forget(files)
            began = time.perf_counter()
            # Into a file: a pipe would be another copy of what `cat` reads.
            with (Path(os.devnull) if name == "cat" else directory / "printed").open("wb") as sink:
                subprocess.run(command, stdout=sink, check=True)
            seconds[name] = time.perf_counter() - began
        found = json.loads((directory / "printed").read_text())
        (directory / "printed").unlink()
        print(
            f"{state}: cat {seconds['cat']:.1f} s, filling as much new memory {seconds['fill']:.1f} s, load"
            f" {found['seconds']:.1f} s ({found['processor']:.1f} s of processors)"
        )
    beyond, shards, largest = (found[name] / 1e6 for name in ("beyond", "shards", "largest"))
    print(f"held beyond {shards:,.0f} MB of shards: {beyond:,.0f} MB; the largest tensor has {largest:,.0f} MB")


def forget(files: list[Path]) -> None:
    """Have the kernel drop its copies of files."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(directory: Path, mesh: str) -> dict[str, float]:
    """Load a checkpoint in this process: seconds, bytes of the shards, and the most bytes held beyond them."""
    claim_devices(parse_system("cpu:8"))
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, spent = time.perf_counter(), time.process_time()
    model = mw.load(directory, on="cpu:8", mesh=mesh)
    jax.block_until_ready(model.params)
    seconds, spent = time.perf_counter() - began, time.process_time() - spent
    done.set()
    watcher.join()
    shards = sum(shard.data.nbytes for array in jax.tree.leaves(model.params) for shard in array.addressable_shards)
    largest = max(tensor.nbytes for tensor in read_tensors(directory).values())
    return {
        "seconds": seconds,
        "processor": spent,
        "shards": shards,
        "beyond": peak - before - shards,
        "largest": largest,
    }


def anonymous_bytes() -> int:
    """The resident bytes of this process that are of no file."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
