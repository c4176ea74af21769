"""Seconds until each command prints something on a terminal, its longest silence, and until it ends.

    python benchmarks/first_output.py

Each runs once on a terminal of its own, in a new folder, and finds no program compiled before; beside them a bare start
of Python. On a terminal no command should be silent for over a second.
"""

import itertools
import os
import pty
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

TINY = "tiny --on cpu:8 --mesh 1,2,4,1 --batch 16 --seq-len 64"
PROGRAM = """\
import jax
import jax.numpy as jnp

def step(mesh):
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp")))
    return jax.jit(lambda x: x @ x).lower(x)
"""
"""What `inspect` looks at."""

COMMANDS = (
    "--help",
    "plan --help",
    "chips",
    "show A[I_X,J_Y] --mesh X=2,Y=2 --dims I=8,J=8",
    "show pipeline --stages 4 --microbatches 8",
    "matmul A[I_X,J]@B[J,K]->C[I_X,K] --mesh X=4 --dims I=8192,J=8192,K=8192 --on v5e:2x2",
    "collective all-reduce --mesh X=4 --axis X --on v5e:2x2 --bytes 64M",
    "plan llama3-8b --on v5p:4x4x4 --batch 512",
    "plan llama3-8b --on v5p:4x4x4 --batch 1024 --sweep chips=64..1024",
    "plan deepseek-v3 --on h100:2048 --batch 15360",
    "plan llama3-8b --on v5e:4x4 --serve decode",
    "plan resnet50 --on a100-80gb:8 --batch 256 --compiled 0",
    f"verify {TINY}",
    "inspect program:step --mesh fsdp=8",
    f"train {TINY} --steps 20 -o run",
    "generate run --num-tokens 50",
)
"""In this order: `generate` reads the run of `train`."""


class Timing(NamedTuple):
    """Seconds to the first output, of the longest time without any, and to the end."""

    first: float
    silence: float
    end: float


def timing(words: list[str], folder: str) -> Timing:
    """Run this Python with some arguments on a terminal, and note when it writes."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "100", "TERM": "xterm", "XDG_CACHE_HOME": f"{folder}/cache"}
    times = [time.monotonic()]
    with subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as child:
        os.close(theirs)
        try:
            while os.read(ours, 1 << 16):
                times.append(time.monotonic())
        except OSError:  # Linux says so when the other side is closed.
            pass
        code = child.wait()
    os.close(ours)
    if code:
        raise SystemExit(f"{words} ended with {code}")
    times.append(time.monotonic())
    return Timing(times[1] - times[0], max(b - a for a, b in itertools.pairwise(times)), times[-1] - times[0])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/program.py", "w") as file:
            file.write(PROGRAM)
        print(f"{'first':>9}{'silence':>9}{'end':>9}  meshwright …")
        bare = timing(["-c", "pass"], folder)
        print(f"{'':>18}{bare.end:7.2f} s  (python -c pass)", flush=True)
        for command in COMMANDS:
            found = timing(["-m", "meshwright", *command.split()], folder)
            print("".join(f"{seconds:7.2f} s" for seconds in found) + f"  {command}", flush=True)


if __name__ == "__main__":
    main()
