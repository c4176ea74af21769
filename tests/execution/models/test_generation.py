"""Decoding from a cache, however it is split: the same tokens as without one, and no more slots than are read."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.description.step.serving import Serving
from meshwright.execution.models.generation.cache import abstract_caches
from meshwright.execution.models.generation.generate import decode_layout
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.mesh import MeshShape
from meshwright.planning.cost.kv_cache import token_cache_bytes
from meshwright.planning.cost.serving_seconds import moves_fewer_weights

GOLDENS = Path(__file__).parents[2] / "references"
# One row cannot be split by rows: its slots are, and windows are rings that go round over devices.
CASES = [
    ("gemma3_text", "1,1,4,2"),
    pytest.param("gemma2", "1,8,1,1", marks=pytest.mark.matrix),
    pytest.param("mistral", "2,2,2,1", marks=pytest.mark.matrix),
    pytest.param("qwen3_moe", "ep=2,fsdp=2,tp=2", marks=pytest.mark.matrix),
    pytest.param("gpt2", "1,1,4,2", marks=pytest.mark.matrix),
    pytest.param("deepseek_v3", "2,2,2,1", marks=pytest.mark.matrix),
    pytest.param("deepseek_v2", "fsdp=2,tp=4", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_single_rows_continue_as_transformers_does(family, mesh):
    model, golden = mw.load(GOLDENS / family, on="cpu:8", mesh=mesh), np.load(GOLDENS / family / "golden.npz")
    for row in (int(np.argmin(golden["lengths"])), int(np.argmax(golden["lengths"]))):
        prompt = golden["tokens"][row, : golden["lengths"][row]].tolist()
        wanted = golden["continuations"][row].tolist()
        assert model.generate(prompt, max_tokens=len(wanted))[0].tokens == tuple(wanted)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", "fsdp=4,tp=2"),
        pytest.param("gemma3_text", "dp=2,fsdp=4", marks=pytest.mark.matrix),
        pytest.param("gpt2", "fsdp=8", marks=pytest.mark.matrix),
    ],
)
def test_prompts_of_many_tokens_gather_weights_and_continue_as_on_one_device(family, mesh):
    """Split by rows over fsdp; of few tokens activations are moved instead."""
    one, model = (mw.load(GOLDENS / family, on=on, mesh=over) for on, over in (("cpu:1", "1,1,1,1"), ("cpu:8", mesh)))
    shape, generator = model.mesh_shape, np.random.default_rng(0)
    assert moves_fewer_weights(model.config, shape, prompts=8, length=40)
    assert not moves_fewer_weights(model.config, shape, prompts=8, length=1)
    prompts = [generator.integers(3, model.config.vocab, length).tolist() for length in (40, 31, 38, 5, 40, 17, 22, 9)]
    texts, wanted = (each.generate(prompts, max_tokens=4) for each in (model, one))
    assert [text.tokens for text in texts] == [text.tokens for text in wanted]


def test_a_model_with_fewer_layers_than_repeat_continues_as_its_logits_say():
    """Gemma 3 repeats every third layer here; its first two have a window, and no cache of whole texts."""
    whole = mw.load(GOLDENS / "gemma3_text", on="cpu:1")
    params = {**whole.params, "layers": jax.tree.map(lambda leaf: leaf[:2], whole.params["layers"])}
    model = replace(whole, config=replace(whole.config, num_layers=2), params=params)
    tokens = list(range(3, 13))
    for _ in range(4):
        tokens.append(int(np.argmax(model.logits([tokens])[0][-1])))
    assert model.generate(tokens[:10], max_tokens=4)[0].tokens == tuple(tokens[10:])


def test_layers_with_a_window_have_slots_for_it_alone():
    model, shape = mw.load(GOLDENS / "gemma3_text", on="cpu:1").config, MeshShape(fsdp=2, tp=2)
    with jax.set_mesh(build_mesh(shape, jax.devices()[:4])):
        found = [
            [leaf.shape for leaf in abstract_caches(model, decode_layout(model, shape, split), 4, 64, jnp.float32)[n]]
            for split in ("heads", "sequence")
            for n in (0, 1)
        ]
    before, size = (4, model.num_kv_heads), model.head_dim
    windowed, full = (4, *before, 6, size), (1, *before, 64, size)
    assert found == [[windowed] * 2, [full] * 2] * 2


def test_a_cache_of_latents_has_what_the_plan_counts_of_a_token():
    model, shape = mw.load(GOLDENS / "deepseek_v3", on="cpu:1").config, MeshShape(fsdp=2, tp=2)
    serving = Serving(model=model, prompt_len=32, output_len=32, kv_dtype="f32")
    with jax.set_mesh(build_mesh(shape, jax.devices()[:4])):
        (cache,) = abstract_caches(model, decode_layout(model, shape, "batch"), 4, 64, jnp.float32)
    assert sum(leaf.size * 4 for leaf in cache) == 4 * 64 * token_cache_bytes(serving)
    assert cache.key.sharding.spec[1] == ("fsdp", "tp")


@pytest.mark.parametrize(
    ("family", "method"),
    [("mistral", "ring"), *(pytest.param("llama", one, marks=pytest.mark.matrix) for one in ("ring", "ulysses"))],
)
def test_prompts_are_read_by_the_sequence_method_that_is_said(family, method):
    """The continuations are transformers'; with a ring, no device has the keys of a whole prompt."""
    model, golden = (
        mw.load(GOLDENS / family, on="cpu:8", mesh="tp=2,sp=2,fsdp=2"),
        np.load(GOLDENS / family / "golden.npz"),
    )
    prompts = [golden["tokens"][row, :length].tolist() for row, length in enumerate(golden["lengths"])]
    texts = model.generate(prompts, max_tokens=golden["continuations"].shape[1], sp_method=method)
    assert [text.tokens for text in texts] == [tuple(row) for row in golden["continuations"].tolist()]
    with pytest.raises(mw.MeshwrightError, match="sp_method has no effect"):
        mw.load(GOLDENS / family, on="cpu:8", mesh="fsdp=8").generate(prompts, sp_method=method)
