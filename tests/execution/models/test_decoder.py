"""The decoder against a plain one on one device; on every mesh it is held to that in `kit_rows.py`."""

import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.frequencies import Llama3RopeScaling
from meshwright.description.step.layer import Norm
from meshwright.description.step.model import rotary
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.execution.models.attention import attend
from meshwright.execution.models.decoder import loss_and_load
from meshwright.execution.models.dropout import DropoutRng
from meshwright.execution.models.norm import norm
from meshwright.execution.runtime.arrays import initialise
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape

MODEL = replace(PRESETS["tiny"], embed=64, mlp=128, num_heads=16)
TIED = replace(MODEL, tied_embeddings=True)
STRETCHED = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)
TEXT = np.random.default_rng(0).integers(0, MODEL.vocab, (8, 33))


def loss_and_gradients(model, shape):
    """Loss, gradients and parameters of one batch in float32, the arrays whole."""
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), ShardingContext(shape)
    with jax.set_mesh(mesh):
        params = initialise(parameters(model), jax.random.key(0), mesh, layout, "f32")
        place = layout.spec("batch", "sequence")
        batch = {"tokens": jax.device_put(TEXT[:, :-1], place), "targets": jax.device_put(TEXT[:, 1:], place)}
        step = jax.jit(
            jax.value_and_grad(
                lambda params: loss_and_load(params, batch, model, layout, dtype=jnp.float32, remat="block")[0]
            )
        )
        value, gradients = jax.block_until_ready(step(params))
    return float(value), jax.tree.map(np.asarray, gradients), jax.tree.map(np.asarray, params)


def assert_same(found, wanted):
    """Loss to 1e-6, each gradient to 1e-5 of its norm."""
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for (path, one), (_, other) in zip(leaves(found[1]), leaves(wanted[1]), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other), path


def plain_loss(params, tokens, targets, model):
    """The same decoder written out plainly: no scan, no sharding, kv heads repeated, rotation by complex numbers."""

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + model.norms.epsilon) * scale

    def turned(x):
        half = model.head_dim // 2
        (rotary,) = model.positions.frequencies
        frequency = 1 / rotary.theta ** (np.arange(half) / half)
        if rotary.scaling:
            wave = 2 * np.pi / frequency
            low, high = (16 / f for f in (1.0, 4.0))
            smooth = (16 / wave - 1.0) / (4.0 - 1.0)
            middle = (1 - smooth) * frequency / 8.0 + smooth * frequency
            frequency = np.where(wave > low, frequency / 8.0, np.where(wave < high, frequency, middle))
        turn = jnp.exp(1j * np.outer(np.arange(x.shape[1]), frequency))[None, :, None, :]
        both = (x[..., :half] + 1j * x[..., half:]) * turn
        return jnp.concatenate([both.real, both.imag], -1)

    b, s = tokens.shape
    x = params["embedding"][tokens]
    visible = np.tril(np.ones((s, s), bool))
    for i in range(model.num_layers):
        w = {name: array[i] for name, array in params["layers"].items()}
        h = norm(x, w["attention_norm"])
        query = (h @ w["query"].reshape(model.embed, -1)).reshape(b, s, model.num_heads, model.head_dim)
        key, value = (
            jnp.repeat((h @ w[n].reshape(model.embed, -1)).reshape(b, s, -1, model.head_dim), model.num_groups, 2)
            for n in ("key", "value")
        )
        scores = jnp.einsum("bshd,bthd->bhst", turned(query), turned(key)) / math.sqrt(model.head_dim)
        weights = jnp.where(visible, jnp.exp(scores), 0)
        mixed = jnp.einsum("bhst,bthd->bshd", weights / weights.sum(-1, keepdims=True), value)
        x = x + mixed.reshape(b, s, -1) @ w["output"].reshape(-1, model.embed)
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ w["up"])) @ w["down"]
    table = params["embedding"].T if model.tied_embeddings else params["unembedding"]
    scores = norm(x, params["final_norm"]) @ table
    chances = jnp.log(jnp.exp(scores).sum(-1)) - jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    return chances.mean()


@pytest.mark.parametrize(
    "model", [MODEL, TIED, replace(MODEL, positions=rotary(10_000.0, STRETCHED))], ids=["untied", "tied", "stretched"]
)
def test_the_decoder_computes_what_a_plain_one_does(model):
    found = loss_and_gradients(model, MeshShape())
    plain = jax.jit(jax.value_and_grad(lambda params: plain_loss(params, TEXT[:, :-1], TEXT[:, 1:], model)))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        value, gradients = plain(jax.tree.map(jnp.asarray, found[2]))
    assert_same(found, (float(value), jax.tree.map(np.asarray, gradients)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradients_of_a_norm_are_those_of_its_formula(dtype):
    rng = np.random.default_rng(0)
    x, by = (rng.normal(size=(2, 8, 64)).astype(dtype) for _ in range(2))
    scale = rng.uniform(size=64).astype(np.float32)

    op = Norm(name="norm", source="x", target="y", size=64)

    def plain(x, scale):
        wide = x.astype(jnp.float32)
        return (wide / jnp.sqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5) * scale[None, None, :]).astype(dtype)

    @partial(jax.jit, static_argnums=0)
    def gradients(function, x, scale, by):
        result, back = jax.vjp(function, x, scale)
        return (result, *back(by))

    ours, theirs = (gradients(each, x, scale, by) for each in (lambda x, scale: norm(x, op, scale), plain))
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.dtype == wanted.dtype
        difference = np.linalg.norm(np.asarray(found - wanted, np.float32))
        assert difference <= (1e-6 if dtype == jnp.float32 else 5e-3) * np.linalg.norm(np.asarray(wanted, np.float32))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_over_dims_that_devices_split_is_that_of_one_device(kind):
    """Over heads of which devices split the groups, as a server does over sp (OLMo 2), and the kv heads too."""
    rng = np.random.default_rng(0)
    dims = (("kv_heads", 4), ("group", 2), ("head_dim", 4))
    op = Norm(name="norm", source="x", target="y", size=32, dims=dims, kind=kind)
    x, scale = np.float32(rng.normal(size=(2, 3, 4, 2, 4))), np.float32(rng.uniform(size=(4, 2, 4)))
    wanted = jax.jit(norm, static_argnums=1)(x, op, scale)
    mesh = jax.make_mesh((2, 2), ("tp", "sp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        for split in (("tp", None, None), (None, "sp", None), ("tp", "sp", None)):
            on_mesh = jax.device_put(x, P(None, None, *split)), jax.device_put(scale, P(*split))
            found = jax.jit(norm, static_argnums=1)(on_mesh[0], op, on_mesh[1])
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_queries_in_chunks_attend_as_all_at_once(monkeypatch):
    """A sequence split over sp is cut into chunks that each have a share of every device's queries."""
    model = replace(MODEL, num_layers=1)
    whole = loss_and_gradients(model, MeshShape())
    monkeypatch.setattr("meshwright.execution.models.attention.num_query_chunks", lambda seq_len: 4)
    assert_same(loss_and_gradients(model, MeshShape()), whole)
    assert_same(loss_and_gradients(model, MeshShape(fsdp=2, tp=2, sp=2)), whole)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_halves_of_a_sequence_attend_as_all_at_once(rate, monkeypatch):
    """And drop the same weights, of which the first half has fewer; a quarter of the scores is never made."""
    rng = np.random.default_rng(0)
    query, key, value, by = (np.float32(rng.normal(size=(2, 32, 2, *g, 8))) for g in ((3,), (), (), (3,)))
    draws = DropoutRng(rate, jax.random.key(0), jnp.arange(64, dtype=jnp.uint32).reshape(2, 32)) if rate else None

    def lower():
        mixed = jax.value_and_grad(lambda *of: jnp.vdot(attend(*of, jnp.arange(32), draws), by), argnums=(0, 1, 2))
        return jax.jit(mixed).lower(query, key, value)

    with jax.set_mesh(build_mesh(MeshShape(), jax.devices()[:1])):
        halves = lower()
        monkeypatch.setattr("meshwright.execution.models.attention.can_halve_queries", lambda seq_len: False)
        whole = lower()
        results = [jax.tree.leaves(made.compile()(query, key, value)) for made in (halves, whole)]
    for found, wanted in zip(*results, strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)
    assert ["2x2x3x32x32x" in made.as_text() for made in (halves, whole)] == [False, True]


def test_masks_of_chunks_are_made_inside_their_loop():
    """JAX once made those of all chunks, layers apart, for every head: one byte for each of all scores."""
    key = jnp.ones((1, 2048, 1, 8))

    def layers(query):
        def layer(query, _):
            return attend(query, key, key, jnp.arange(2048)), None

        return jnp.sum(jax.lax.scan(layer, query, length=2)[0])

    with jax.set_mesh(build_mesh(MeshShape(), jax.devices()[:1])):
        jaxpr = str(jax.make_jaxpr(jax.grad(layers))(jnp.ones((1, 2048, 1, 2, 8))))
    assert set(re.findall(r"bool\[[\d,]*\]", jaxpr)) == {"bool[1024,2048]"}
