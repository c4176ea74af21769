"""Decoding with a cache against the whole forward pass, on every kind of mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.model import AttentionConfig, LearnedPositions, RotaryPositions
from meshwright.description.step.parameter_tree import parameters
from meshwright.execution.models.context import positions_of
from meshwright.execution.models.decoder import through_layers
from meshwright.execution.models.ends import embed, logits
from meshwright.execution.models.generation.generate import generate_tokens
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.execution.runtime.arrays import initialise
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape

MODEL = PRESETS["tiny"]
PROMPT = np.frombuffer(b"def main", np.uint8).astype(np.int32)


def greedy_without_cache(num_tokens, model=MODEL):
    """The likeliest continuation, the whole text read again for every token."""
    layout = ShardingContext(MeshShape())
    mesh = build_mesh(MeshShape(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = initialise(parameters(model), jax.random.key(0), mesh, layout, "f32")
        text = PROMPT
        for _ in range(num_tokens):
            tokens = jnp.asarray(text[None])
            positions = positions_of({"tokens": tokens}, model)
            x, table = embed(params, tokens, positions, model, layout, jnp.float32)
            x, _ = through_layers(params, tokens, x, positions, model, layout, "block")
            scores = logits(params, x, table, model, layout)
            text = np.append(text, int(scores[0, -1].argmax()))
    return text[len(PROMPT) :]


def sampled(mesh_shape, num_samples, model=MODEL, *, num_tokens, temperature, seed=0):
    """The tokens [steps, samples] drawn on a mesh."""
    mesh = build_mesh(mesh_shape, jax.devices()[: mesh_shape.num_devices])
    with jax.set_mesh(mesh):
        params = initialise(parameters(model), jax.random.key(0), mesh, ShardingContext(mesh_shape), "f32")
        sampling = [Sampling(temperature=temperature, seed=seed + number) for number in range(num_samples)]
        prompts = [PROMPT] * num_samples
        drawn = generate_tokens(
            params, prompts, model, mesh_shape, num_tokens=num_tokens, sampling=sampling, dtype=jnp.float32
        )
        return np.stack(list(drawn))


@pytest.fixture(scope="module")
def wanted():
    return greedy_without_cache(4)


@pytest.mark.parametrize(
    ("mesh_shape", "num_samples"),
    [
        (MeshShape(), 1),
        pytest.param(MeshShape(fsdp=2, tp=4), 1, marks=pytest.mark.matrix),
        pytest.param(MeshShape(dp=2, fsdp=2, tp=2), 4, marks=pytest.mark.matrix),
        pytest.param(MeshShape(tp=8), 2, marks=pytest.mark.matrix),
        (MeshShape(fsdp=4, sp=2), 1),
    ],
    ids=str,
)
def test_a_cache_gives_the_text_that_reading_everything_again_gives(mesh_shape, num_samples, wanted):
    found = sampled(mesh_shape, num_samples, num_tokens=4, temperature=0.0)
    for column in found.T:
        np.testing.assert_array_equal(column, wanted)


@pytest.mark.matrix
def test_what_is_drawn_depends_on_the_seed_alone():
    one, same, other = (sampled(MeshShape(tp=2), 2, num_tokens=12, temperature=1.0, seed=seed) for seed in (0, 0, 7))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


LOCAL, *_, GLOBAL = PRESETS["tiny-gemma3"].positions.frequencies
GEMMA3 = {
    "attention": AttentionConfig(windows=(4, 4, None), qk_norm="head"),
    "positions": RotaryPositions(frequencies=(LOCAL, LOCAL, GLOBAL)),
}


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        pytest.param("tiny-gemma2", {"attention": AttentionConfig(windows=(4, None))}, marks=pytest.mark.matrix),
        pytest.param("tiny-gemma3", GEMMA3, marks=pytest.mark.matrix),
        ("tiny-gpt2", {"positions": LearnedPositions(rows=12)}),
        pytest.param("tiny-qwen3", {}, marks=pytest.mark.matrix),
    ],
)
def test_a_cache_honours_windows_caps_and_learned_positions(preset, changes):
    model = replace(PRESETS[preset], **changes)
    found = sampled(MeshShape(fsdp=2, tp=2), 1, model, num_tokens=4, temperature=0.0)
    np.testing.assert_array_equal(found[:, 0], greedy_without_cache(4, model))
