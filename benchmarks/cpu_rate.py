"""What simulated devices share: the machine's rate of float32 products and of copies, as the `cpu` chip wants them.

    JAX_PLATFORMS=cpu .venv/bin/python benchmarks/cpu_rate.py [--json]

Prints the best of several runs, on one device, which has all cores to itself.
"""

import argparse
import json

import jax
import jax.numpy as jnp
from timing import best_seconds


def warm_seconds(function, *args: jax.Array, runs: int = 10) -> float:
    """The shortest of several runs, after one that compiles."""
    jax.block_until_ready(function(*args))
    return best_seconds(lambda: jax.block_until_ready(function(*args)), runs=runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rates = {}
    for size in (256, 1024, 2048):
        x = jnp.ones((size, size), jnp.float32)
        rates[f"matmul_{size}_flops_per_second"] = 2 * size**3 / warm_seconds(jax.jit(jnp.dot), x, x)
    copied = jnp.ones((64, 1024, 1024), jnp.float32)
    rates["copy_bytes_per_second"] = 2 * copied.nbytes / warm_seconds(jax.jit(lambda x: x + 1), copied, runs=5)
    if as_json:
        print(json.dumps(rates, indent=2))
        return
    for name, rate in rates.items():
        print(f"{name:<32}{rate:.3g}")


if __name__ == "__main__":
    main()
