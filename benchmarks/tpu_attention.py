"""What splash attention reaches of a TPU's peak, by the instructions that the compiler makes of it.

    .venv/bin/python benchmarks/tpu_attention.py [--chips v5e v6e …]

Compiles the kernels of `execution/runtime/attention/kernels.py` (JAX's splash attention), forward and backward, causal,
for one device of each chip, with libtpu and no TPU; a minute or two each. A TPU runs one bundle of instructions a
cycle, in order, and the compiler writes those of a kernel down (`--xla_jf_dump_to`, final_bundles): those of a block of
scores, those of each step of the grid, made or skipped, and those that begin and end a row of blocks. A block takes no
fewer cycles than its products keep the matrix units busy; what else the hardware waits for is not in them. Writes the
shares to src/meshwright/planning/cost/rates/data/tpu_attention.json; chips that are not named stay as they are there.

What was measured is of a like kernel, tokamax's splash attention on v6e (github.com/vlasenkoalexey/
tpu_performance_autoresearch_wiki, Qwen3-8B, 24,576 tokens of 8,192 a sequence): 6.0 ms forward and 13.5 backward for 32
heads of 128 of a layer. The shares make it 7.1 and, in the two kernels here, 17.2.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwright.description.hardware.load import load_chip
from meshwright.description.hardware.system import make_system
from meshwright.planning.cost.rates.attention import COMPILED_DIMS, TPU_PRODUCTS, TpuKernel, tpu_block, tpu_kernel_width
from meshwright.proof.compiler.targets import environment

DATA = Path(__file__).parents[1] / "src/meshwright/planning/cost/rates/data"
CHIPS = ("v5e", "v6e", "v5p", "v4", "tpu7x")
LENGTH = 8192
NUM_HEADS = 2
CORES = {"v4": 2, "v5p": 2}
"""The cores that are one device to JAX: the kernels' heads are shared between them, and a bundle is of one core."""

_ADDRESS = re.compile(r"\s*(0x[0-9a-f]+|0)\s")
_BRANCH = re.compile(r"sbr\.rel \(%\w+\) target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")


@dataclass(frozen=True)
class Cycles:
    """The cycles of one kernel: of a block of scores, of a step of the grid beside it, of a row's begin and end."""

    block: int
    step: int
    row: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=CHIPS, choices=CHIPS)
    parser.add_argument("--compile-here", nargs=2, metavar=("CHIP", "HEAD_DIMS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile_here:
        chip, dims = args.compile_here
        compile_kernels(chip, *map(int, dims.split("/")))
        return
    for chip in args.chips:
        write(chip, {f"{qk_dim}/{value_dim}": shares(chip, qk_dim, value_dim) for qk_dim, value_dim in COMPILED_DIMS})


def shares(chip: str, qk_dim: int, value_dim: int) -> dict[TpuKernel, float]:
    """The share of the peak that each kernel has, of the flops of the blocks that it makes."""
    peak = json.loads((DATA / "tpu_products.json").read_text())["chips"][chip]["flops_per_cycle"]
    peak //= CORES.get(chip, 1)
    block = tpu_block(qk_dim)
    rows = LENGTH // block
    made, found = rows * (rows + 1) // 2, {}
    for kernel, cycles in compiled_cycles(chip, f"{qk_dim}/{value_dim}").items():
        busy = 2 * block**2 * tpu_kernel_width(kernel, qk_dim, value_dim) / peak
        taken = made * max(cycles.block, busy) + rows * rows * cycles.step + rows * cycles.row
        found[kernel] = round(made * busy / taken, 3)
        print(
            f"{chip:<6} {qk_dim:>4}/{value_dim} {kernel:<4} {cycles} at least {busy:.0f}: {found[kernel]:.1%}",
            flush=True,
        )
    return found


def compiled_cycles(chip: str, dims: str) -> dict[TpuKernel, Cycles]:
    """The cycles of the kernels, from what another process has the compiler write."""
    system = make_system(load_chip(chip), (1,))
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(system, os.environ)
        variables["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, __file__, "--compile-here", chip, dims]
        subprocess.run(command, env=variables, check=True, stderr=subprocess.DEVNULL)
        return {
            kernel: read_bundles(next(Path(folder).glob(f"*splash_mha_{kernel}_*-final_bundles.txt")).read_text())
            for kernel in TPU_PRODUCTS
        }


def read_bundles(text: str) -> Cycles:
    """The cycles that a kernel's bundles say: what branches go round is the block, the largest, or of a row."""
    address = 0
    branches: list[tuple[int, str]] = []
    regions: dict[str, int] = {}
    for line in text.splitlines():
        if at := _ADDRESS.match(line):
            address = int(at[1], 16)
        regions |= dict.fromkeys(_REGION.findall(line), address)
        branches += [(address, region) for region in _BRANCH.findall(line)]
    skipped = [(start, regions[region]) for start, region in branches if regions.get(region, 0) > start]
    inner = [(a, b) for a, b in skipped if not any(a < other < b for other, _ in skipped)]
    *row, block = sorted(end - start for start, end in inner)
    return Cycles(block=block, step=address + 1 - block - sum(row), row=sum(row))


def compile_kernels(chip: str, qk_dim: int, value_dim: int) -> None:
    """Compile attention forward and backward; what the kernels are made of is written as the environment says."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from meshwright.execution.runtime.attention.kernels import full_sequence_attention
    from meshwright.execution.runtime.attention.segments import Mask
    from meshwright.proof.compiler.targets import topology

    described = topologies.get_topology_desc(**topology(make_system(load_chip(chip), (1,))))
    device = jax.sharding.SingleDeviceSharding(described.devices[0])
    query, key, value = (
        jax.ShapeDtypeStruct((1, LENGTH, NUM_HEADS, *dims), jnp.bfloat16, sharding=device)
        for dims in ((1, qk_dim), (qk_dim,), (value_dim,))
    )

    def step(*arrays: jax.Array) -> object:
        def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return full_sequence_attention(query, key, value, None, Mask(), kernel="splash")

        mixed, pullback = jax.vjp(attention, *arrays)
        return mixed, pullback(mixed)

    jax.jit(step).lower(query, key, value).compile()


def write(chip: str, found: dict[str, dict[TpuKernel, float]]) -> None:
    """Put the shares of a chip into the file."""
    file = DATA / "tpu_attention.json"
    data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"shares": {}}
    data["source"] = f"benchmarks/tpu_attention.py, jax {version('jax')}, libtpu {version('libtpu')}"
    data["shares"][chip] = found
    file.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
