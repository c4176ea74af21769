"""Routing of tokens to experts, and the load balance of experts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.layer import SOFTMAX_ROUTING, Routing


class Choice(NamedTuple):
    """The experts chosen for each token, and the weight of each expert's output: both [..., choices]."""

    chosen: Array
    shares: Array


def route(
    logits: Array,
    num_active: int,
    routing: Routing = SOFTMAX_ROUTING,
    choice_bias: Array | None = None,
    expert_scale: Array | None = None,
) -> Choice:
    """Return the `num_active` experts of each token, chosen by its float32 router logits [..., experts].

    Args:
        choice_bias: added to the scores [experts] for the choice, but not for the weights of the experts' outputs; None
            if `routing` has no bias.
        expert_scale: multiplies the weights [experts]; None if `routing` has no such scale.
    """
    if expert_scale is not None:
        choice = route(logits, num_active, routing, choice_bias)
        own = expert_scale.astype(choice.shares.dtype).at[choice.chosen].get(mode="clip")
        return choice._replace(shares=choice.shares * own)
    if routing.scores == "sparsemixer":
        return _mixed(logits, num_active, routing)
    if routing.scores == "softmax" and choice_bias is None and routing.num_groups == 1:
        # Top-k of logits equals top-k of the softmax; a softmax over the chosen logits is normalised (Mixtral,
        # arXiv:2401.04088).
        top, chosen = jax.lax.top_k(logits, num_active)
        if routing.is_normed:
            return Choice(chosen, _scaled(jax.nn.softmax(top, axis=-1), routing))
        return Choice(chosen, _scaled(jnp.exp(top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)), routing))
    scores = _scores(logits, routing)
    keys = jax.lax.stop_gradient(scores)
    if choice_bias is not None:
        keys += jax.lax.broadcast_to_rank(jax.lax.stop_gradient(choice_bias.astype(keys.dtype)), keys.ndim)
    _, chosen = jax.lax.top_k(_of_best_groups(keys, routing), num_active)
    shares = jnp.take_along_axis(scores, chosen, axis=-1)
    if routing.is_normed:
        # The sigmoids of all chosen experts may be 0.
        shares = shares / (jnp.sum(shares, axis=-1, keepdims=True) + 1e-20)
    return Choice(chosen, _scaled(shares, routing))


def _mixed(logits: Array, num_active: int, routing: Routing) -> Choice:
    """Return the choice of `sparsemixer`: an expert's weight is a softmax over the near ones not chosen before it.

    Training chooses the likeliest experts too, where the paper samples them.
    """
    _, chosen = jax.lax.top_k(logits, num_active)
    fixed, left, shares = jax.lax.stop_gradient(logits), logits, list[Array]()
    for number in range(num_active):
        own = chosen[..., number : number + 1]
        largest = jnp.take_along_axis(fixed, own, axis=-1)
        is_far = (largest - fixed) / jnp.maximum(jnp.abs(fixed), largest) > routing.tolerance
        near = jax.nn.softmax(jnp.where(is_far, -jnp.inf, left), axis=-1)
        shares.append(jnp.take_along_axis(near, own, axis=-1))
        left = jnp.where(jax.nn.one_hot(own[..., 0], logits.shape[-1], dtype=bool), -jnp.inf, left)
    return Choice(chosen, _scaled(jnp.concatenate(shares, axis=-1), routing))


def _scores(logits: Array, routing: Routing) -> Array:
    """Return the score of each expert for each token [..., experts]."""
    return jax.nn.sigmoid(logits) if routing.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def _scaled(shares: Array, routing: Routing) -> Array:
    return shares if routing.scale == 1 else shares * routing.scale


def _of_best_groups(keys: Array, routing: Routing) -> Array:
    """Return the scores `keys` [..., experts] with minus infinity for experts outside each token's best groups."""
    if routing.num_groups == 1:
        return keys
    grouped = keys.reshape(*keys.shape[:-1], routing.num_groups, -1)
    of_groups = jnp.sum(jax.lax.top_k(grouped, routing.group_score)[0], axis=-1)
    _, best = jax.lax.top_k(of_groups, routing.num_active_groups)
    is_best = jnp.any(jax.nn.one_hot(best, routing.num_groups, dtype=bool), axis=-2)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(keys.shape)


class ExpertLoad(NamedTuple):
    """Sums over the tokens of one device, or of all devices, for each expert [..., experts], in float32.

    copies: number of tokens that chose the expert. dropped: number of these beyond the expert's capacity. probability:
    sum of the expert's router scores, each divided by the sum of all experts' scores for the token.
    """

    copies: Array
    dropped: Array
    probability: Array

    @property
    def balance_loss(self) -> Array:
        """The load balancing loss, 1 if experts are equally loaded (Switch, arXiv:2101.03961, section 2.2).

        For a layer it is the number of experts times the sum, over experts, of fraction of copies * mean probability;
        layers are averaged. Gradients flow through the probability.
        """
        shares = [part / jnp.sum(part, axis=-1, keepdims=True) for part in (self.copies, self.probability)]
        return self.copies.shape[-1] * jnp.mean(jnp.sum(shares[0] * shares[1], axis=-1))

    @property
    def max_over_mean(self) -> Array:
        """Copies of a layer's busiest expert / mean of the layer's experts, for the layer where this is largest."""
        return jnp.max(jnp.max(self.copies, axis=-1) / jnp.mean(self.copies, axis=-1))

    @property
    def dropped_share(self) -> Array:
        """The fraction of copies that were dropped, 0 to 1, over all layers."""
        return jnp.sum(self.dropped) / jnp.sum(self.copies)

    @property
    def metrics(self) -> dict[str, Array]:
        """The metrics of a step, {name: scalar}."""
        return {
            "experts_balance_loss": self.balance_loss,
            "experts_max_over_mean": self.max_over_mean,
            "experts_dropped_share": self.dropped_share,
        }


def probabilities(logits: Array, routing: Routing = SOFTMAX_ROUTING, is_token: Array | None = None) -> Array:
    """Return router probabilities summed over tokens [experts], given router logits [..., experts].

    Scores other than a softmax are divided by their sum over experts (DeepSeek-V3, arXiv:2412.19437, equation 19).
    is_token: False for padding [...], which is left out; None if there is no padding.
    """
    scores = _scores(logits, routing)
    if routing.scores == "sigmoid":
        scores = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    if is_token is not None:
        scores = jnp.where(is_token[..., None], scores, 0.0)
    return jnp.sum(scores.reshape(-1, logits.shape[-1]), axis=0)
