"""Attention over a split sequence equals attention on one device, by every method and under every mask."""

import math
from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.records import read_hlo
from meshwright.description.step.parameter_tree import parameters
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.arrays import abstract
from meshwright.execution.runtime.attention.segments import Mask, Segments, pairwise_mask
from meshwright.execution.runtime.attention.sequence import KEYS, QUERIES, TOKENS, LayerMask, attend
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.step import lower_train_step
from meshwright.mesh import MeshShape

BATCH, LENGTH, KV_HEADS, GROUPS, HEAD_DIM = 2, 128, 8, 2, 16
STARTS = np.array([0, 50, 90, 91])

MASKS = {
    "causal": (Mask(), False),
    "window": (Mask(window=40), False),
    "packed": (Mask(), True),
    "packed with a window": (Mask(window=20), True),
    "every key": (Mask(causal=False), False),
}

MESHES = {
    "gather": [MeshShape(dp=2, tp=2, sp=2), MeshShape(sp=8)],
    "ring": [MeshShape(tp=2, sp=4), MeshShape(fsdp=2, sp=4)],
    "ulysses": [MeshShape(tp=2, sp=4), MeshShape(sp=8)],
}


def dense(query, key, value, places, mask):
    """Attention with all scores at once."""
    scores = jnp.einsum("bskgh,btkh->bkgst", query, key) / math.sqrt(HEAD_DIM)
    scores = jnp.where(pairwise_mask(places, places, mask)[:, None, None], scores, -jnp.inf)
    return jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores, axis=-1), value)


@partial(jax.jit, static_argnums=0)
def dense_with_gradients(mask, arrays, places):
    """The same, and its gradients."""
    output, back = jax.vjp(lambda *arrays: dense(*arrays, places, mask), *arrays[:3])
    return output, *back(arrays[3])


def inputs(*, packed):
    """Queries, keys, values and a gradient of the output; and places, none where every row is one document."""
    shape = (BATCH, LENGTH, KV_HEADS)
    random = np.random.default_rng(0)
    draws = [random.standard_normal((*shape, GROUPS, HEAD_DIM), np.float32) for _ in range(4)]
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))
    segments = (np.searchsorted(STARTS, positions, side="right") - 1).astype(np.int32)
    places = Segments((positions - STARTS[segments]).astype(np.int32), segments) if packed else None
    return (draws[0], draws[1][:, :, :, 0], draws[2][:, :, :, 0], draws[3]), places


def sharded(shape, method, mask):
    """A jitted function to attention and its gradients on a mesh, and the arrays laid on it."""
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), ShardingContext(shape)

    @jax.jit
    def run(arrays, places):
        key_ids = None if places is None else layout.place(places.ids, "batch", "activation")

        def attention(query, key, value):
            return attend(query, key, value, layout, method=method, masks=[LayerMask(mask, places, key_ids)])

        output, back = jax.vjp(attention, *arrays[:3])
        return output, *back(arrays[3])

    def lay(arrays, places):
        specs = [layout.spec(*names) for names in (QUERIES, KEYS, KEYS, QUERIES)]
        laid = tuple(jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True))
        spec = jax.NamedSharding(mesh, layout.spec(*TOKENS))
        return laid, jax.tree.map(lambda x: jax.device_put(x, spec), places)

    return mesh, run, lay


@pytest.mark.parametrize(
    ("method", "shape", "name"),
    [
        pytest.param(
            method,
            shape,
            name,
            marks=[] if shape is shapes[0] or name == "packed with a window" else pytest.mark.matrix,
        )
        for method, shapes in MESHES.items()
        for shape in shapes
        for name in MASKS
    ],
    ids=str,
)
def test_every_method_equals_dense_attention(method, shape, name):
    mask, packed = MASKS[name]
    arrays, places = inputs(packed=packed)
    row = Segments(np.arange(LENGTH, dtype=np.int32)[None])
    expected = dense_with_gradients(mask, arrays, places or row)
    mesh, run, lay = sharded(shape, method, mask)
    with jax.set_mesh(mesh):
        found = [np.asarray(x) for x in run(*lay(arrays, places))]
    assert np.abs(found[0] - expected[0]).max() < 2e-6
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


def test_ulysses_moves_heads_alone():
    """q, k, v there and the output back, and backward as many: of each its local bytes, nothing else."""
    arrays, _ = inputs(packed=False)
    mesh, run, lay = sharded(MeshShape(sp=4), "ulysses", Mask())
    with jax.set_mesh(mesh):
        text = run.lower(*lay(arrays, None)).compile().as_text()
    moves = read_hlo(text, MeshShape(sp=4).layout, hardware="cpu:4").collectives
    local = 4 * BATCH * LENGTH // 4 * KV_HEADS * HEAD_DIM
    assert {move.kind for move in moves} == {"all-to-all"}
    assert sum(move.bytes for move in moves) == 2 * local * (2 * GROUPS + 2)


STEP = replace(PRESETS["tiny"], num_layers=2, embed=40, mlp=72, num_heads=8, num_kv_heads=4, head_dim=8, vocab=104)
TOKENS_OF_A_ROW = 48


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param(MeshShape(sp=4), marks=pytest.mark.matrix), MeshShape(fsdp=2, sp=2, tp=2)], ids=str
)
@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
def test_no_device_ever_has_the_stream_of_a_whole_sequence(method, mesh):
    """Of all arrays of a compiled step only those of heads, and places, may have all tokens of a row."""
    workload = Workload(model=STEP, batch=2, seq_len=TOKENS_OF_A_ROW, compute_dtype="f32")
    strategy = Strategy(attention="flash", sp_method=method)
    on = build_mesh(mesh, jax.devices()[: mesh.num_devices])
    lowered = lower_train_step(on, workload=asdict(workload), strategy=asdict(strategy))
    arrays = [x for each in parse_hlo(lowered.compile().as_text() or "").instructions() for x in each.shape.arrays()]
    wide = {STEP.embed, STEP.mlp, STEP.mlp // mesh.tp, STEP.vocab, STEP.vocab // mesh.tp}
    streams = {x.dims for x in arrays if wide.intersection(x.dims)}
    assert (2 // mesh.fsdp, TOKENS_OF_A_ROW // mesh.sp, STEP.embed) in streams
    assert not [dims for dims in streams if TOKENS_OF_A_ROW in dims]


def test_weights_are_stored_over_fsdp_and_sp_together():
    layout = ShardingContext(MeshShape(fsdp=2, sp=2))
    weights = jax.tree.leaves(abstract(parameters(STEP), build_mesh(layout.mesh, jax.devices()[:4]), layout, "f32"))
    # All but the scales of norms, which are whole everywhere.
    shares = {math.prod(x.shape) / math.prod(x.sharding.shard_shape(x.shape)) for x in weights if x.ndim > 2}
    assert shares == {4}


def test_kv_heads_that_ulysses_cannot_split_are_one_clear_error():
    arrays, _ = inputs(packed=False)
    mesh, run, lay = sharded(MeshShape(tp=2, sp=4), "ulysses", Mask())
    few = (arrays[0][:, :, :4], arrays[1][:, :, :4], arrays[2][:, :, :4], arrays[3][:, :, :4])
    with jax.set_mesh(mesh), pytest.raises(MeshwrightError, match=r"tp\*sp=8 cannot split kv_heads=4: 4 % 8 = 4"):
        run(*lay(few, None))
