"""The TPU compiler's own estimate of the cycles of bf16 products of many sizes, for `cost.rates.efficiency`.

    .venv/bin/python benchmarks/tpu_products.py [--chips v5e v5p …] [--held-out]

Compiles [m, k] @ [k, n] for one device of each chip, with libtpu and no TPU: five to twenty minutes a chip on a core
that is shared. The estimates are `estimated_cycles` in the backend_config of the fusions in `compiled.as_text()`.
Writes the grid to src/meshwright/planning/cost/rates/data/tpu_products.json or, with --held-out, other sizes to
tests/data/tpu_products_held_out.json; chips that are not named stay as they are there.

An estimate is not of the operands that the compiler has copied to faster memory before the product, so it can be below
the time that HBM takes to read them; `product_efficiency` takes the longer of the two.
"""

import argparse
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from meshwright.description.hardware.load import load_chip
from meshwright.description.hardware.system import System, make_system
from meshwright.proof.compiler.targets import environment

ROOT = Path(__file__).parents[1]
GRID = {
    "m": (128, 512, 2048, 4096, 16384),
    "k": (128, 512, 2048, 8192, 16384),
    "n": (128, 512, 2048, 4096, 8192, 28672),
}
NUM_HELD_OUT = 20
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=CHIPS, choices=CHIPS)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--compile-here", metavar="CHIP", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = held_out_sizes() if args.held_out else grid_sizes()
    if args.compile_here:
        compile_products(one_chip(args.compile_here), sizes)
        return
    name = (
        "tests/data/tpu_products_held_out.json"
        if args.held_out
        else "src/meshwright/planning/cost/rates/data/tpu_products.json"
    )
    file = ROOT / name
    for chip in args.chips:
        cycles = cycles_on(one_chip(chip), held_out=args.held_out)
        if len(cycles) != len(sizes):
            sys.exit(f"{chip}: {len(cycles)} of {len(sizes)} products compiled")
        write(file, chip, cycles, sizes=sizes if args.held_out else None)


def one_chip(name: str) -> System:
    """One chip, the smallest slice."""
    chip = load_chip(name)
    assert chip.torus
    return make_system(chip, (1,) * chip.torus.rank)


def grid_sizes() -> tuple[tuple[int, int, int], ...]:
    """The sizes of the grid, those of n next to each other."""
    return tuple(itertools.product(GRID["m"], GRID["k"], GRID["n"]))


def held_out_sizes() -> tuple[tuple[int, int, int], ...]:
    """Other sizes within the grid: multiples of 128, even in the logarithm, always the same ones."""
    numbers = random.Random(0)

    def size(least: int, most: int) -> int:
        return 128 * round(math.exp(numbers.uniform(math.log(least), math.log(most))) / 128)

    return tuple((size(256, 16384), size(512, 16384), size(512, 28672)) for _ in range(NUM_HELD_OUT))


def flops_per_cycle(cycles: list[int], sizes: tuple[tuple[int, int, int], ...]) -> int:
    """The flops of a device's systolic arrays in a cycle: the least power of two that no estimate is faster than.

    Sides and numbers of arrays are powers of two, so it is one; half of it would make some product faster than the
    peak, twice as much would leave every product under half of it. Peak over it is the clock: 1.05 GHz on v4 (as in
    arXiv:2304.01433), 1.5 on v5e and 1.75 on v5p (as in the scaling book, tpus). By the estimates it is 1.75 on v6e and
    2.2 on tpu7x, with four arrays of 256; cloud.google.com/tpu/docs/v6e counts two.
    """
    best = max(2 * m * k * n / count for (m, k, n), count in zip(sizes, cycles, strict=True))
    return 2 ** math.ceil(math.log2(best))


def cycles_on(system: System, *, held_out: bool) -> list[int]:
    """The estimates for every size, made in a process that has the compiler's environment."""
    chip = system.chip.name
    command = [sys.executable, __file__, "--compile-here", chip, *(["--held-out"] if held_out else [])]
    found = []
    with subprocess.Popen(
        command, env=environment(system, os.environ), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout
        for line in child.stdout:
            m, k, n, cycles = map(int, line.split())
            print(f"{chip:<6}{m:>6} x {k:>6} x {n:>6}{cycles:>12} cycles", flush=True)
            found.append(cycles)
    return found


def compile_products(system: System, sizes: tuple[tuple[int, int, int], ...]) -> None:
    """Print the estimate for each size; runs in the child."""
    import jax
    import jax.numpy as jnp

    from meshwright.proof.compiler.devices import system_devices

    where = jax.sharding.SingleDeviceSharding(system_devices(system)[0])
    for m, k, n in sizes:
        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape in ((m, k), (k, n))]
        text = jax.jit(jnp.dot).lower(*shapes).compile().as_text() or ""
        print(m, k, n, sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text))), flush=True)


def write(file: Path, chip: str, cycles: list[int], *, sizes: tuple[tuple[int, int, int], ...] | None) -> None:
    """Put the estimates of a chip into a file: in the order of the grid or, of other sizes, each with its sizes."""
    made = f"benchmarks/tpu_products.py, jax {version('jax')}, libtpu {version('libtpu')}"
    data = json.loads(file.read_text()) if file.exists() else {"source": made, "chips": {}}
    if sizes is None:
        data |= {"grid": GRID}
        data["chips"][chip] = {"flops_per_cycle": flops_per_cycle(cycles, grid_sizes()), "cycles": cycles}
    else:
        data["chips"][chip] = [[*size, count] for size, count in zip(sizes, cycles, strict=True)]
    file.parent.mkdir(exist_ok=True)
    file.write_text(re.sub(r"(?<=[\d\[,])\n\s+(?=[\d\]])", " ", json.dumps(data, indent=1)) + "\n")


if __name__ == "__main__":
    main()
