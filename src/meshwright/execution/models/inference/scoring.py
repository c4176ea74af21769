"""Score texts: the loss of each token, in windows if a text is long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError

Losses = Callable[[Sequence[Any]], list[np.ndarray]]
"""A function from texts, each as tokens [n], to the losses in nats [n - 1] of each text's tokens after the first."""

SHORTEST = 16
"""Texts are padded to a power of two, at least this, but not beyond the longest text, so that few programs compile."""

LOGITS = 1 << 26
"""Approximate number of logits of a batch on a device; they are the largest array of a forward pass."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The loss of a text.

    Args:
        tokens: number of predicted tokens: all but the first, which has no context.
        nats: sum of the losses of these tokens.
        num_bytes: number of UTF-8 bytes of the text of these tokens; None without a tokenizer.
    """

    tokens: int
    nats: float
    num_bytes: int | None

    @property
    def loss(self) -> float:
        """The mean loss per token in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """The total loss in bits per byte of text, which compares models with different tokenizers."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None


def total(scores: Sequence[Score]) -> Score:
    """Sum the scores of several texts."""
    sizes = [score.num_bytes for score in scores if score.num_bytes is not None]
    return Score(
        tokens=sum(score.tokens for score in scores),
        nats=math.fsum(score.nats for score in scores),
        num_bytes=sum(sizes) if len(sizes) == len(scores) else None,
    )


def text_losses(losses: Losses, texts: Sequence[np.ndarray], *, seq_len: int, stride: int) -> list[float]:
    """Return the total loss in nats of each text, predicted in windows; every token after the first counts once.

    Args:
        losses: computes the loss of each token of some texts.
        texts: the tokens [n] of each text.
        seq_len: input tokens of a window.
        stride: tokens from the start of a window to that of the next. In each window only the tokens that earlier
            windows did not predict count, so a smaller stride gives tokens more context.

    Raises:
        MeshwrightError: `stride` is not from 1 to `seq_len`.
    """
    if not 1 <= stride <= seq_len:
        raise MeshwrightError(f"stride is {stride}; it is from 1 to the {seq_len} tokens of a window")
    found = [
        (number, tokens[start : end + 1], fresh)
        for number, tokens in enumerate(texts)
        for start, end, fresh in windows(len(tokens) - 1, seq_len, stride)
    ]
    sums: list[list[float]] = [[] for _ in texts]
    for (number, _, fresh), each in zip(found, losses([window for _, window, _ in found]), strict=True):
        sums[number] += each[len(each) - fresh :].tolist()
    return [math.fsum(each) for each in sums]


def windows(count: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, num_new) of each window over `count` predictions; the last num_new are new in this window."""
    start, done = 0, 0
    while done < count:
        end = min(start + seq_len, count)
        yield start, end, end - done
        start, done = start + stride, end


def batches(
    texts: Sequence[np.ndarray], *, vocab: int, groups: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray, np.ndarray]]:
    """Yield batches of texts of similar length: indices of the texts, inputs [b, s], targets [b, s] and lengths [b].

    Rows after the last index are padding.

    groups: number of device groups that hold different rows; a batch has equally many rows for each group.
    """
    longest = max(len(text) for text in texts) - 1
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    while order:
        padded = min(max(SHORTEST, 1 << (len(texts[order[0]]) - 2).bit_length()), longest)
        wanted = 1 << (-(-len(order) // groups) - 1).bit_length()
        rows = groups * max(1, min(wanted, 32, LOGITS // (padded * vocab)))
        # Texts that would need much padding go to another batch.
        numbers = [number for number in order[:rows] if 2 * (len(texts[number]) - 1) > padded or padded <= SHORTEST]
        order = order[len(numbers) :]
        tokens = np.zeros((rows, padded + 1), np.int32)
        lengths = np.ones(rows, np.int32)
        for row, number in enumerate(numbers):
            tokens[row, : len(texts[number])] = texts[number]
            lengths[row] = len(texts[number]) - 1
        yield numbers, tokens[:, :-1], tokens[:, 1:], lengths
