"""One weight for queries, keys and values: heads are found in it, and split where they are the leading part."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import floats

import meshwright as mw

WIDTH, HEADS = 32, 4


@pytest.fixture(autouse=True)
def _of_other_people():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def threes_first(x, weight):
    found = (x @ weight).reshape(*x.shape[:2], 3, HEADS, -1)
    return found[:, :, 0], found[:, :, 1], found[:, :, 2]


def cut_in_three(x, weight):
    return (one.reshape(*x.shape[:2], HEADS, -1) for one in jnp.split(x @ weight, 3, -1))


def heads_first(x, weight):
    found = (x @ weight).reshape(*x.shape[:2], HEADS, 3, -1)
    return found[..., 0, :], found[..., 1, :], found[..., 2, :]


def heads_then_cut(x, weight):
    return jnp.split((x @ weight).reshape(*x.shape[:2], HEADS, -1), 3, -1)


def step_of(fused):
    """A step of gradient descent of attention with one weight for queries, keys and values."""

    def loss(params, x):
        query, key, value = fused(x, params["qkv"])
        chances = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
        return ((jnp.einsum("bhqk,bkhd->bqhd", chances, value).reshape(x.shape) @ params["o"]) ** 2).mean()

    return lambda params, x: jax.tree.map(lambda one, by: one - 0.1 * by, params, jax.grad(loss)(params, x))


@pytest.mark.parametrize(
    ("fused", "is_split"),
    [(threes_first, False), (cut_in_three, False), (heads_first, True), (heads_then_cut, True)],
)
def test_heads_of_a_fused_weight_are_one_class_and_a_weight_that_is_not_split_is_named(fused, is_split):
    params, x = {"qkv": floats(WIDTH, 3 * WIDTH), "o": floats(WIDTH, WIDTH)}, floats(2, 17, WIDTH)
    plan = mw.plan(step_of(fused), params, x, on="cpu:4", mesh="tp=4", num_compiled=0)
    heads = next(each for each in plan.classes if each.size == HEADS)
    assert f"params.qkv:1.{0 if is_split else 1}" in heads.members
    whole = (each for each in plan.candidates if each.layout and not each.layout.store)
    best = next(each for each in whole if each.layout.axes[0].atoms == (heads.atom,))
    draw = np.random.default_rng(0)
    params, x = jax.tree.map(lambda one: draw.standard_normal(one.shape, np.float32), (params, x))
    applied = replace(plan, candidates=(best,)).apply(jax.devices()[:4])
    (state, _), _ = applied.shardings
    assert state["qkv"].spec == (jax.P(None, "tp") if is_split else jax.P(None, None))
    assert np.allclose(applied(params, x)["qkv"], jax.jit(step_of(fused))(params, x)["qkv"], atol=1e-4)
    assert any(note.startswith("params.qkv:1 is whole on each device") for note in plan.notes) != is_split
