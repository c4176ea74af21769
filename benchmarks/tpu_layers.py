"""What the TPU compiler estimates a whole layer to take, beside what cost/compute.py counts for it.

    .venv/bin/python benchmarks/tpu_layers.py [--chips v5e v5p …]

A product compiled alone is the best case: inside a layer's program norms and sums run in its kernel, gradients are
masked on the way in, weights are copied to other layouts. Compiles a layer of Llama 2 7B, forward and, made again,
backward, for one device of each chip, with libtpu and no TPU (minutes a chip), sums `estimated_cycles` of its fusions,
and writes counted over estimated to src/meshwright/planning/cost/rates/data/tpu_layers.json: of attention between its
products with weights, and of all else. To be run again whenever what is counted changes; chips that are not named stay.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tpu_products import one_chip

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import System
from meshwright.description.step.strategy import DEFAULT
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.seconds import layer_parts
from meshwright.proof.compiler.targets import environment

FILE = Path(__file__).parents[1] / "src/meshwright/planning/cost/rates/data/tpu_layers.json"
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
BATCH, SEQ_LEN = 4, 2048
MODEL = PRESETS["llama2-7b"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=CHIPS, choices=CHIPS)
    parser.add_argument("--compile-here", metavar="CHIP", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile_here:
        compile_layer(one_chip(args.compile_here))
        return
    for chip in args.chips:
        estimated, counted = estimated_cycles(one_chip(chip)), counted_cycles(one_chip(chip))
        print(f"{chip:<6} estimated {estimated} counted {counted}", flush=True)
        chips = json.loads(FILE.read_text())["chips"] if FILE.exists() else {}
        chips[chip] = {part: round(counted[part] / estimated[part], 3) for part in counted}
        source = f"benchmarks/tpu_layers.py, jax {version('jax')}, libtpu {version('libtpu')}"
        FILE.write_text(json.dumps({"source": source, "chips": chips}, indent=1) + "\n")


def counted_cycles(system: System) -> dict[str, float]:
    """What is counted for the layer, forward, made again and backward."""
    flops = json.loads(FILE.with_name("tpu_products.json").read_text())["chips"][system.chip.name]["flops_per_cycle"]
    workload = Workload(model=MODEL, batch=BATCH, seq_len=SEQ_LEN, remat="block")
    parts = layer_parts(workload, MeshShape(), system, DEFAULT)
    return {part: seconds.total * system.peak("bf16") / flops for part, seconds in parts.items()}


def estimated_cycles(system: System) -> dict[str, int]:
    """What the compiler estimates, in a process that has its environment."""
    command = [sys.executable, __file__, "--compile-here", system.chip.name]
    found = subprocess.run(
        command, env=environment(system, os.environ), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return json.loads(found.stdout)


def compile_layer(system: System) -> None:
    """Print the estimates; runs in the child."""
    import jax
    import jax.numpy as jnp

    from meshwright.proof.compiler.devices import system_devices

    where = jax.sharding.SingleDeviceSharding(system_devices(system)[0])
    embed, mlp, heads, size = MODEL.embed, MODEL.mlp, MODEL.num_heads, MODEL.query_key_dim

    def norm(x, scale):
        wide = x.astype(jnp.float32)
        root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        return (wide * root).astype(x.dtype) * scale

    def rotate(x):
        times = 1e4 ** (-jnp.arange(size // 2, dtype=jnp.float32) / (size // 2))
        angles = jnp.arange(SEQ_LEN, dtype=jnp.float32)[None, :, None, None] * times
        one, two = jnp.split(x.astype(jnp.float32), 2, -1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1).astype(x.dtype)

    def attend(query, key, value):
        with jax.named_scope("attend"):
            scores = jnp.einsum("bqhk,bthk->bhqt", query, key)
            mask = jnp.tril(jnp.ones((SEQ_LEN, SEQ_LEN), bool))
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32), -1).astype(scores.dtype)
            return jnp.einsum("bhqt,bthk->bqhk", weights, value)

    def layer(x, w):
        y = norm(x, w["before"])
        query, key, value = (jnp.einsum("bsd,dhk->bshk", y, w[name]) for name in ("query", "key", "value"))
        x = x + jnp.einsum("bshk,hkd->bsd", attend(rotate(query), rotate(key), value), w["output"])
        y = norm(x, w["between"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]

    def step(x, w, gradient):
        y, back = jax.vjp(jax.checkpoint(layer), x, w)
        return y, back(gradient)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)

    weights = {name: array(embed, heads, size) for name in ("query", "key", "value")}
    weights |= {"output": array(heads, size, embed), "before": array(embed), "between": array(embed)}
    weights |= {"gate": array(embed, mlp), "up": array(embed, mlp), "down": array(mlp, embed)}
    x = array(BATCH, SEQ_LEN, embed)
    text = jax.jit(step).lower(x, weights, x).compile().as_text() or ""
    cycles = {"attention": 0, "rest": 0}
    for line in text.splitlines():
        if count := re.search(r'"estimated_cycles":"(\d+)"', line):
            name = re.search(r'op_name="([^"]*)"', line)
            cycles["attention" if name and "attend" in name[1] else "rest"] += int(count[1])
    print(json.dumps(cycles))


if __name__ == "__main__":
    main()
