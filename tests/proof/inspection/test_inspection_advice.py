"""Errors of JAX about shardings are answered with a line of code that works, and what JAX drops is told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

import meshwright
from meshwright.errors import MeshwrightError

EXPLICIT = jax.make_mesh((2, 4), ("data", "model"))
AUTO = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def array(shape, *spec, mesh=EXPLICIT):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def summed(x):
    return jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=EXPLICIT, in_specs=P("data"), out_specs=P())(x)


def matmul(a, b):
    return a @ b


CASES = {
    "case 3": (
        (matmul, array((8, 32), "data", "model"), array((32, 16), "model", None)),
        "case 3 .* over model, .*jnp.matmul",
        (lambda a, b: jnp.matmul(a, b, out_sharding=P(None, None))),
    ),
    "case 4": (
        (matmul, array((8, 32), "data", None), array((32, 16), None, "data")),
        "case 4 .* over data, .*a @ jax.reshard",
        (lambda a, b: a @ jax.reshard(b, P(None, None))),
    ),
    "broadcasting": (
        (jnp.add, array((8, 32), "data", None), array((8, 32), "model", None)),
        "bring one to the other's, as",
        (lambda a, b: a + jax.reshard(b, jax.typeof(a).sharding.spec)),
    ),
    "shard_map": (
        (summed, array((8, 8))),
        r"never split, .*: reshard it before, as f\(jax.reshard\(x, P\('data', None\)\)\)",
        (lambda x: summed(jax.reshard(x, P("data", None)))),
    ),
    "scalar": (
        (jax.jit(jnp.sum, out_shardings=NamedSharding(EXPLICIT, P(None))), array((8, 8))),
        r"NamedSharding\(mesh, P\(\)\)",
        jax.jit(jnp.sum, out_shardings=NamedSharding(EXPLICIT, P())),
    ),
    "gone": (
        (lambda x: jax.lax.all_gather_async(x, "data"), array((8, 8))),
        r"themselves: jax.lax.all_gather\(x, axis, tiled=True\)",
        jax.shard_map(
            lambda x: jax.lax.all_gather(x, "data", tiled=True),
            mesh=EXPLICIT, in_specs=P(None), out_specs=P(None), check_vma=False,
        ),
    ),
    "flat mesh": (
        (lambda x: x * len(Mesh(jax.devices(), ("data", "model")).shape), array((8, 8))),
        r"jax.make_mesh\(\(2, 4\), \('data', 'model'\)\)",
        (lambda x: x * len(jax.make_mesh((2, 4), ("data", "model")).shape)),
    ),
    "sort": (
        (lambda x: jnp.sort(x, axis=0), array((8, 8), "data")),
        "each device would sort its own part",
        (lambda x: jnp.sort(jax.reshard(x, P(None, None)), axis=0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "said", "right"), CASES.values(), ids=CASES)
def test_an_error_about_shardings_is_answered_with_what_works(call, said, right):
    with pytest.raises(MeshwrightError, match=said) as raised:
        meshwright.inspect(*call)
    assert "\n" not in str(raised.value)
    with jax.set_mesh(EXPLICIT):
        jax.eval_shape(right, *call[1:])


def test_a_device_put_inside_of_jit_is_told_to_do_nothing_and_its_mesh_is_found():
    def product(w):
        return jax.device_put(w, NamedSharding(AUTO, P(None, "dp"))) @ w.T

    for on in (None, "cpu:8"):
        report = meshwright.inspect(product, jnp.ones((64, 64)), on=on)
        (found,) = [found for found in report.findings if found.kind == "constraint without effect"]
        assert "to P(None, 'dp') is inside of jit, where JAX drops it" in found.evidence
        assert "with_sharding_constraint" in found.fix
        assert report.record.mesh == {"dp": 8}


def test_a_train_state_in_jits_shardings_goes_to_a_target():
    model = nn.Dense(512)
    x = array((64, 512), "dp", mesh=AUTO)
    params = model.init(jax.random.key(0), jnp.ones((2, 512)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
    whole = jax.tree.map(lambda _: NamedSharding(AUTO, P()), state)

    def step(state, x):
        gradients = jax.grad(lambda params: (state.apply_fn(params, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=gradients)

    jitted = jax.jit(step, in_shardings=(whole, x.sharding), out_shardings=whole)
    here, there = (meshwright.inspect(jitted, state, x, on=on) for on in (None, "cpu:8"))
    assert here.record.collectives == there.record.collectives
    assert [found.kind for found in there.findings] == ["not donated"]


def test_callbacks_and_a_mesh_that_nothing_uses_go_to_a_target():
    other = jax.make_mesh((2, 4), ("a", "b"))

    def function(x):
        assert other.shape["b"] == 4
        jax.experimental.io_callback(lambda x: None, None, x.sum(), ordered=True)
        x = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(AUTO, P()))

    report = meshwright.inspect(function, array((64, 32), "dp", mesh=AUTO), on="cpu:8")
    assert "all-gather" in {move.kind for move in report.collectives}


def test_an_error_of_several_lines_keeps_what_stands_after_its_colon():
    def function(x):
        raise ValueError("Mismatch details (1 found):\n  * the first\n  * the second\n  * the third")

    with pytest.raises(MeshwrightError, match=r"\(1 found\): \* the first \* the second .*advice.py:\d+\)$"):
        meshwright.inspect(function, jnp.ones(3))
