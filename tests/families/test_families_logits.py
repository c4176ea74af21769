"""Each family that runs equals transformers' own implementation in float32, on weights that NumPy draws for both."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_weights import draw

from meshwright.families import model_from_hugging_face
from meshwright.mesh import MeshShape
from meshwright.models import embed, logits
from meshwright.models.context import position_info
from meshwright.models.decoder import layers
from meshwright.runtime import ShardingContext, build_mesh
from meshwright.step import Strategy, blocks, check_runnable

FILES = sorted((Path(__file__).parents[1] / "data" / "published_logits").glob("*.json"))


def our_logits(model, tokens, strategy):
    """The logits [b, s, vocab] of the drawn weights on one device."""
    params = {}
    for path, array in draw(model).items():
        stack, _, name = path.rpartition(".")
        (params.setdefault(stack, {}) if stack else params)[name] = jnp.asarray(array)
    layout = ShardingContext(MeshShape())
    with jax.set_mesh(build_mesh(MeshShape(), jax.devices()[:1])):

        @jax.jit
        def run(params, tokens):
            positions = position_info(jnp.arange(tokens.shape[1]), model)
            x, table = embed(params, tokens, positions, model, layout, jnp.float32)
            for stack in blocks.layers(model):
                x, _ = layers(stack, params[stack.name], x, positions, layout, "none", strategy)
            return logits(params, x, table, model, layout)

        return np.asarray(run(params, jnp.asarray(tokens)))


@pytest.mark.parametrize("attention", ["scores", "flash"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_family_computes_what_transformers_does(path, attention):
    data = json.loads(path.read_text())
    model, strategy = model_from_hugging_face(data["config"], name=path.stem), Strategy(attention=attention)
    if model.attention_softcap and attention == "flash":
        pytest.skip("a fused attention has no cap of scores")
    check_runnable(model, MeshShape(), strategy)
    found, wanted = our_logits(model, data["tokens"], strategy)[:, ::3], np.array(data["logits"])
    assert np.linalg.norm(found - wanted) <= 3e-6 * np.linalg.norm(wanted)
