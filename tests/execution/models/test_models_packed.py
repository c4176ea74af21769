"""Packed documents: what is beside a document changes nothing of its loss, and no mesh changes anything."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.model import AttentionConfig, Experts, LearnedPositions
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.rules import rules_of
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.execution.models.decoder import loss_and_load
from meshwright.execution.models.ends import LossParts, mean_losses
from meshwright.execution.models.pipelined import staged_loss_and_load
from meshwright.execution.runtime.arrays import initialise
from meshwright.execution.runtime.attention.sequence import token_order
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape

SMALL = {"num_layers": 2, "embed": 64, "mlp": 64, "vocab": 64}
LLAMA = replace(PRESETS["tiny"], num_heads=8, num_kv_heads=4, head_dim=8, **SMALL)
MOE = replace(LLAMA, name="moe", experts=Experts(count=4, num_active=2, mlp=32, balance_weight=0.1))
GEMMA2 = PRESETS["tiny-gemma2"]
MODELS = {
    "llama": LLAMA,
    # Windows of 12 tokens in every second layer, and a cap of scores.
    "gemma2": replace(
        GEMMA2, attention=AttentionConfig(windows=(12, None)), scales=replace(GEMMA2.scales, embedding=8.0), **SMALL
    ),
    # Learned positions.
    "gpt2": replace(PRESETS["tiny-gpt2"], positions=LearnedPositions(rows=64), **SMALL),
    # Latent attention, and experts after a dense layer.
    "deepseek": replace(PRESETS["tiny-deepseek"], **SMALL),
    "moe": MOE,
    # Chunks of 12 tokens of a document in every second layer, and queries scaled by their position in the others.
    "chunked": replace(
        LLAMA,
        name="chunked",
        attention=AttentionConfig(windows=(12, None), is_chunked=True, qk_norm="rotated head, unscaled"),
        positions=replace(
            PRESETS["tiny-llama4"].positions, frequencies=PRESETS["tiny-llama4"].positions.frequencies[2:]
        ),
    ),
}

ROWS, LENGTH = 8, 32
LENGTHS = [(5, 20, 7), (32,), (1, 30), (16, 15), (11, 3, 10, 4), (31, 1), (2, 2, 2), (13, 14)]
"""The documents of each row, one after another; what is left of a row is padding."""

STRATEGIES = {
    "scores": DEFAULT,
    **{method: Strategy(attention="flash", sp_method=method) for method in ("gather", "ring", "ulysses")},
}


def packed(model, lengths=LENGTHS, seed=0):
    """A batch of documents with random tokens, every fourth target without a loss."""
    draw = np.random.default_rng(seed)
    shape = (len(lengths), LENGTH)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segments")}
    weights = np.zeros(shape, np.float32)
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents, start=1):
            text, here = draw.integers(0, model.vocab, length + 1), (row, slice(start, start + length))
            batch["tokens"][here], batch["targets"][here] = text[:-1], text[1:]
            batch["positions"][here], batch["segments"][here] = np.arange(length), number
            weights[here] = np.arange(length) % 4 != 3
            start += length
    return batch | {"weights": weights / weights.mean()}


def run(model, shape, strategy=DEFAULT, batch=None, *, remat="block", z_loss=0.0):
    """The loss, its parts and the gradients of a batch in float32, arrays whole and layers in their order."""
    mesh = build_mesh(shape, jax.devices()[: shape.num_devices])
    layout = ShardingContext(shape, rules_of(strategy))
    order = token_order(LENGTH, layout, strategy)
    batch = packed(model) if batch is None else batch
    batch = batch if order is None else {name: array[:, order] for name, array in batch.items()}
    with jax.set_mesh(mesh):
        params = initialise(parameters(model), jax.random.key(0), mesh, layout, "f32")
        placed = jax.device_put(batch, jax.NamedSharding(mesh, layout.spec("batch", "sequence")))
        program = compiled(model, shape, strategy, remat, z_loss)
        (value, parts), gradients = jax.block_until_ready(program(params, placed))
    return float(value), jax.tree.map(np.asarray, parts), jax.tree.map(np.asarray, gradients)


@cache
def compiled(model, shape, strategy, remat, z_loss):
    """The loss and gradients of parameters and a batch, compiled once for all batches of a shape."""
    loss, layout = staged_loss_and_load if shape.pp > 1 else loss_and_load, ShardingContext(shape, rules_of(strategy))

    def of(params, batch):
        return loss(params, batch, model, layout, dtype=jnp.float32, remat=remat, strategy=strategy, z_loss=z_loss)

    return jax.jit(jax.value_and_grad(of, has_aux=True))


@cache
def on_one_device(name):
    """The same on one device, by scores of whole sequences; once for each model."""
    return run(MODELS[name], MeshShape(), z_loss=1e-3)


def assert_equal(found, wanted):
    """Loss, its parts, and each gradient to 1e-5 of its norm."""
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1].means == pytest.approx(wanted[1].means, rel=1e-5)
    for (path, one), (_, other) in zip(leaves(found[2]), leaves(wanted[2]), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other) + 1e-7, path


def cases(*rows):
    """Models on meshes, by the names of models and of strategies."""
    return [pytest.param(*row, id=" ".join(map(str, row))) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "strategy"),
    cases(("llama", MeshShape(sp=2, tp=2), "ring"))
    + [
        pytest.param(*row.values, id=row.id, marks=pytest.mark.matrix)
        for row in cases(
            ("llama", MeshShape(), "scores"),
            ("llama", MeshShape(sp=2, tp=2), "ulysses"),
            ("gemma2", MeshShape(sp=2), "scores"),
            ("deepseek", MeshShape(sp=2), "ring"),
            ("moe", MeshShape(ep=2, sp=2), "ring"),
            *(("chunked", MeshShape(sp=2), strategy) for strategy in STRATEGIES),
        )
    ],
)
def test_a_document_loses_what_it_loses_alone(name, shape, strategy):
    """Each token of each document, packed with others and padding, or in a row of its own."""
    model, way = MODELS[name], STRATEGIES[strategy]
    together = packed(model)
    alone, places = unpacked(together)
    found, wanted = token_losses(model, shape, way, together), token_losses(model, shape, way, alone)
    for row, (there, start, length) in enumerate(places):
        np.testing.assert_allclose(found[there, start : start + length], wanted[row, :length], rtol=1e-5, atol=1e-5)
    # What is beside a document is in reach: without the documents' numbers it changes their losses.
    mixed = token_losses(model, shape, way, together | {"segments": np.ones_like(together["segments"])})
    assert np.abs(mixed - found).max() > 1e-2


def unpacked(batch):
    """Each document of a batch in a row of its own, from the row's start; and where it was: row, start and length.

    Rows are as many as several such batches have.
    """
    places = []
    for row, segments in enumerate(batch["segments"]):
        for number in range(1, segments.max() + 1):
            (here,) = np.nonzero(segments == number)
            places.append((row, here[0], len(here)))
    alone = {name: np.zeros((-(-len(places) // ROWS) * ROWS, LENGTH), array.dtype) for name, array in batch.items()}
    for row, (there, start, length) in enumerate(places):
        for name, array in batch.items():
            alone[name][row, :length] = array[there, start : start + length]
        alone["segments"][row, :length] = 1
    return alone, places


def token_losses(model, shape, strategy, batch):
    """The loss of each token [b, s] in text order: what the loss gains by more weight of it. ROWS rows at once."""
    mesh = build_mesh(shape, jax.devices()[: shape.num_devices])
    layout = ShardingContext(shape, rules_of(strategy))
    order = token_order(LENGTH, layout, strategy)
    order = np.arange(LENGTH) if order is None else order
    with jax.set_mesh(mesh):
        params = initialise(parameters(model), jax.random.key(0), mesh, layout, "f32")
        found = []
        for start in range(0, len(batch["tokens"]), ROWS):
            part = {name: array[start : start + ROWS, order] for name, array in batch.items()}
            placed = jax.device_put(part, jax.NamedSharding(mesh, layout.spec("batch", "sequence")))
            gains = np.asarray(weight_gradient(model, shape, strategy)(placed["weights"], params, placed))
            found.append((gains * gains.size)[:, np.argsort(order)])
    return np.concatenate(found)


@cache
def weight_gradient(model, shape, strategy):
    """The gradient of the loss by the weights of targets, compiled once for all batches."""
    layout = ShardingContext(shape, rules_of(strategy))

    def of(weights, params, batch):
        given = batch | {"weights": weights}
        return loss_and_load(params, given, model, layout, dtype=jnp.float32, remat="none", strategy=strategy)[0]

    return jax.jit(jax.grad(of))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_padding_is_no_load_and_takes_no_slot(capacity_factor):
    """Every copy of a token is counted, none of padding, and what stands as padding changes nothing."""
    model = replace(MOE, experts=replace(MOE.experts, capacity_factor=capacity_factor))
    batch = packed(model)
    is_padding = batch["segments"] == 0
    other = batch | {"tokens": np.where(is_padding, 7, batch["tokens"])}
    shape = MeshShape(ep=2, tp=2)
    found, changed = run(model, shape, batch=batch), run(model, shape, batch=other)
    assert found[1].load.copies.sum(axis=-1) == pytest.approx(2 * (~is_padding).sum())
    assert found[0] == pytest.approx(changed[0], rel=1e-6)
    assert found[1].load.dropped == pytest.approx(changed[1].load.dropped)
    assert (found[1].load.dropped.sum() > 0) == (capacity_factor is not None)


def test_the_parts_of_a_loss_are_weighted_means():
    """Cross-entropy and z-loss as NumPy has them in float64."""
    draw = np.random.default_rng(0)
    scores, targets = draw.normal(size=(2, 3, 5)), draw.integers(0, 5, (2, 3))
    weights = np.array([[0, 1, 2], [1.5, 1.5, 0]])
    batch = {"targets": jnp.asarray(targets), "weights": jnp.asarray(weights, jnp.float32)}
    normalizers = np.log(np.exp(scores).sum(axis=-1))
    losses = normalizers - np.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    found = mean_losses(jnp.asarray(scores, jnp.float32), batch, 0.25)
    wanted = [(weights * losses).mean(), 0.25 * (weights * normalizers**2).mean()]
    assert found == pytest.approx(wanted, rel=1e-6)
    assert LossParts(found).metrics["z_loss"] == found[1]
    assert mean_losses(jnp.asarray(scores, jnp.float32), batch) == pytest.approx(wanted[:1], rel=1e-6)
