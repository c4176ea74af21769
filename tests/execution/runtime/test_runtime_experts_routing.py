"""Which experts a router chooses and how much each counts, token by token, against the definition in loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.description.step.layer import Routing
from meshwright.description.step.model import Experts
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.experts.routing import probabilities, route

COUNT, ACTIVE = 8, 3
LOGITS = np.random.default_rng(0).normal(0, 2, (5, 7, COUNT)).astype(np.float32)
BIAS = np.random.default_rng(1).normal(0, 0.5, COUNT).astype(np.float32)

V3 = Routing(scores="sigmoid", has_choice_bias=True, num_groups=4, num_active_groups=2, group_score=2, scale=2.5)
ROUTINGS = [
    Routing(),
    Routing(is_normed=False, scale=3.0),
    Routing(num_groups=4, num_active_groups=2, is_normed=False, scale=16.0),
    Routing(scores="sigmoid", is_normed=False),
    Routing(scores="sparsemixer", tolerance=0.6, is_normed=False),
    Routing(scores="sparsemixer", tolerance=0.02, is_normed=False, scale=2.0),
    V3,
]


def by_definition(logits, routing):
    """The shares of all experts for one token, 0 of those not chosen."""
    if routing.scores == "sparsemixer":
        shares, left = np.zeros(COUNT), list(range(COUNT))
        for _ in range(ACTIVE):
            best = max(left, key=lambda expert: logits[expert])
            most = logits[best]
            near = [e for e in left if (most - logits[e]) / max(abs(logits[e]), most) <= routing.tolerance]
            shares[best] = routing.scale / np.sum(np.exp(logits[near] - most))
            left.remove(best)
        return shares
    scores = 1 / (1 + np.exp(-logits))
    if routing.scores == "softmax":
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    keys = scores + (BIAS if routing.has_choice_bias else 0)
    size = COUNT // routing.num_groups
    groups = [range(first, first + size) for first in range(0, COUNT, size)]
    groups.sort(key=lambda group: -sum(sorted(keys[list(group)])[-routing.group_score :]))
    allowed = [expert for group in groups[: routing.num_active_groups] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -keys[expert])[:ACTIVE]
    shares = np.zeros(COUNT)
    shares[chosen] = scores[chosen]
    return routing.scale * shares / (shares.sum() if routing.is_normed else 1)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_a_router_chooses_and_weighs_as_defined(routing):
    bias = jnp.asarray(BIAS) if routing.has_choice_bias else None
    choice = jax.jit(route, static_argnums=(1, 2))(jnp.asarray(LOGITS), ACTIVE, routing, bias)
    found = np.zeros_like(LOGITS)
    np.put_along_axis(found, np.asarray(choice.chosen), np.asarray(choice.shares), axis=-1)
    wanted = np.apply_along_axis(by_definition, -1, LOGITS, routing)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.sum(probabilities(jnp.asarray(LOGITS), routing)), 5 * 7, rtol=1e-5)


def test_the_bias_that_chooses_has_no_gradient():
    def weighed(logits, bias):
        choice = route(logits, ACTIVE, V3, bias)
        return jnp.sum(choice.shares * jnp.cos(choice.chosen))

    of_logits, of_bias = jax.jit(jax.grad(weighed, argnums=(0, 1)))(jnp.asarray(LOGITS), jnp.asarray(BIAS))
    assert np.abs(of_logits).max() > 0
    assert np.abs(of_bias).max() == 0


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(num_groups=3), "8 experts in num_groups=3 groups"),
        (
            Routing(num_groups=4, num_active_groups=1),
            "3 experts from num_active_groups=1 of 4 groups of 2; take",
        ),
        (Routing(num_groups=8, num_active_groups=4, group_score=2), "group_score=2 counts the best of a group of 1"),
    ],
    ids=str,
)
def test_groups_that_cannot_be_are_refused(routing, message):
    with pytest.raises(MeshwrightError, match=message):
        Experts(count=COUNT, num_active=ACTIVE, mlp=4, routing=routing)
