"""What the weights of a server stand for."""

import jax
import numpy as np

from meshwright.description.step.parameter_tree import leaves
from meshwright.execution.models.generation.generate import decode_layout
from meshwright.execution.models.quantised.scaled import as_declared, is_scaled


def plain_numbers(model):
    """All parameters by path, as numbers in float32."""
    context = decode_layout(model.config, model.mesh_shape)

    def in_f32(params):
        return jax.tree.map(lambda leaf: as_declared(leaf, context, np.float32), params, is_leaf=is_scaled)

    with jax.set_mesh(model.mesh):
        return {path: np.asarray(array) for path, array in leaves(jax.jit(in_f32)(model.params))}
