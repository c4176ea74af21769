"""The gated delta rule and its convolutions over split sequences: outputs, gradients and plan."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_runtime_delta import GROUP, HEADS, ROWS, VALUE, assert_close, drawn

import meshwright as mw
from meshwright.execution.runtime.attention.delta import DeltaInputs, causal_convolution, chunked_delta_rule
from meshwright.execution.runtime.attention.split_delta import (
    ids_with_before,
    part_order,
    split_delta_rule,
    values_before,
)
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.mesh import MeshShape

TAPS = 4


def documents(length, degree):
    """A row of one document; a row whose documents end at the end of a part, one token after it, and within chunks."""
    place, part = np.arange(length), length // degree
    ends = [part // 3, part, part + 1, 2 * part - 1, length - 5]
    return np.stack([0 * place + 7, np.searchsorted(ends, place, side="right") + 1]).astype(np.int32)


def whole(inputs, taps, ids=None):
    """The values' convolution and the rule on one device."""
    before = jnp.zeros((ROWS, TAPS - 1, HEADS, GROUP, VALUE))
    longer = None if ids is None else jnp.pad(ids, ((0, 0), (TAPS - 1, 0)), constant_values=-1)
    value = causal_convolution(inputs.value, taps, before, longer)
    return chunked_delta_rule(*inputs._replace(value=value), ids=ids)[0]


def in_parts(inputs, taps, ids, key_ids, *, order, axis):
    """The same on a device that has parts of the sequences."""
    parts = [x.reshape(ROWS, order.shape[1], -1, *x.shape[2:]) for x in inputs]
    (before,) = values_before([parts[2]], TAPS - 1, order, axis)
    rows = DeltaInputs(*(x.reshape(-1, *x.shape[2:]) for x in parts))
    longer = None if ids is None else ids_with_before(ids, key_ids, TAPS, order, axis)
    value = causal_convolution(rows.value, taps, before, None if longer is None else longer[:, 1:])
    ids = None if longer is None else longer[:, TAPS - 1 :]
    return split_delta_rule(rows._replace(value=value), order, axis, ids).reshape(inputs.value.shape)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("degree", "length", "is_zigzag"),
    [(2, 80, False), (2, 96, True), (4, 600, False), (8, 128, False), (8, 1280, True)],
)
def test_parts_of_a_sequence_are_the_whole(degree, length, is_zigzag, is_packed):
    """Parts of one chunk and of several, whole and cut, in order and in zigzag order."""
    inputs, draw = drawn(length), np.random.default_rng(3)
    # Slow decays: states of early parts reach the last.
    inputs = inputs._replace(decay=inputs.decay * np.float32(0.01))
    taps = draw.standard_normal((TAPS, HEADS, GROUP, VALUE), np.float32)
    weights = draw.standard_normal(inputs.value.shape, np.float32)
    ids = documents(length, degree) if is_packed else None
    order = part_order(degree, is_zigzag=is_zigzag)
    places = np.arange(length).reshape(order.size, -1)[order.ravel()].ravel()

    def loss(run, inputs, taps, *more):
        out = run(inputs, taps, *more)
        return jnp.sum(out * (weights[:, places] if run is split else weights)), out

    split = jax.shard_map(
        partial(in_parts, order=order, axis="sp"),
        in_specs=(P(None, "sp"), P(), P(None, "sp"), P()),
        out_specs=P(None, "sp"),
    )
    of = jax.jit(jax.value_and_grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
    (_, wanted), wanted_gradients = of(whole, inputs, taps, ids)
    stored = None if ids is None else ids[:, places]
    with jax.set_mesh(build_mesh(MeshShape(sp=degree), jax.devices()[:degree])):
        place = partial(jax.device_put, device=P(None, "sp"))
        here = DeltaInputs(*(place(x[:, places]) for x in inputs))
        (_, found), (gradients, of_taps) = of(split, here, taps, None if ids is None else place(stored), stored)
    assert_close(np.asarray(found), np.asarray(wanted)[:, places], 1e-5)
    assert_close(jax.tree.map(np.asarray, gradients), DeltaInputs(*(x[:, places] for x in wanted_gradients[0])), 2e-5)
    assert_close(np.asarray(of_taps), wanted_gradients[1], 2e-5)


def test_a_convolution_of_one_token_reads_none_of_the_part_before():
    (before,) = values_before([jnp.ones((3, 2, 4, 5))], 0, part_order(2, is_zigzag=True), "sp")
    assert before.shape == (6, 0, 5)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("sp=4", {"sp_method": "ring", "packed": True}),
        ("sp=2,tp=2", {"remat": "matmuls"}),
    ],
)
def test_parts_of_several_chunks_are_as_planned(mesh, options):
    """Rows of the kit have parts of one chunk."""
    found = mw.verify("tiny-qwen3.5", on="cpu:4", batch=4, seq_len=1024, mesh=mesh, **options)
    judged = [row for row in found.rows if row.unit in ("flop", "B") and not row.quantity.startswith("memory")]
    assert [row for row in judged if not row.is_equal] == []
    assert {"all-gather sp forward", "reduce-scatter sp backward", "collective-permute sp forward"} <= {
        row.quantity for row in judged
    }
