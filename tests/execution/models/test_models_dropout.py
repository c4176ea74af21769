"""Dropout: what is dropped follows from seed, step, layer and token, and from nothing of the mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.errors import MeshwrightError
from meshwright.execution.models.dropout import (
    ATTENTION,
    MLP,
    DropoutRng,
    dropout,
    dropout_of_branch,
    dropout_of_weights,
    token_numbers,
)
from meshwright.execution.models.pipelined import microbatches
from meshwright.execution.runtime.attention.sequence import token_order
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape

B, S, D = 8, 16, 64
RING = Strategy(attention="flash", sp_method="ring")
STREAM = ("batch", "residual_sequence", "activation")
WEIGHTS = ("batch", "kv_heads", "group", "sequence", "activation")


def rng_of(layout, strategy=DEFAULT, key=0):
    """The draws of a batch [B, S]."""
    return DropoutRng(0.2, jax.random.key(key), token_numbers((B, S), layout, strategy))


def on(shape, make):
    """What `make` makes of a layout on a mesh, whole, and the program that XLA makes of it."""
    layout = ShardingContext(shape)
    with jax.set_mesh(build_mesh(shape, jax.devices()[: shape.num_devices])):
        run = jax.jit(lambda: make(layout)).lower().compile()
        return np.asarray(run()), run.as_text()


def stream(layout, strategy=DEFAULT, place=MLP, key=0):
    """Ones [B, S, D] as they join the stream."""
    return dropout(layout.place(jnp.ones((B, S, D)), *STREAM), rng_of(layout, strategy, key), layout, place)


def weights(layout):
    """Ones [B, 2, 2, S, S] as attention's weights."""
    return dropout_of_weights(layout.place(jnp.ones((B, 2, 2, S, S)), *WEIGHTS), rng_of(layout))


def columns_of_branch(layout, key=0):
    """Ones [B, S, D] as a branch reads the stream."""
    return dropout_of_branch(layout.place(jnp.ones((B, S, D)), *STREAM), rng_of(layout, key=key), 0.3, "query")


def rows_of_branch(layout):
    """Ones [B, S, D] as a branch reads what tp splits."""
    x = layout.place(jnp.ones((B, S, D)), "batch", "sequence", "mlp")
    return dropout_of_branch(x, rng_of(layout), 0.3, "down")


SPLIT = [MeshShape(dp=2, fsdp=2, tp=2), MeshShape(dp=2, sp=2, tp=2), MeshShape(sp=4)]


@pytest.mark.parametrize("make", [stream, weights, rows_of_branch, columns_of_branch])
@pytest.mark.parametrize("shape", SPLIT, ids=str)
def test_a_mesh_drops_what_one_device_does_and_sends_nothing(shape, make):
    found, program = on(shape, make)
    np.testing.assert_array_equal(found, on(MeshShape(), make)[0])
    assert not any(kind in program for kind in ("all-gather(", "all-reduce(", "all-to-all(", "collective-permute("))


def test_tokens_that_lie_otherwise_take_what_they_drop_with_them():
    shape = MeshShape(fsdp=2, sp=4)
    found, _ = on(shape, lambda layout: stream(layout, RING))
    lies = token_order(S, ShardingContext(shape), RING)
    assert list(lies) != list(range(S))
    np.testing.assert_array_equal(found, on(MeshShape(), stream)[0][:, lies])


def test_microbatches_drop_what_the_whole_batch_does():
    def parted(layout):
        parts = microbatches(token_numbers((B, S), layout, DEFAULT), 4, layout)
        return jnp.stack(
            [dropout(jnp.ones((2, S, D)), DropoutRng(0.2, jax.random.key(0), part), layout, MLP) for part in parts]
        )

    whole, _ = on(MeshShape(), stream)
    found, _ = on(MeshShape(), parted)
    np.testing.assert_array_equal(found.swapaxes(0, 1).reshape(B, S, D), whole)


@pytest.mark.parametrize("make", [stream, weights])
def test_as_much_is_dropped_as_said_and_the_rest_is_larger_by_as_much(make):
    found, _ = on(MeshShape(), make)
    assert set(np.unique(found)) == {np.float32(0), np.float32(1) / np.float32(0.8)}
    # Five standard deviations of the share of so many draws.
    assert abs((found == 0).mean() - 0.2) < 5 * np.sqrt(0.2 * 0.8 / found.size)


def test_every_step_place_token_and_head_draws_for_itself():
    whole, _ = on(MeshShape(), stream)
    others = [on(MeshShape(), partial(stream, **more))[0] for more in ({"place": ATTENTION}, {"key": 1})]
    heads, _ = on(MeshShape(), weights)
    rows = [*whole.reshape(-1, D), *(row for other in others for row in other.reshape(-1, D))]
    assert len({row.tobytes() for row in rows}) == len(rows)
    # Of 16 keys two rows in thousands are match_varying by chance.
    assert len({row.tobytes() for row in heads.reshape(B, 4, S * S).reshape(-1, S * S)}) == B * 4


def test_without_draws_nothing_is_dropped():
    layout, x = ShardingContext(MeshShape()), jnp.ones((B, S, D))
    assert dropout(x, None, layout, MLP) is x
    assert dropout_of_weights(x, None) is x


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_that_is_no_share_is_told(rate):
    with pytest.raises(MeshwrightError, match=f"dropout is {rate}; it takes a share from 0 to below 1"):
        Strategy(dropout=rate)


def test_each_branch_drops_its_share_and_another_one():
    query, down = (on(MeshShape(), make)[0] for make in (columns_of_branch, rows_of_branch))
    for found in (query, down):
        assert set(np.unique(found)) == {0, np.float32(1 / 0.7)}
        # 8,192 draws: the share has a standard deviation of 0.005.
        assert (found == 0).mean() == pytest.approx(0.3, abs=0.02)
        assert (found == 0).mean(axis=(0, 1)) == pytest.approx(0.3, abs=0.2)
    assert ((query == 0) & (down == 0)).mean() == pytest.approx(0.09, abs=0.015)
    of_next_step, _ = on(MeshShape(), lambda layout: columns_of_branch(layout, key=1))
    assert ((query == 0) & (of_next_step == 0)).mean() == pytest.approx(0.09, abs=0.015)
