"""Exercises on a Transformer's memory and step time."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.lessons.exercise import Exercise, Mistake, Number

GPT3 = PRESETS["gpt3-175b"]
_WEIGHTS = GPT3.num_layers * GPT3.embed**2  # of one matrix [embed, embed] in each layer

CHIPS, SEQUENCES, LENGTH, MFU = 64, 512, 8192, 0.5


def _states(bytes_of_each: float) -> float:
    return bytes_of_each * num_parameters(PRESETS["gpt2-xl"])


def _seconds(flops: float, mfu: float = MFU) -> float:
    """Return the step time of Llama 3 8B in seconds. flops: per parameter and token; 6 for a train step."""
    system = parse_system(f"v5p:{CHIPS}")
    return flops * num_parameters(PRESETS["llama3-8b"]) * SEQUENCES * LENGTH / (CHIPS * system.peak("bf16") * mfu)


EXERCISES: Mapping[str, Exercise] = {
    "parameters-of-gpt3": Number(
        question=(
            f"GPT-3 has {GPT3.num_layers} layers of width {GPT3.embed}, an MLP of 4 times that width, and a vocabulary"
            f" of {GPT3.vocab}. How many parameters?"
        ),
        answer=lambda: num_parameters(GPT3),
        mistakes=(
            Mistake(
                lambda: 4 * _WEIGHTS, "Those are the four matrices of attention; the MLP has two more, both larger."
            ),
            Mistake(lambda: 8 * _WEIGHTS, "Those are the MLPs; attention has four matrices in each layer."),
            Mistake(lambda: 16 * _WEIGHTS, "This MLP has two matrices and no gate."),
            Mistake(lambda: 9 * _WEIGHTS, "Attention has a query, a key, a value and an output matrix."),
        ),
        hints=(
            "Count the matrices of a layer, in units of width times width.",
            "Attention has 4 of them, and the MLP 2 of 4 times the size.",
            "12 times width squared for each layer, times the layers; embeddings are less than a hundredth of it here.",
        ),
        because="12·layers·width² for such a Transformer; vocabulary and norms hardly count at this size.",
    ),
    "bytes-of-adam": Number(
        question="GPT-2 XL trains with AdamW, all in float32: how many bytes are its weights, gradients and moments?",
        unit="B",
        answer=lambda: _states(16),
        mistakes=(
            Mistake(lambda: _states(12), "Gradients take as much as weights."),
            Mistake(lambda: _states(4), "Those are the weights alone."),
            Mistake(lambda: _states(8), "AdamW keeps two moments beside weights and gradients, each in float32."),
            Mistake(lambda: _states(2), "Those are weights in bf16."),
        ),
        hints=(
            "How many numbers are there for each parameter?",
            "A weight, a gradient and two moments, of 4 bytes each.",
            "The cell above prints the number of its parameters.",
        ),
        because="16 bytes a parameter, before any activation. A page that gives AdamW 4 has two moments in bf16.",
    ),
    "seconds-of-a-step": Number(
        question=(
            f"Llama 3 8B trains on {CHIPS} chips v5p with {SEQUENCES} sequences of {LENGTH} tokens a step, at an MFU of"
            f" {MFU:.0%}. Count 6 flops for each of all its parameters and each token, and no scores. How long is a"
            " step?"
        ),
        unit="s",
        answer=lambda: _seconds(6),
        mistakes=(
            Mistake(lambda: _seconds(2), "That is the forward pass. Backward has twice as much."),
            Mistake(lambda: _seconds(4), "That is the backward pass. Forward comes to it."),
            Mistake(lambda: _seconds(6, 1.0), "At an MFU of 50% half of the peak is used."),
            Mistake(lambda: _seconds(8), "MFU does not count what is recomputed: 6 flops a parameter and token."),
            Mistake(lambda: _seconds(6) * CHIPS, "All chips work at it together."),
        ),
        hints=(
            "How many flops has the step, and how many do all chips together do in a second?",
            "6 · parameters · tokens, over chips · peak · MFU.",
            "mw.chips('v5p') has the peak in bf16, and the cell above the number of parameters.",
        ),
        because="Scores of attention come on top; mw.plan counts them, and what does not reach the peak.",
    ),
}
