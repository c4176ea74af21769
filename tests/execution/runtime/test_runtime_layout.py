"""Meshes on devices and without, and where values lie on them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AbstractMesh, AxisType

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.rules import local_parameter_shape
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.arrays import abstract, initialise, shardings
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import LAYOUT, MeshShape

MODEL = replace(PRESETS["tiny"], embed=64, mlp=64, num_layers=1)
SHAPE = MeshShape(dp=2, fsdp=2, tp=2)


def abstract_mesh(shape):
    return AbstractMesh(tuple(shape.layout.values()), tuple(shape.layout), axis_types=(AxisType.Explicit,) * 6)


def test_a_mesh_has_every_axis_explicit_outermost_first_and_neighbours_differ_in_tp():
    mesh = build_mesh(SHAPE)
    assert mesh.axis_names == LAYOUT
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert mesh.shape == SHAPE.layout
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 2, 2)
    np.testing.assert_array_equal(ids[:, :, 1] - ids[:, :, 0], 1)


def test_a_mesh_for_other_devices_than_there_are_is_told():
    with pytest.raises(MeshwrightError, match="mesh tp=16 needs 16 devices; there are 8"):
        build_mesh(MeshShape(tp=16))
    with pytest.warns(UserWarning, match="mesh tp=4 takes the first 4 of 8 devices"):
        assert [*build_mesh(MeshShape(tp=4)).devices.flat] == jax.devices()[:4]


def test_an_abstract_mesh_types_values_without_devices():
    """A mesh of more devices than there are: shapes, dtypes and shardings come out all the same."""
    shape = MeshShape(fsdp=16, tp=8)
    mesh = abstract_mesh(shape)
    values = abstract(parameters(MODEL), mesh, ShardingContext(shape), "f32")
    declared = dict(leaves(parameters(MODEL)))
    for path, value in leaves(values):
        parameter = declared[path]
        assert value.sharding.shard_shape(value.shape) == local_parameter_shape(parameter, mesh=shape), path
    with jax.sharding.use_abstract_mesh(mesh):
        made = jax.eval_shape(lambda w: jnp.einsum("ldf->df", w), values["layers"]["gate"])
    assert made.sharding.spec == P("fsdp", "tp")


def test_parameters_lie_as_the_rules_say():
    mesh, layout = build_mesh(SHAPE), ShardingContext(SHAPE)
    with jax.set_mesh(mesh):
        params = initialise(parameters(MODEL), jax.random.key(0), mesh, layout, "f32")
    declared = dict(leaves(parameters(MODEL)))
    for path, array in leaves(params):
        parameter = declared[path]
        local = local_parameter_shape(parameter, mesh=SHAPE)
        assert {shard.data.shape for shard in array.addressable_shards} == {local}, path


def test_a_parameter_starts_with_its_declared_spread():
    with jax.set_mesh(build_mesh(SHAPE)):
        params = initialise(parameters(MODEL), jax.random.key(0), build_mesh(SHAPE), ShardingContext(SHAPE), "f32")
    assert float(params["layers"]["gate"].std()) == pytest.approx(1 / 8, rel=0.05)
    assert (np.asarray(params["final_norm"]) == 1).all()


def test_a_degree_that_does_not_divide_a_parameter_is_told_with_its_path():
    shape = MeshShape(tp=3)
    with pytest.raises(MeshwrightError, match="tp=3 cannot split vocab=256 of embedding"):
        shardings(parameters(MODEL), abstract_mesh(shape), ShardingContext(shape))


def test_axes_of_degree_1_are_left_out_of_specs():
    assert ShardingContext(MeshShape(tp=2)).spec("batch", "residual_sequence", "activation") == P(None, ("tp",), None)


@pytest.mark.parametrize("names", [("embed", "mlp"), ("mlp", "embed")])
def test_a_weight_is_gathered_for_use_and_its_gradient_summed_onto_its_shards(names):
    """Each device adds its own number to the gradient: the sum over dp and fsdp must come back on the shards."""
    layout, mesh = ShardingContext(SHAPE), build_mesh(SHAPE)
    with jax.set_mesh(mesh):
        stored = jax.device_put(np.arange(64.0).reshape(8, 8), layout.spec(*names))
        x = jax.device_put(np.random.default_rng(0).normal(size=(8, 8)), layout.spec("batch", "activation"))

        def total(stored):
            used = layout.weight(stored, *names)
            assert jax.typeof(used).sharding.spec.partitions[names.index("embed")] is None
            return jnp.einsum("bd,df->bf" if names[0] == "embed" else "bd,fd->bf", x, used).sum()

        gradient = jax.jit(jax.grad(total))(stored)
    wanted = np.broadcast_to(np.asarray(x).sum(0), (8, 8))
    np.testing.assert_allclose(gradient, wanted.T if names[0] == "embed" else wanted, rtol=1e-5)
    assert gradient.sharding == stored.sharding
