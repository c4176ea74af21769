"""What is mapped over stages sends nothing over them, and gradients of weights are summed over their copies once."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.hlo.records import read_hlo
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.replicas import stack_replicas, unstack_replicas
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.shards import on_shards
from meshwright.mesh import MeshShape

NEXT = [(0, 1), (1, 0)]


def differentiated(loss, shape, *arrays):
    """The gradients of a loss of arrays and specs, and how often it moves something over which axes."""
    mesh = build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in arrays]
        step = jax.jit(jax.grad(loss, tuple(range(len(arrays))))).lower(*placed).compile()
        found = jax.tree.map(np.asarray, step(*placed))
    moves, hardware = Counter(), f"cpu:{shape.num_devices}"
    for move in read_hlo(step.as_text() or "", shape.layout, hardware=hardware).collectives:
        moves[move.kind, move.axes] += move.count
    return found, moves


@pytest.mark.parametrize("wrapped", [lambda layer: layer, jax.checkpoint])
def test_a_function_on_shards_of_stages_moves_nothing_over_them(wrapped):
    shape = MeshShape(pp=2, sp=2)
    stage = ShardingContext(shape, is_stage=True)

    def layer(scale, x):
        # Each half of the sequence with the other half added.
        both = on_shards(lambda x: x + lax.ppermute(x, "sp", NEXT), stage, in_specs=(P("sp"),), out_specs=P("sp"))
        return scale * both(x)

    def loss(scale, x):
        return jnp.sum(jax.vmap(wrapped(layer))(scale, x) ** 2)

    scale, x = np.float32([2, 3]), np.arange(8, dtype=np.float32).reshape(2, 4)
    (of_scale, of_x), moves = differentiated(loss, shape, (scale, P("pp")), (x, P("pp", "sp")))
    both = x + np.roll(x, 2, axis=1)
    np.testing.assert_allclose(of_scale, 2 * scale * np.sum(both**2, axis=1))
    np.testing.assert_allclose(of_x, 4 * scale[:, None] ** 2 * both)
    assert {axes for _, axes in moves} == {("sp",)}


def test_gradients_of_weights_are_summed_over_their_copies_once():
    shape = MeshShape(pp=2, dp=2)
    stage = ShardingContext(shape, is_stage=True)

    def loss(weights, x):
        rows = stack_replicas(jax.reshard(weights, P("pp", None, reduced={"dp"})), 1)

        def layer(rows, x):
            return x @ unstack_replicas(rows, P(None, reduced={"dp"}), stage)

        def tick(total, x):
            return total + jnp.sum(jax.vmap(layer)(rows, x) ** 2), None

        return lax.scan(tick, jnp.zeros(()), x)[0]

    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = np.random.default_rng(0).normal(size=(5, 2, 4, 3)).astype(np.float32)
    (of_weights, _), moves = differentiated(loss, shape, (weights, P("pp")), (x, P(None, "pp", "dp")))
    wanted = 2 * np.einsum("tpbd,tpb->pd", x, np.einsum("tpbd,pd->tpb", x, weights))
    np.testing.assert_allclose(of_weights, wanted, rtol=1e-5)
    assert moves["all-reduce", ("dp",)] == 1
