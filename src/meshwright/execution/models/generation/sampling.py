"""Choose the next token from logits, with penalties, temperature, top-k, top-p and min-p of each row.

The order is that of transformers: penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.support.field_types import check_fields


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of one text are chosen.

    Args:
        temperature: 0 always takes the likeliest token; 1 samples from the model's own distribution.
        top_k: only the k likeliest tokens can be chosen; 0 for all.
        top_p: only the likeliest tokens whose probabilities together reach top_p can be chosen (arXiv:1904.09751).
        min_p: only tokens at least min_p times as likely as the likeliest can be chosen (arXiv:2407.01082).
        repetition_penalty: divides positive logits of tokens that the text already has, and multiplies negative ones
          (arXiv:1909.05858).
        presence_penalty: subtracted from the logit of a token that was generated before; the prompt does not count.
        frequency_penalty: subtracted from the logit of a token once for each time it was generated
          (https://platform.openai.com/docs/api-reference/completions/create).
        seed: seed of this text's random numbers, which are the same in any batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        limits = {
            "temperature": (0 <= self.temperature < float("inf"), "a number from 0"),
            "top_k": (0 <= self.top_k < 2**31, "a whole number from 0, where 0 takes all tokens, to 2147483647"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "a number above 0, where 1 is none"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "from -2 to 2, where 0 is none"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "from -2 to 2, where 0 is none"),
            "seed": (0 <= self.seed < 2**32, "a whole number from 0 to 4294967295"),
        }
        for name, (holds, wanted) in limits.items():
            if not holds:
                raise MeshwrightError(f"{name} is {getattr(self, name)}; it is {wanted}")


class Samplers(NamedTuple):
    """The `Sampling` of all rows as arrays [rows]; None for a field that is neutral in every row."""

    temperature: Array | None
    top_k: Array | None
    top_p: Array | None
    min_p: Array | None
    repetition_penalty: Array | None
    presence_penalty: Array | None
    frequency_penalty: Array | None
    seed: Array


class Written(NamedTuple):
    """The tokens that each row's text has so far, which penalties read; a field is None if no penalty reads it.

    seen: whether the text, with its prompt, has each token of the vocabulary [rows, vocab]. made: how often each token
    was generated [rows, vocab].
    """

    seen: Array | None = None
    made: Array | None = None


def likeliest_of(seed: Array) -> Samplers:
    """Return samplers with which all rows take the likeliest token. seed: [rows]."""
    return Samplers(None, None, None, None, None, None, None, seed)


def written_before(samplers: Samplers, prompts: Sequence[np.ndarray], vocab: int) -> Written:
    """Return the `Written` of texts that have only their prompts; a field is None if no row's penalties read it."""
    seen = made = None
    if samplers.repetition_penalty is not None:
        seen = jnp.asarray(np.stack([np.isin(np.arange(vocab), prompt) for prompt in prompts]))
    if samplers.presence_penalty is not None or samplers.frequency_penalty is not None:
        made = jnp.zeros((len(prompts), vocab), jnp.int32)
    return Written(seen, made)


def with_chosen(written: Written, chosen: Array) -> Written:
    """Return `written` with one more generated token of each row, `chosen` [rows]."""
    rows = jnp.arange(chosen.shape[0])
    return Written(
        None if written.seen is None else written.seen.at[rows, chosen].set(True),
        None if written.made is None else written.made.at[rows, chosen].add(1),
    )


GREEDY = Sampling()
"""Always takes the likeliest token; every other field has its neutral value."""


def samplers_of(rows: Sequence[Sampling]) -> Samplers:
    """Return the samplings of all rows as arrays."""

    def column(name: str) -> Any:
        values = [getattr(row, name) for row in rows]
        dtype = np.int32 if name == "top_k" else np.uint32 if name == "seed" else np.float32
        is_used = name == "seed" or any(value != getattr(GREEDY, name) for value in values)
        return jnp.asarray(values, dtype) if is_used else None

    return Samplers(*(column(name) for name in Samplers._fields))


def choose(scores: Array, rows: Samplers, written: Written, step: Array) -> Array:
    """Return the next token of each row [rows], chosen from float32 logits [rows, vocab], which may be sharded.

    Args:
        rows: the sampling of each row.
        written: the tokens that the rows have so far.
        step: the number of tokens generated before, a scalar or [rows]. A row's seed and step determine its random
          numbers.
    """
    if rows == likeliest_of(rows.seed):
        return _likeliest(scores)
    scores = _penalised(jax.reshard(scores, P()), rows, written)
    likeliest = jnp.argmax(scores, axis=-1)
    if rows.temperature is None:
        return likeliest
    temperature, is_greedy = rows.temperature, rows.temperature == 0

    def draw() -> Array:
        kept = _apply_limits(scores / jnp.where(is_greedy, 1.0, temperature)[:, None], rows)
        steps = jnp.broadcast_to(step, rows.seed.shape)
        keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(rows.seed, steps)
        return jnp.where(is_greedy, likeliest, jax.vmap(jax.random.categorical)(keys, kept))

    # If all rows are greedy, no vocabulary is sorted and no random numbers are drawn.
    return jax.lax.cond(jnp.all(is_greedy), lambda: likeliest, draw)


def _penalised(scores: Array, rows: Samplers, written: Written) -> Array:
    """Return the logits with the penalties for tokens that each text already has."""
    if rows.repetition_penalty is not None and written.seen is not None:
        penalty = rows.repetition_penalty[:, None]
        scores = jnp.where(written.seen, jnp.where(scores > 0, scores / penalty, scores * penalty), scores)
    if written.made is not None:
        if rows.presence_penalty is not None:
            scores -= rows.presence_penalty[:, None] * (written.made > 0).astype(scores.dtype)
        if rows.frequency_penalty is not None:
            scores -= rows.frequency_penalty[:, None] * written.made.astype(scores.dtype)
    return scores


def _likeliest(scores: Array) -> Array:
    """Return each row's likeliest token [rows], the first of equal ones.

    If the vocab is split, each device finds the likeliest token of its part, and only these candidates are gathered.
    """
    spec: Any = jax.typeof(scores).sharding.spec
    if spec[1] is None:
        return jnp.argmax(scores, axis=-1)

    def local(scores: Array) -> Array:
        own = jnp.argmax(scores, axis=-1)
        best = jnp.take_along_axis(scores, own[:, None], axis=-1)
        first = jax.lax.axis_index(spec[1]) * scores.shape[1]
        bests, tokens = (jax.lax.all_gather(part, spec[1], axis=1, tiled=True) for part in (best, first + own[:, None]))
        return jnp.take_along_axis(tokens, jnp.argmax(bests, axis=-1)[:, None], axis=-1)[:, 0]

    # JAX cannot infer that all devices along the vocab's axes pick the same token.
    return jax.shard_map(local, in_specs=spec, out_specs=P(spec[0]), check_vma=False)(scores)


def _apply_top_k_and_top_p(scores: Array, rows: Samplers) -> Array:
    """Return the logits [rows, vocab] with those of tokens excluded by top-k and top-p set to minus infinity."""
    ordered = jnp.sort(scores, axis=-1, descending=True)
    rank = jnp.arange(scores.shape[-1])[None]
    keep = jnp.ones_like(ordered, bool)
    if rows.top_k is not None:
        keep &= (rows.top_k[:, None] == 0) | (rank < rows.top_k[:, None])
    if rows.top_p is not None:
        shares = jax.nn.softmax(jnp.where(keep, ordered, -jnp.inf), axis=-1)
        # Keep a token while the likelier ones sum to less than p; always keep the first.
        keep &= (jnp.cumsum(shares, axis=-1) - shares < rows.top_p[:, None]) | (rank == 0)
    least = jnp.min(jnp.where(keep, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scores >= least, scores, -jnp.inf)


def _apply_limits(scores: Array, rows: Samplers) -> Array:
    """Return the logits [rows, vocab] with those of tokens excluded by top-k, top-p and min-p set to minus infinity."""
    limits = [rows.top_k != 0] if rows.top_k is not None else []
    limits += [rows.top_p < 1] if rows.top_p is not None else []
    if limits:
        # Sorting the vocabulary is the slowest part here.
        is_limited = jnp.any(jnp.stack(limits))
        scores = jax.lax.cond(is_limited, lambda: _apply_top_k_and_top_p(scores, rows), lambda: scores)
    if rows.min_p is not None:
        shares = jax.nn.softmax(scores, axis=-1)
        scores = jnp.where(shares >= rows.min_p[:, None] * shares.max(axis=-1, keepdims=True), scores, -jnp.inf)
    return scores
