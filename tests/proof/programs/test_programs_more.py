"""Five more programs: data parallel, their gradients' sums and flops are those compiled, and they compute the same."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from zoo_more import PROGRAMS

import meshwright as mw
from meshwright.proof.program_plans.plan import ProgramPlan


@pytest.fixture(autouse=True)
def _of_other_people():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def data_parallel(name: str) -> ProgramPlan:
    step, args = PROGRAMS[name]()
    plan = mw.plan(step, *args, on="cpu:8", num_compiled=0)
    best = next(
        one for one in plan.candidates if one.layout and [a.name for a in one.layout.axes if a.degree > 1] == ["dp"]
    )
    return replace(plan, candidates=(best,))


@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_and_flops_are_the_compiled_ones(name):
    """The logits of all images with all texts are moved in the compiler's own way, as those of `two_towers`."""
    plan = data_parallel(name)
    program = mw.inspect(plan.apply().lower(), mesh=plan.mesh)
    ours, theirs = (
        sum(move.bytes for move in one.collectives if move.kind == "all-reduce") for one in (plan.predicted, program)
    )
    assert ours == theirs or name == "image_text"
    assert plan.predicted.flops == pytest.approx(program.flops, rel=0.012)


ROWS = {"gan": {16, 32}, "actor_critic": {16, 128}}
"""The sizes that data parallelism splits: of the batch, and of what is made of it elsewhere in the program."""


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_take_the_batch_s_place_are_split_like_it(name):
    plan = data_parallel(name)
    split = [each for each in plan.classes if each.name in plan.table]
    assert {each.size for each in split} == ROWS[name]
    assert sum(bool(each.members) for each in split) == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_planned_step_computes_the_same(name):
    step, args = PROGRAMS[name]()
    leaves, structure = jax.tree.flatten(args)

    def fill(leaf, key):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return key
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.randint(key, leaf.shape, 0, 8).astype(leaf.dtype)
        return jnp.abs(0.1 * jax.random.normal(key, leaf.shape, leaf.dtype))

    def made():
        keys = jax.random.split(jax.random.key(0), len(leaves))
        return jax.tree.unflatten(structure, [fill(*one) for one in zip(leaves, keys, strict=True)])

    found, expected = data_parallel(name).apply()(*made()), step(*made())
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(ours.dtype, jnp.inexact):
            assert jnp.allclose(ours, theirs, rtol=2e-3, atol=2e-3), (ours.shape, jnp.abs(ours - theirs).max())
