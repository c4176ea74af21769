"""Steps of other people's programs on one GPU that is here, predicted beside measured.

    .venv/bin/python benchmarks/foreign_steps.py [h200:1]

The programs of tests/proof/programs/zoo.py, planned for one such GPU from their jaxprs. Measured: the median of 10
steps after the first two, each waited for. Memory: the program's own, as compiled.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "proof" / "programs"))

import jax
import jax.numpy as jnp
from zoo import PROGRAMS  # pyright: ignore[reportMissingImports]

import meshwright as mw

SIZES = {
    "gpt2": {"width": 1024, "batch": 16, "length": 1024, "layers": 6, "heads": 16},
    "two_towers": {"width": 512, "batch": 16384, "users": 262144, "items": 262144},
    "lstm": {"width": 2048, "batch": 1024, "length": 64},
    "moe": {"width": 2048, "tokens": 16384},
    "decode": {"width": 4096, "batch": 128, "length": 2048, "heads": 32, "layers": 4},
}


def made(leaf, key):
    """An array for an abstract one."""
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jax.random.randint(key, leaf.shape, 0, 64).astype(leaf.dtype)
    return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)


def main() -> None:
    on = sys.argv[1] if len(sys.argv) > 1 else "h200:1"
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'':<12}{'predicted':>11}{'measured':>11}{'ratio':>7}{'memory':>11}{'compiled':>11}{'ratio':>7}  terms")
    for name, sizes in SIZES.items():
        step, args = PROGRAMS[name](**sizes)
        plan = mw.plan(step, *args, on=on, num_compiled=0)
        leaves, structure = jax.tree.flatten(args)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        real = jax.tree.unflatten(structure, [made(*one) for one in zip(leaves, keys, strict=True)])
        place = 1 if name == "decode" else 0  # of the state
        compiled = step.lower(*real).compile()
        memory = compiled.memory_analysis()
        compiled_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        compiled_bytes -= memory.alias_size_in_bytes
        seconds = []
        for _ in range(12):
            began = time.perf_counter()
            state, _ = jax.block_until_ready(compiled(*real))
            seconds.append(time.perf_counter() - began)
            real = (*real[:place], state, *real[place + 1 :])
        took, step_seconds = statistics.median(seconds[2:]), plan.predicted.step_seconds or 0.0
        peak = plan.predicted.memory_bytes["peak"]
        terms = ", ".join(f"{key} {1e3 * value:.2f}" for key, value in plan.predicted.breakdown_seconds.items())
        print(
            f"{name:<12}{1e3 * step_seconds:>8.2f} ms{1e3 * took:>8.2f} ms{step_seconds / took:>6.2f}x"
            f"{peak / 1e9:>8.2f} GB{compiled_bytes / 1e9:>8.2f} GB{peak / compiled_bytes:>6.2f}x  {terms}",
            flush=True,
        )


if __name__ == "__main__":
    main()
