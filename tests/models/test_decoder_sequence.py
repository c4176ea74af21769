"""The decoder over a split sequence: by every method the loss and the gradients of one device."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.mesh import parse_mesh
from meshwright.models import loss
from meshwright.parallel import Layout, build_mesh, initialise, order
from meshwright.workload import PRESETS, Strategy, leaves, parameters

MODEL = replace(PRESETS["tiny"], embed=64, mlp=128, num_heads=16, num_kv_heads=8, head_dim=8)
TEXT = np.random.default_rng(0).integers(0, MODEL.vocab, (8, 65))

MESHES = {
    "ring": ["1,1,1,2", "1,1,1,4", "1,1,1,8", "2,2,1,2", "1,1,2,4"],
    "ulysses": ["1,1,1,2", "1,1,1,4", "1,1,1,8", "2,2,1,2", "1,1,2,4"],
    "gather": ["1,1,1,4", "1,2,2,2"],
}


def loss_and_gradients(mesh_dim, strategy, *, remat="block", segments=None):
    """Loss and gradients of one batch in float32, the arrays whole."""
    num_devices = math.prod(int(degree) for degree in mesh_dim.split(","))
    shape = parse_mesh(mesh_dim, num_devices=num_devices)
    mesh, layout = build_mesh(shape, jax.devices()[:num_devices]), Layout(shape)
    batch = {"tokens": TEXT[:, :-1], "targets": TEXT[:, 1:]}
    positions = order(64, layout, strategy)
    if positions is not None:
        batch = {name: array[:, positions] for name, array in batch.items()}
        batch["positions"] = np.broadcast_to(positions.astype(np.int32), batch["tokens"].shape)
    with jax.set_mesh(mesh):
        params = initialise(parameters(MODEL), jax.random.key(0), mesh, layout, "f32")
        batch = {name: jax.device_put(array, layout.spec("batch", "sequence")) for name, array in batch.items()}
        step = jax.jit(
            jax.value_and_grad(
                lambda params, batch: loss(
                    params, batch, MODEL, layout, dtype=jnp.float32, remat=remat, strategy=strategy
                )
            )
        )
        value, gradients = jax.block_until_ready(step(params, batch))
    return float(value), jax.tree.map(np.asarray, gradients)


@pytest.fixture(scope="module")
def alone():
    """Loss and gradients on one device, by scores that go through memory."""
    return loss_and_gradients("1,1,1,1", Strategy())


@pytest.mark.parametrize(
    ("method", "mesh_dim"),
    [
        pytest.param(method, mesh_dim, marks=[pytest.mark.slow] if mesh_dim != meshes[-1] else [])
        for method, meshes in MESHES.items()
        for mesh_dim in meshes
    ],
)
def test_every_method_gives_the_loss_and_gradients_of_one_device(method, mesh_dim, alone):
    assert_same(loss_and_gradients(mesh_dim, Strategy(attention="flash", sequence=method)), alone)


def test_a_fused_attention_gives_those_of_scores(alone):
    assert_same(loss_and_gradients("1,1,1,1", Strategy(attention="flash")), alone)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "attention", "matmuls"])
def test_what_is_kept_for_backward_changes_no_gradient_of_a_ring(remat, alone):
    found = loss_and_gradients("1,2,2,2", Strategy(attention="flash", sequence="ring"), remat=remat)
    assert_same(found, alone)


def assert_same(found, wanted):
    """Loss to 1e-6, each gradient to 1e-5 of its norm."""
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for (path, one), (_, other) in zip(leaves(found[1]), leaves(wanted[1]), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other), path
