"""One long row of packed texts over sp devices, beside the same row on one device: loss and every gradient.

    .venv/bin/python benchmarks/long_context.py [--length 32768] [--degrees 1,8] [--method ring]
    .venv/bin/python benchmarks/long_context.py --model tiny-qwen3.5 --num-layers 4
    .venv/bin/python benchmarks/long_context.py --compile v4 v5p

A model of two small layers in float32, with drawn parameters; the second command has linear attention in three of four
layers. The row holds texts of drawn lengths, one after another, each with positions from 0 and a segment of its own,
and padding at its end. The first degree is what the others are compared with. Memory is the compiler's: arguments and
temporaries of a device.

--compile: no device. The train step of two layers of Llama 3 8B in bf16 with ring attention over one row of packed
texts, compiled for slices of a TPU of which each chip has 32,768 tokens: memory and what a device sends, planned and
compiled. A minute or two for each.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, replace
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.parameter_tree import leaves
from meshwright.description.step.rules import rules_of
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.attention.sequence import token_order
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.gradients import loss_and_gradients
from meshwright.execution.training.step import initial_state
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.units import show_bytes

TOKENS_OF_A_CHIP = 32768


@dataclass(frozen=True)
class Ran:
    """What one mesh makes of the row."""

    loss: float
    gradients: dict[str, np.ndarray]
    memory_bytes: int
    seconds: float


def row_of_texts(length: int, vocab: int) -> dict[str, np.ndarray]:
    """A row [1, length] of texts and padding: tokens, targets, positions, segments (0: padding) and weights."""
    draw = np.random.default_rng(0)
    positions, segments = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
    start, number = 0, 0
    while (size := int(draw.integers(length // 32, length // 3))) < length - start:
        number += 1
        positions[0, start : start + size] = np.arange(size)
        segments[0, start : start + size] = number
        start += size
    tokens = draw.integers(0, vocab, (1, length + 1), dtype=np.int32)
    weights = (segments > 0).astype(np.float32)
    return {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "segments": segments,
        "weights": weights / weights.mean(),
    }  # fmt: skip


def run(workload: Workload, strategy: Strategy, degree: int) -> Ran:
    """Loss and gradients over some devices."""
    shape = MeshShape(sp=degree)
    mesh, layout = build_mesh(shape, jax.devices()[:degree]), ShardingContext(shape, rules_of(strategy))
    row = row_of_texts(workload.seq_len, workload.config.vocab)
    if (order := token_order(workload.seq_len, layout, strategy)) is not None:
        row = {name: array[:, order] for name, array in row.items()}
    with jax.set_mesh(mesh):
        params = initial_state(workload, layout, Optimizer(), mesh, strategy, seed=0)["params"]
        batch = jax.device_put(row, jax.sharding.NamedSharding(mesh, layout.spec("batch", "sequence")))
        program = jax.jit(lambda params, batch: loss_and_gradients(params, batch, workload, layout, strategy))
        compiled = program.lower(params, batch).compile()
        memory: Any = compiled.memory_analysis()
        began = time.perf_counter()
        (loss, _), gradients = jax.block_until_ready(compiled(params, batch))
        seconds = time.perf_counter() - began
        found = {path: np.asarray(array) for path, array in leaves(gradients)}
    return Ran(loss.item(), found, memory.argument_size_in_bytes + memory.temp_size_in_bytes, seconds)


def compile_for(chip: str) -> None:
    """Print planned and compiled memory and bytes of collectives of slices with more and more chips."""
    for shape, degree in (("2x2x2", 8), ("2x2x4", 16), ("2x4x4", 32)):
        length = TOKENS_OF_A_CHIP * degree
        found = mw.verify(
            "llama3-8b", on=f"{chip}:{shape}", num_layers=2, batch=1, seq_len=length, mesh=f"sp={degree}", packed=True,
            sp_method="ring", remat="block",
        )  # fmt: skip
        records = found.plan.predicted, found.compiled
        peaks = [show_bytes(record.memory_bytes["peak"]) for record in records]
        sent = [
            show_bytes(sum(move.bytes for move in record.own_collectives if move.kind == "collective-permute"))
            for record in records
        ]
        print(
            f"{chip}:{shape:<7} sp={degree:<3} {length:>10,} {peaks[0]:>10} {peaks[1]:>10} {sent[0]:>10} {sent[1]:>10}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--degrees", default="1,8")
    parser.add_argument("--method", choices=("ring", "ulysses", "gather"), default="ring")
    parser.add_argument("--model", default="tiny", help="a preset")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--compile", nargs="+", metavar="CHIP", help="TPUs whose compiler is asked, as v4 and v5p")
    args = parser.parse_args()
    if args.compile:
        print("                      tokens       memory of a device        sent round the ring")
        print("                                 planned   compiled    planned   compiled")
        for chip in args.compile:
            compile_for(chip)
        return
    model = replace(PRESETS[args.model], num_layers=args.num_layers)
    workload = Workload(model=model, batch=1, seq_len=args.length, compute_dtype="f32", packed=True, remat="block")
    segments = row_of_texts(args.length, model.vocab)["segments"]
    print(f"{args.length:,} tokens: {segments.max()} texts of {np.bincount(segments[0])[1:].tolist()}, and padding")
    print("devices      loss   norm of gradients   memory of a device   seconds   largest difference of a gradient")
    first: Ran | None = None
    for degree in map(int, args.degrees.split(",")):
        method = args.method if degree > 1 else "gather"
        ran = run(workload, Strategy(attention="flash", sp_method=method), degree)
        first = first or ran
        norm = sum(float((array.astype(np.float64) ** 2).sum()) for array in ran.gradients.values()) ** 0.5
        differences = {
            path: float(abs(array - first.gradients[path]).max() / abs(first.gradients[path]).max())
            for path, array in ran.gradients.items()
        }
        worst = max(differences, key=lambda path: differences[path])
        said = "" if ran is first else f"{differences[worst]:.1e} of its largest number, {worst}"
        memory = show_bytes(ran.memory_bytes)
        print(f"{degree:>7} {ran.loss:>9.6f} {norm:>19.6f} {memory:>20} {ran.seconds:>9.1f}   {said}", flush=True)


if __name__ == "__main__":
    main()
