"""Dims are followed through each kind of op: the rows of its result are those of its argument [rows, columns]."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.proof.programs.trace import trace

X = jax.ShapeDtypeStruct((8, 36), jnp.float32)


def of_one_device(function):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"))


def solved(x):
    matrices = x.reshape(8, 6, 6)
    return jax.lax.linalg.triangular_solve(jnp.linalg.cholesky(matrices), matrices)


KEEP_ROWS = {
    "stack": lambda x: jnp.stack([x, x + 1], 1),
    "unstack": lambda x: jnp.unstack(x, axis=1)[0],
    "tile": lambda x: jnp.tile(x, (1, 3)),
    "repeat": lambda x: jnp.repeat(x, 3, axis=1),
    "bitcast": lambda x: jax.lax.bitcast_convert_type(x, jnp.int32),
    "generic reduction": lambda x: jax.lax.reduce(x, 1.0, lambda one, other: one * other + one, (1,)),
    "fft": lambda x: jnp.fft.rfft(x),
    "cholesky and solve": solved,
    "svd": lambda x: jnp.linalg.svd(x.reshape(8, 6, 6))[1],
    "gradient of pooling": jax.grad(lambda x: (pooled(x) ** 2).sum()),
    "scatter max": lambda x: x.at[:, jnp.array([1, 2])].max(0.0),
    "scatter multiply": lambda x: x.at[:, jnp.array([1, 2])].multiply(2.0),
    "best of approximate": lambda x: jax.lax.approx_max_k(x, 2)[0],
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x, axis=1),
    "special function": lambda x: jax.scipy.special.zeta(x, x),
    "shard_map of one device": of_one_device(lambda x: x * 2),
}  # fmt: skip


def pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID")


@pytest.mark.parametrize("name", KEEP_ROWS)
def test_rows_stay_rows(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        program = trace(KEEP_ROWS[name], X)
    (_, given), (_, result) = program.arguments[0], program.results[0]
    assert program.dims.atoms(result[0]) == program.dims.atoms(given[0])


def test_a_shard_map_that_communicates_stays_as_it_is_written():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    summed = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    plan = mw.plan(lambda x: jnp.tanh(summed(x) @ x.T), X, on="cpu:8", num_compiled=0)
    assert any("shard_map" in note for note in plan.notes)


def test_a_shard_map_of_one_device_is_laid_out():
    step = mw.apply(of_one_device(lambda x: x @ x.T), {"batch": "dp"}, "dp=8", jnp.ones(X.shape))
    found = step(jnp.ones(X.shape))
    assert jnp.allclose(found, 36)
    assert len(found.sharding.device_set) == 8
