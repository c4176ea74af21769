"""Exercises on data parallelism, ZeRO, FSDP and tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.lessons.exercise import Choice, Exercise, Mistake, Number
from meshwright.lessons.program import Asked, Program

DP = 8


def _bytes(of_each: float, devices: int = DP) -> float:
    """Return bytes per device: `of_each` bytes times the parameters of Llama 3 8B, split over `devices`."""
    return of_each * num_parameters(PRESETS["llama3-8b"]) / devices


EXERCISES: Mapping[str, Exercise] = {
    "moments-under-zero-1": Number(
        question=f"Llama 3 8B, AdamW with moments in float32, dp={DP} and ZeRO-1: bytes of the moments on a device?",
        unit="B",
        answer=lambda: _bytes(8),
        mistakes=(
            Mistake(lambda: _bytes(8, 1), "ZeRO-1 splits the moments over dp."),
            Mistake(lambda: _bytes(4), "AdamW has two moments."),
            Mistake(lambda: _bytes(12), "The weights stay whole under ZeRO-1, and are no moments."),
            Mistake(lambda: _bytes(16), "Weights and gradients are no moments."),
        ),
        hints=(
            "How many bytes has a parameter's state, and over how many devices is it split?",
            "Two moments of 4 bytes, over dp.",
            "8 bytes times 8.03 billion parameters, over 8.",
        ),
        because="Each device updates an eighth of the parameters; then an all-gather brings all of them together.",
    ),
    "fsdp-layer": Program(
        question="Write f(x, w) for x[B_X, D] @ w[D_X, F] -> y[B_X, F] as FSDP does it: gather the weight.",
        mesh={"X": 8},
        dims={"B": 256, "D": 64, "F": 32},
        operands=("x[B_X, D]", "w[D_X, F]"),
        result="y[B_X, F]",
        reference=jnp.matmul,
        collectives=(Asked("all-gather", ("X",), "w[D, F]"),),
        flops=lambda: 2 * 256 * 64 * 32 / 8,
        hints=(
            "The batch stays where it is. What does each device need to multiply its rows?",
            "All of the weight: one all-gather over X, of its first dim.",
            "In jax.shard_map: x @ jax.lax.all_gather(w, 'X', axis=0, tiled=True), out_specs=P('X', None). The gradient"
            " of the gather is the reduce-scatter that FSDP needs.",
        ),
        because="Weights move and the batch stays: this is data parallelism. Its gradient has the reduce-scatter.",
    ),
    "column-then-row": Program(
        question=(
            "Write f(x, up, down) = relu(x @ up) @ down for x[B, D], up[D, F_X], down[F_X, D] -> y[B, D] with one"
            " all-reduce of y."
        ),
        mesh={"X": 8},
        dims={"B": 64, "D": 32, "F": 128},
        operands=("x[B, D]", "up[D, F_X]", "down[F_X, D]"),
        result="y[B, D]",
        reference=lambda x, up, down: jax.nn.relu(x @ up) @ down,
        collectives=(Asked("all-reduce", ("X",), "y[B, D]"),),
        flops=lambda: 2 * 2 * 64 * 32 * 128 / 8,
        copies=("h[B, F_X]", "h[B, F_X]"),
        hints=(
            "Which case is the first product, and which the second?",
            "The first is case 1: each device has columns of h. relu needs nothing more. The second is case 3.",
            "In jax.shard_map: psum over 'X' of relu(x @ up) @ down, with in_specs P(), P(None, 'X') and P('X', None).",
        ),
        because="Columns, then rows: nothing moves in between, and one sum ends the pair.",
    ),
    "what-fsdp-is": Choice(
        question="A weight W[D_X, F] and a batch x[B_X, D], X=fsdp. What is FSDP?",
        options={
            "a": "Model parallelism: the weights are split over devices.",
            "b": "Data parallelism: each device computes its part of the batch with all of the weights.",
            "c": "Tensor parallelism over the contracted dim.",
        },
        answer="b",
        replies={
            "a": "They are stored split. What does a device have when it multiplies?",
            "c": "Then partial sums would be added up. Here the weight is gathered, and nothing is summed forward.",
        },
        hints=(
            "Look at the product that a device does, not at how weights are stored.",
            "The weight is gathered before, and the batch is split all along.",
            "Replace the gather by a copy that is always there: which parallelism is left?",
        ),
        because="The same weights with another batch spec are another program: the batch decides.",
    ),
}
