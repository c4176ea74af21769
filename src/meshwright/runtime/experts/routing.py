"""Routing of tokens to experts, and the load balance of experts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Routing(NamedTuple):
    """The experts chosen for each token, and the weight of each in the result: [..., choices] both."""

    chosen: Array
    shares: Array


def route(logits: Array, num_active: int) -> Routing:
    """Choose the `num_active` experts with the highest router logits [..., experts], which are float32.

    Weights are a softmax over the chosen logits only, so that they sum to 1 (Mixtral, arXiv:2401.04088, section 2.1).
    """
    top, chosen = jax.lax.top_k(logits, num_active)
    return Routing(chosen, jax.nn.softmax(top, axis=-1))


class Load(NamedTuple):
    """Sums over tokens for each expert [..., experts] in float32, over all devices or those of one device.

    copies: tokens that chose the expert. dropped: those beyond its capacity. probability: router softmax over all
    experts.
    """

    copies: Array
    dropped: Array
    probability: Array

    @property
    def balance_loss(self) -> Array:
        """Load balancing loss, 1 where experts are equally loaded (Switch, arXiv:2101.03961, section 2.2).

        The number of experts times the sum over experts of the fraction of copies x the mean probability; averaged over
        layers. Gradients flow through the probability.
        """
        shares = [part / jnp.sum(part, axis=-1, keepdims=True) for part in (self.copies, self.probability)]
        return self.copies.shape[-1] * jnp.mean(jnp.sum(shares[0] * shares[1], axis=-1))

    @property
    def max_over_mean(self) -> Array:
        """Copies of the busiest expert of any layer over the mean."""
        return jnp.max(jnp.max(self.copies, axis=-1) / jnp.mean(self.copies, axis=-1))

    @property
    def dropped_share(self) -> Array:
        """Fraction of copies that no expert processed."""
        return jnp.sum(self.dropped) / jnp.sum(self.copies)

    @property
    def metrics(self) -> dict[str, Array]:
        """The metrics of a step, by name."""
        return {
            "experts_balance_loss": self.balance_loss,
            "experts_max_over_mean": self.max_over_mean,
            "experts_dropped_share": self.dropped_share,
        }


def probabilities(logits: Array) -> Array:
    """Router probabilities [experts] summed over the tokens of `logits` [..., experts]."""
    return jnp.sum(jax.nn.softmax(logits, axis=-1).reshape(-1, logits.shape[-1]), axis=0)
