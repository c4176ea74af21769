"""Exercises on long sequences, pipelines and experts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import jax

from meshwright.lessons.exercise import Choice, Exercise, Mistake, Number
from meshwright.lessons.program import Asked, Program
from meshwright.pictures.answers.pipeline import pipeline
from meshwright.record import wire_bytes

STAGES, MOST_IDLE = 4, 0.1
TOKENS, WIDTH, CHOSEN, EXPERT_DEVICES = 4096, 4096, 2, 8


def _fewest_microbatches() -> int:
    """Return the smallest number of microbatches with which a pipeline's idle share is at most `MOST_IDLE`."""
    shares = ((m, pipeline(stages=STAGES, microbatches=m).idle_share) for m in itertools.count(1))
    return next(m for m, share in shares if share <= MOST_IDLE)


def _sent(chosen: int = CHOSEN) -> float:
    """Return the bytes that a device sends to experts on other devices, in bf16. chosen: experts per token."""
    return wire_bytes("all-to-all", 2 * TOKENS * WIDTH * chosen, EXPERT_DEVICES)


EXERCISES: Mapping[str, Exercise] = {
    "softmax-in-parts": Program(
        question=(
            "Write f(q, k, v) = softmax(q @ k.T) @ v for q[S, D], k[T_X, D], v[T_X, D] -> o[S, D]. Keys stay where they"
            " are; all-reduce the largest score and the sum of each row, [S], and the output, [S, D]."
        ),
        mesh={"X": 8},
        dims={"S": 16, "D": 32, "T": 256},
        operands=("q[S, D]", "k[T_X, D]", "v[T_X, D]"),
        result="o[S, D]",
        reference=lambda q, k, v: jax.nn.softmax(q @ k.T) @ v,
        collectives=(
            Asked("all-reduce", ("X",), "m[S]"),
            Asked("all-reduce", ("X",), "l[S]"),
            Asked("all-reduce", ("X",), "o[S, D]"),
        ),
        flops=lambda: 2 * 2 * 16 * 32 * 256 / 8,
        copies=("s[S, T_X]",) * 4,
        hints=(
            "A softmax is exp(score - largest) over the sum of these. Which of it needs other devices?",
            "The largest score of all devices, then two sums: of exp(score - largest), and of that times v.",
            "In jax.shard_map: m = jax.lax.pmax(jax.lax.stop_gradient(s.max(1)), 'X'); e = jnp.exp(s - m[:, None]);"
            " return jax.lax.psum(e @ v, 'X') / jax.lax.psum(e.sum(1), 'X')[:, None].",
        ),
        because="Three small arrays per query travel, whatever the length: ring attention merges blocks the same way.",
    ),
    "microbatches-for-a-bubble": Number(
        question=(
            f"How many microbatches does a pipeline of {STAGES} stages need, to be idle for at most {MOST_IDLE:.0%} of"
            " all time?"
        ),
        answer=_fewest_microbatches,
        mistakes=(
            Mistake(
                lambda: (STAGES - 1) / MOST_IDLE,
                "That takes the bubble's ratio to the time of work, or work as (m - p + 1) / m. Of all time it is"
                " (p - 1) / (m + p - 1).",
            ),
            Mistake(
                lambda: (1 - MOST_IDLE) / MOST_IDLE * STAGES, "Before the last stage begins there are p - 1 slots."
            ),
            Mistake(lambda: STAGES, "Try it: mw.pipeline(stages=4, microbatches=4).idle_share is far more than that."),
        ),
        hints=(
            "mw.pipeline(stages=4, microbatches=m).idle_share is the share of all time.",
            "The share of work is m / (m + p - 1).",
            "Solve m / (m + 3) = 0.9.",
        ),
        because="m / (m + p - 1) of all time is work.",
    ),
    "what-shrinks-a-bubble": Choice(
        question="A pipeline waits too much. What shrinks its bubble, with the same stages and the same chips?",
        options={
            "a": "Larger microbatches.",
            "b": "More microbatches.",
            "c": "1F1B instead of GPipe.",
            "d": "Faster links between stages.",
        },
        answer="b",
        replies={
            "a": "Each slot gets longer, the idle ones as well. And for one batch there are fewer.",
            "c": "It takes as long. What it saves is memory: fewer microbatches are kept for backward.",
            "d": "Stages wait for each other's work, and hardly for the links.",
        },
        hints=(
            "Which letters are in m / (m + p - 1)?",
            "Neither the time of a slot nor the schedule is in it.",
            "Only m is left, as p stays.",
        ),
        because="But each must be large enough to keep a chip busy: below that, smaller ones take as long.",
    ),
    "bytes-to-experts": Number(
        question=(
            f"Experts lie on {EXPERT_DEVICES} devices. Each device has {TOKENS} tokens of width {WIDTH} in bf16; each"
            f" token goes to {CHOSEN} experts, evenly spread. How many bytes leave a device in one all-to-all?"
        ),
        unit="B",
        answer=_sent,
        mistakes=(
            Mistake(lambda: _sent(1), "Each token is sent to as many experts as are chosen for it."),
            Mistake(
                lambda: _sent() * EXPERT_DEVICES / (EXPERT_DEVICES - 1),
                "An eighth stays on the device itself.",
            ),
            Mistake(lambda: _sent() * 2, "The way back is another all-to-all; or bf16 was taken for 4 bytes."),
            Mistake(lambda: _sent() / EXPERT_DEVICES, "That is what goes to one other device."),
        ),
        hints=(
            "How many rows does a device send, its own experts included?",
            "Tokens times chosen experts, each of width times 2 bytes.",
            "Of these (n - 1) / n leave the device.",
        ),
        because="The way back costs the same, and backward both again: four in a layer and step.",
    ),
}
