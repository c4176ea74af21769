"""A model of bytes with drawn parameters, as a run's is loaded."""

from dataclasses import replace

import jax

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.parameter_tree import parameters
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.execution.runtime.arrays import initialise
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.text.tokenizer import byte_tokenizer
from meshwright.mesh import MeshShape

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
