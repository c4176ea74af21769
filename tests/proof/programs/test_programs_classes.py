"""The classes of dims of other people's programs are those that an expert would name, scanned or not."""

import jax
import jax.numpy as jnp
import pytest
from foreign import TINY, make_state, tokens, train_step

from meshwright.proof.programs.classes import classes_of
from meshwright.proof.programs.trace import trace


@pytest.fixture(autouse=True)
def _of_other_people():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def abstract(function, *args):
    return jax.eval_shape(function, *args)


def table(function, *args):
    """Size and first member of each class that can be split."""
    return sorted((one.size, one.name) for one in classes_of(trace(function, *args)) if not one.barred)


BATCH, LENGTH, VOCAB, EMBED, HEADS, HEAD_DIM, MLP, _ = TINY
TRANSFORMER = [
    (HEADS, "q:2"), (HEAD_DIM, "q:3"), (HEAD_DIM, "v:3"), (BATCH, "batch"), (LENGTH + 1, "tokens:1"),
    (EMBED, "embed:1"), (MLP, "up:2"), (VOCAB, "embed:0"), (VOCAB, "out:1"), (LENGTH, "dim of 24"),
]  # fmt: skip


@pytest.mark.parametrize("scanned", [True, False])
def test_a_transformer_has_ten_classes_scanned_or_not(scanned):
    state = abstract(lambda key: make_state(key, scanned=scanned), jax.random.key(0))
    found = classes_of(trace(train_step, state, tokens()))
    assert sorted(one.size for one in found if not one.barred) == sorted(size for size, _ in TRANSFORMER)
    batch = next(one for one in found if one.name == "batch")
    assert batch.members == ("tokens:0",)
    # The MLP's is that of both its matrices, and of their moments.
    mlp = next(one for one in found if one.size == MLP)
    count = 1 if scanned else 2
    assert len(mlp.members) == 2 * 3 * count


def test_names_and_order_of_arguments_change_nothing():
    state = abstract(make_state, jax.random.key(0))
    named = {"other": jax.tree.map(lambda leaf: leaf, state)}
    one = [size for size, _ in table(train_step, state, tokens())]
    other = [size for size, _ in table(lambda rows, named: train_step(named["other"], rows), tokens(), named)]
    assert one == other


def test_state_is_what_a_function_takes_and_returns():
    state = abstract(make_state, jax.random.key(0))
    program = trace(train_step, state, tokens())
    found = program.state
    assert len(found) == len(jax.tree.leaves(state))
    assert all(
        program.arguments[one][0].split(".")[1:] == program.results[two][0].split(".")[1:] for one, two in found.items()
    )


def test_a_loop_s_dim_is_not_split_and_why_is_said():
    state = abstract(make_state, jax.random.key(0))
    barred = [one for one in classes_of(trace(train_step, state, tokens())) if one.barred]
    assert [one.size for one in barred] == [2]
    assert "one after the other" in str(barred[0])


def fused(weights, x):
    """Queries, keys and values of one matrix, split into three equal parts."""
    query, key, value = jnp.split(x @ weights, 3, axis=-1)
    return (query * key + value).sum()


def test_a_fused_weight_is_three_times_a_dim():
    found = classes_of(trace(fused, jnp.ones((8, 48)), jnp.ones((4, 8))))
    assert [(one.size, one.members) for one in found if "weights:1" in str(one.members)] == [
        (3, ("weights:1.0",)),
        (16, ("weights:1.1",)),
    ]


def test_rows_that_are_sorted_are_no_longer_those_of_the_batch():
    def routed(rows, weights):
        order = jnp.argsort(rows[:, 0])
        return jax.lax.ragged_dot(rows[order], weights, jnp.array([3, 5], jnp.int32))

    found = classes_of(trace(routed, jnp.ones((8, 6)), jnp.ones((2, 6, 4))))
    assert {one.name: one.barred for one in found}["batch"] == ""


def test_a_convolution_has_batch_and_channels():
    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    found = classes_of(trace(convolve, jnp.ones((4, 8, 8, 6)), jnp.ones((3, 3, 6, 10))))
    assert {one.members for one in found if len(one.members) > 1} == {("images:3", "kernel:2")}
    assert {one.name for one in found} >= {"batch", "kernel:3"}
