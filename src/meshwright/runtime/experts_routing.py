"""Which experts work on a token, and how evenly tokens are spread over them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Routing(NamedTuple):
    """The experts chosen for each token, and the share of each in its result: [..., choices] both."""

    chosen: Array
    shares: Array


def route(logits: Array, num_active: int) -> Routing:
    """The `num_active` experts with the highest of the router's `logits` [..., experts], which are float32.

    Their shares are a softmax over the chosen alone, so that they sum to 1 (Mixtral, arXiv:2401.04088, section 2.1).
    """
    top, chosen = jax.lax.top_k(logits, num_active)
    return Routing(chosen, jax.nn.softmax(top, axis=-1))


class Load(NamedTuple):
    """Sums over tokens for each expert [..., experts], in float32; over all devices, or those of one of them.

    copies: the tokens that chose it. dropped: those of them that it had no room for. probability: what the router gave
    it, of a softmax over all experts.
    """

    copies: Array
    dropped: Array
    probability: Array

    @property
    def balance_loss(self) -> Array:
        """What grows as tokens crowd on few experts, 1 where all have as many (Switch, arXiv:2101.03961, section 2.2).

        The number of experts times the sum over them of the share of copies and the mean probability; a mean over
        layers. Gradients flow through the probability.
        """
        shares = [part / jnp.sum(part, axis=-1, keepdims=True) for part in (self.copies, self.probability)]
        return self.copies.shape[-1] * jnp.mean(jnp.sum(shares[0] * shares[1], axis=-1))

    @property
    def max_over_mean(self) -> Array:
        """The copies of the busiest expert of any layer, over those that it would have in balance."""
        return jnp.max(jnp.max(self.copies, axis=-1) / jnp.mean(self.copies, axis=-1))

    @property
    def dropped_share(self) -> Array:
        """The share of copies that no expert worked on."""
        return jnp.sum(self.dropped) / jnp.sum(self.copies)

    @property
    def metrics(self) -> dict[str, Array]:
        """What a step reports of it, by name."""
        return {
            "experts_balance_loss": self.balance_loss,
            "experts_max_over_mean": self.max_over_mean,
            "experts_dropped_share": self.dropped_share,
        }


def probabilities(logits: Array) -> Array:
    """The probability of each expert [experts], summed over the tokens of `logits` [..., experts]."""
    return jnp.sum(jax.nn.softmax(logits, axis=-1).reshape(-1, logits.shape[-1]), axis=0)
