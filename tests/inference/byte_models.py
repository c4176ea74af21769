"""A model of bytes with drawn parameters, as a run's is loaded."""

from dataclasses import replace

import jax

from meshwright.families.registry import PRESETS
from meshwright.hardware.system import parse_system
from meshwright.inference.loaded import LoadedModel
from meshwright.mesh import MeshShape
from meshwright.runtime.arrays import initialise
from meshwright.runtime.mesh import build_mesh
from meshwright.runtime.sharding_context import ShardingContext
from meshwright.step.parameter_tree import parameters
from meshwright.text.tokenizer import byte_tokenizer

MODEL = replace(PRESETS["tiny"], num_layers=1)


def byte_model(*, seq_len):
    """The model on one device."""
    shape = MeshShape()
    mesh = build_mesh(shape, jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = initialise(parameters(MODEL), jax.random.key(0), mesh, ShardingContext(shape), "f32")
    return LoadedModel(
        config=MODEL, params=params, mesh=mesh, mesh_shape=shape, system=parse_system("cpu:1"), dtype="f32",
        stored_dtype="f32", tokenizer=byte_tokenizer(), source={}, seq_len=seq_len,
    )  # fmt: skip
