"""Of small programs on four devices of a TPU, every layout that is searched is compiled: the plan's is the fastest."""

import jax
import jax.numpy as jnp
import pytest
import zoo
from zoo import Built, floats, trained

import meshwright as mw
from meshwright.proof.program_plans.plan import compiled_candidate


@pytest.fixture(autouse=True)
def _of_other_people():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def mlp(batch=2048, width=1024) -> Built:
    params = {"up": floats(width, 4 * width), "down": floats(4 * width, width)}

    def mlp_loss(params, x, y):
        return ((jax.nn.gelu(x @ params["up"]) @ params["down"] - y) ** 2).mean()

    return trained(mlp_loss, params, floats(batch, width), floats(batch, width))


def attention(batch=16, length=512, width=512, heads=8) -> Built:
    size = width // heads
    params = {**{name: floats(width, heads, size) for name in "qkv"}, "o": floats(heads, size, width)}

    def attention_loss(params, x):
        query, key, value = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in "qkv")
        chances = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", query, key) / size**0.5)
        return ((x + jnp.einsum("bhqs,bshk,hkd->bqd", chances, value, params["o"])) ** 2).mean()

    return trained(attention_loss, params, floats(batch, length, width))


PROGRAMS = {
    "mlp": mlp,
    "attention": attention,
    "lstm": lambda: zoo.lstm(1024, 256, 8),
    "conv_dense": lambda: zoo.conv_dense(128, 512, 16, 8192),
    "two_towers": lambda: zoo.two_towers(256, 8192, 65536, 65536),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_layout_is_faster_than_the_plan(name):
    """Dozens of layouts each; a layout takes the compiler ten seconds or so."""
    step, args = PROGRAMS[name]()
    plan = mw.plan(step, *args, on="v5e:2x2")
    every = [
        one if one.compiled else compiled_candidate(one, plan.program, plan.classes, plan.system)
        for one in plan.candidates
    ]
    seconds = [one.seconds for one in every if one.fits and one.seconds is not None]
    assert len(seconds) == len(every)
    assert plan.best.seconds is not None
    assert plan.best.seconds <= 1.01 * min(seconds)
