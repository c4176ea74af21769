"""A train step with the shardings of its arguments alone, and with the constraints of `mw.apply`, on an absent v5e:2x4.

    .venv/bin/python benchmarks/applied.py

The step is somebody else's: a transformer in plain JAX, four scanned layers of width 1024 under `jax.checkpoint`, Adam,
64 sequences of 1024 tokens. Both are compiled by libtpu (one to two minutes the first time, then read from the cache)
and simulated; no accelerator is needed. Prints step time, exposed communication and the bytes of collectives a device.
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "proof" / "programs"))

import jax
import jax.numpy as jnp
from foreign import Sizes, make_state, train_step  # pyright: ignore[reportMissingImports]

import meshwright as mw

SIZES = Sizes(batch=64, length=1024, vocab=8192, embed=1024, heads=8, head_dim=128, mlp=4096, layers=4)


def main() -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    state = jax.eval_shape(lambda key: make_state(key, SIZES), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((SIZES.batch, SIZES.length + 1), jnp.int32)
    applied = mw.apply(jax.jit(train_step, donate_argnums=0), {"batch": "fsdp"}, mesh, state, tokens, store="fsdp")
    alone = jax.jit(train_step, in_shardings=applied.shardings[0], donate_argnums=0)
    leaves = jax.tree.leaves((state, tokens))
    print(f"{'':<18}{'step':>10}{'exposed':>10}{'sent':>10}")
    seconds = {}
    for name, function, args in (("arguments alone", alone, (state, tokens)), ("mw.apply", applied.jitted, leaves)):
        found = mw.inspect(function, *args, on="v5e:2x4", mesh=mesh)
        assert found.schedule is not None
        seconds[name] = found.schedule.step_seconds
        exposed = sum(move.exposed_seconds or 0.0 for move in found.collectives)
        sent = sum(move.bytes for move in found.collectives)
        print(f"{name:<18}{seconds[name] * 1e3:>7.1f} ms{exposed * 1e3:>7.1f} ms{sent / 1e9:>7.2f} GB")
    print(f"{seconds['arguments alone'] / seconds['mw.apply']:.1f} times faster")


if __name__ == "__main__":
    main()
