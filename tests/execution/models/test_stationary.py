"""Parameters in the form that a server's matmuls read."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.execution.models.generation import stationary
from meshwright.execution.models.generation.generate import decode_layout
from meshwright.execution.models.generation.stationary import for_server_products
from meshwright.execution.runtime.arrays import abstract
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.mesh import MeshShape


@pytest.mark.parametrize(
    ("platform", "wide"),
    [
        ("cpu", set()),
        ("gpu", set()),
        ("tpu", {"attention_norm", "mlp_norm", "router_bias", "final_norm"}),
    ],
)
def test_vectors_that_a_tpu_uses_in_float32_are_stored_so(platform, wide, monkeypatch):
    """Scales of norms and biases of routers, not biases of other matmuls or sinks."""
    monkeypatch.setattr(stationary, "mesh_platform", lambda: platform)
    model, shape = PRESETS["tiny-gpt-oss"], MeshShape(dp=4, tp=2)
    mesh = build_mesh(shape)
    with jax.set_mesh(mesh):
        stored = abstract(parameters(model), mesh, decode_layout(model, shape, "heads"), "bf16")
        found = for_server_products(stored, model)
    names = set()
    for stack, own in found.items():
        for layer in own if isinstance(own, tuple) else (own,):
            arrays = leaves(layer) if isinstance(layer, dict) else [(stack, layer)]
            names |= {name for name, array in arrays if array.dtype == jnp.float32}
    assert names == wide
