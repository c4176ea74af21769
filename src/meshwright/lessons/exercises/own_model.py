"""Exercises on your own model: choose a mesh, resume on another, serve."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from meshwright.description.families.registry import PRESETS
from meshwright.lessons.exercise import Choice, Exercise, Mistake, Number
from meshwright.planning.library import plan

SLICES = {4: "v5p:2x2x1", 8: "v5p:2x2x2", 16: "v5p:2x2x4", 32: "v5p:2x4x4", 64: "v5p:4x4x4"}
"""v5p slices by their number of chips."""

SEQUENCES, LENGTH = 16, 8192


@cache
def _fewest_chips() -> int:
    """Return the number of chips of the smallest slice on which training Llama 3 70B fits."""
    return next(
        chips for chips, on in SLICES.items() if plan("llama3-70b", on=on, batch=64, seq_len=LENGTH).predicted.fits
    )


def _cache(heads: int = 0, layers: int = 0, of_each: int = 2 * 2) -> int:
    """Return the bytes of Llama 3 8B's KV cache for `SEQUENCES` sequences of `LENGTH` tokens.

    heads, layers: 0 for the model's own numbers. of_each: bytes of one element of a key and one of a value; 4 in bf16.
    """
    model = PRESETS["llama3-8b"]
    each = (heads or model.num_kv_heads) * model.head_dim * of_each
    return (layers or model.num_layers) * each * SEQUENCES * LENGTH


EXERCISES: Mapping[str, Exercise] = {
    "smallest-slice": Number(
        question=(
            f"Llama 3 70B is to train with 64 sequences of {LENGTH} tokens a step. How many chips has the smallest of"
            f" {', '.join(SLICES.values())} on which it fits?"
        ),
        answer=_fewest_chips,
        mistakes=(
            Mistake(lambda: _fewest_chips() / 2, "mw.plan says DOES NOT FIT there: look at its memory."),
            Mistake(lambda: _fewest_chips() / 4, "Its weights fit. Moments, gradients and activations come to them."),
            Mistake(lambda: _fewest_chips() * 2, "It fits there, and on half of it too."),
        ),
        hints=(
            "mw.plan finds the best mesh of a slice, and plan.predicted.fits says whether it fits.",
            'mw.plan("llama3-70b", on=slice, batch=64, seq_len=8192).predicted, for each slice.',
            "The first whose predicted.fits is True.",
        ),
        because="More chips are faster; this is the fewest that hold it.",
    ),
    "what-a-checkpoint-has": Choice(
        question="A run on dp=2,fsdp=4 stopped. Why can it continue on fsdp=2,tp=4?",
        options={
            "a": "Each device reads the file that it wrote.",
            "b": "Weights and moments are saved as whole arrays in pieces; each device of the new mesh reads its part.",
            "c": "It cannot: tensor parallelism has other weights.",
            "d": "The weights are saved; the moments start anew.",
        },
        answer="b",
        replies={
            "a": "Its part is another one on the new mesh.",
            "c": "Tensor parallelism splits the same weights another way. The losses above agree.",
            "d": "Then the losses after the resume would differ from those of the run that went through.",
        },
        hints=(
            "Compare the losses of both runs above, to the last digit.",
            "What would a loss be after a resume without moments?",
            "Is a sharding a property of the array, or of where it lies now?",
        ),
        because="Who holds what is no property of a model: specs change, arrays stay.",
    ),
    "bytes-of-a-cache": Number(
        question=(
            f"Llama 3 8B serves {SEQUENCES} sequences of {LENGTH} tokens. How many bytes are their keys and values in"
            " bf16?"
        ),
        unit="B",
        answer=_cache,
        mistakes=(
            Mistake(lambda: _cache(of_each=2), "Keys and values are two arrays; or bf16 was taken for one byte."),
            Mistake(
                lambda: _cache(heads=PRESETS["llama3-8b"].num_heads),
                "Grouped-query attention: there are fewer heads of keys and values than of queries.",
            ),
            Mistake(lambda: _cache(layers=1), "Every layer has its own."),
            Mistake(lambda: _cache() // SEQUENCES, "That is one sequence."),
        ),
        hints=(
            "Which arrays does a token leave behind in each layer?",
            "A key and a value for each head of keys and values, of head_dim elements.",
            "2 · layers · kv_heads · head_dim · 2 bytes for each token; the plan's model has these numbers.",
        ),
        because="It is as much as the weights: long sequences, not parameters, fill the memory of a server.",
    ),
}
