"""Ring attention equals dense attention, sends what it should, and gives every device as much to do."""

import math
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.records import read_hlo
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.attention.blockwise import Keys
from meshwright.execution.runtime.attention.ring import ring_attention, zigzag
from meshwright.execution.runtime.attention.segments import Mask, Segments, any_visible, pairwise_mask
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.compile import compile_in_child
from meshwright.proof.compiler.program import CompileRequest
from meshwright.proof.simulate.schedule import simulate

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

BATCH, LENGTH, KV_HEADS, GROUPS, HEAD_DIM = 2, 256, 2, 2, 16
STARTS = np.array([0, 50, 130, 131])
SPLIT = P("dp", "sp")

MODEL = replace(PRESETS["tiny"], num_layers=1, num_heads=8, num_kv_heads=2, head_dim=128)

MASKS = {
    "causal": (Mask(), False),
    "window": (Mask(window=40), False),
    "packed": (Mask(), True),
    "packed with a window": (Mask(window=20), True),
    "every key": (Mask(causal=False), False),
    "a window to both sides": (Mask(causal=False, window=33), False),
    "chunks": (Mask(window=40, is_chunked=True), False),
}


def dense(query, keys, places, mask):
    """Attention with all scores at once."""
    scores = jnp.einsum("bskgh,btkh->bkgst", query, keys.key) / math.sqrt(HEAD_DIM)
    scores = jnp.where(pairwise_mask(places, keys.segments, mask)[:, None, None], scores, -jnp.inf)
    return jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores, axis=-1), keys.value)


def inputs(*, packed, dtype=jnp.float32):
    """Queries, keys with their places, and a gradient of the output."""
    shape = (BATCH, LENGTH, KV_HEADS)
    random = np.random.default_rng(0)
    draws = [random.standard_normal((*shape, GROUPS, HEAD_DIM), np.float32).astype(dtype) for _ in range(4)]
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))
    places = Segments(positions)
    if packed:
        segments = np.searchsorted(STARTS, positions, side="right") - 1
        places = Segments((positions - STARTS[segments]).astype(np.int32), segments.astype(np.int32))
    query, key, value, gradient = draws[0], draws[1][:, :, :, 0], draws[2][:, :, :, 0], draws[3]
    return query, Keys(key, value, places), gradient


def with_gradients(attend, query, keys, gradient):
    """Attention and the gradients of queries, keys and values."""
    output, back = jax.vjp(lambda q, k, v: attend(q, Keys(k, v, keys.segments)), query, keys.key, keys.value)
    return output, *back(gradient)


@partial(jax.jit, static_argnums=0)
def dense_with_gradients(mask, query, keys, gradient):
    """The same by all scores at once."""
    return with_gradients(lambda q, k: dense(q, k, k.segments, mask), query, keys, gradient)


def on_a_ring(degree, mask):
    """A mesh of up to 8 devices, and attention over shards of it along `sp`."""
    mesh = jax.make_mesh(
        (min(2, 8 // degree), degree), ("dp", "sp"), devices=jax.devices()[: min(2, 8 // degree) * degree]
    )
    attend = jax.shard_map(
        lambda query, keys: ring_attention(query, keys.segments, keys, "sp", mask),
        mesh=mesh,
        in_specs=(SPLIT, SPLIT),
        out_specs=SPLIT,
    )
    return mesh, jax.jit(lambda query, keys, gradient: with_gradients(attend, query, keys, gradient))


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        pytest.param(name, degree, marks=[] if degree == 4 or name == "packed with a window" else pytest.mark.matrix)
        for name in MASKS
        for degree in (1, 2, 4, 8)
    ],
)
def test_a_ring_in_zigzag_order_equals_dense_attention(name, degree):
    mask, packed = MASKS[name]
    query, keys, gradient = inputs(packed=packed)
    expected = dense_with_gradients(mask, query, keys, gradient)
    mesh, run = on_a_ring(degree, mask)
    order = zigzag(LENGTH, degree)
    split = [
        jax.tree.map(lambda x: jax.device_put(x[:, order], jax.NamedSharding(mesh, SPLIT)), tree)
        for tree in (query, keys, gradient)
    ]
    with jax.set_mesh(mesh):
        found = [np.asarray(x)[:, np.argsort(order)] for x in run(*split)]
    assert np.abs(found[0] - expected[0]).max() < 2e-6
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("name", MASKS)
def test_blockwise_attention_on_one_device_equals_dense_attention(name):
    mask, packed = MASKS[name]
    query, keys, gradient = inputs(packed=packed)
    expected = dense_with_gradients(mask, query, keys, gradient)
    ring = partial(with_gradients, lambda q, k: ring_attention(q, k.segments, k, None, mask))
    found = jax.jit(ring)(query, keys, gradient)
    assert np.abs(found[0] - expected[0]).max() < 2e-6
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


def lowered_ring(degree, dtype):
    """Causal attention over a ring, lowered."""
    query, keys, _ = inputs(packed=False, dtype=dtype)
    mesh = jax.make_mesh((degree,), ("sp",), devices=jax.devices()[:degree])
    split = P(None, "sp")
    attend = jax.shard_map(
        lambda query, keys: ring_attention(query, keys.segments, keys, "sp", Mask()),
        mesh=mesh,
        in_specs=(split, split),
        out_specs=split,
    )
    return jax.jit(attend).lower(
        *jax.tree.map(lambda x: jax.device_put(x, jax.NamedSharding(mesh, split)), (query, keys))
    )


@pytest.mark.parametrize("degree", [4, *(pytest.param(n, marks=pytest.mark.matrix) for n in (2, 8))])
def test_forward_keys_and_values_travel_one_time_less_than_there_are_devices(degree):
    text = lowered_ring(degree, jnp.float32).compile().as_text()
    moves = read_hlo(text, {"sp": degree}, hardware=f"cpu:{degree}").collectives
    assert {(move.kind, move.axes) for move in moves} == {("collective-permute", ("sp",))}
    sent = BATCH * LENGTH * (degree - 1) // degree
    of_keys, of_places = 2 * sent * KV_HEADS * HEAD_DIM * 4, sent * 4
    assert sum(move.bytes for move in moves) == of_keys + of_places


@pytest.mark.parametrize("degree", [3, 4, *(pytest.param(n, marks=pytest.mark.matrix) for n in (2, 8))])
def test_backward_gradients_travel_as_often_as_keys_and_values(degree):
    """Those in float32, these in their own dtype; a device's part of its own keys' gradients never leaves it."""
    mask, length = Mask(), 24 * degree
    query, keys, gradient = (jax.tree.map(lambda x: x[:, :length], tree) for tree in inputs(packed=False))
    mesh, run = on_a_ring(degree, mask)
    split = jax.tree.map(lambda x: jax.device_put(x, jax.NamedSharding(mesh, SPLIT)), (query, keys, gradient))
    text = run.lower(*split).compile().as_text()
    moves = read_hlo(text, dict(mesh.shape), hardware=f"cpu:{mesh.size}").collectives
    assert {(move.kind, move.axes) for move in moves} == {("collective-permute", ("sp",))}
    sent = BATCH // mesh.shape["dp"] * length * (degree - 1) // degree
    of_keys, of_places = 2 * sent * KV_HEADS * HEAD_DIM * 4, sent * 4
    # The compiler sees that two devices send the same forward and backward.
    passes = 1 if degree == 2 else 2
    assert sum(move.bytes for move in moves) == passes * (of_keys + of_places) + of_keys


def test_keys_and_values_travel_in_their_own_dtype():
    """As lowered: XLA's CPU compiler has no bfloat16 of its own and widens it."""
    lines = [line for line in lowered_ring(4, jnp.bfloat16).as_text().splitlines() if "collective_permute" in line]
    assert sorted(line.rsplit("x", 1)[1].rstrip(">") for line in lines) == ["bf16", "bf16", "i32"]


@pytest.mark.slow
@pytest.mark.matrix
def test_on_tpus_keys_and_values_travel_beside_the_work_of_a_kernel():
    """As scheduled for v5e: each send of theirs, and of gradients but for the last, which takes the sums home."""
    mesh = MeshShape(sp=4)
    workload = Workload(model=MODEL, batch=1, seq_len=8192, remat="none")
    arguments = {"workload": asdict(workload), "strategy": asdict(Strategy(attention="flash", sp_method="ring"))}
    program = compile_in_child(
        CompileRequest(function="sequence_methods:lower", hardware="v5e:2x2", mesh=mesh.layout, arguments=arguments)
    )
    module = parse_hlo(program.hlo)
    sends = [send for name in module.computations for send in kernels_beside_sends(module, name)]
    of_keys = [kernels for dtype, kernels in sends if dtype == "bf16"]
    of_gradients = [kernels for dtype, kernels in sends if dtype == "f32"]
    # One loop forward, and three sends backward; both of keys and of values.
    assert len(of_keys) == 2 * (1 + 3)
    assert all(of_keys)
    assert len(of_gradients) == 2 * 3
    assert sum(not kernels for kernels in of_gradients) <= 2
    schedule = simulate(module, mesh.layout, parse_system("v5e:2x2"))
    assert sum(schedule.exposed_by("axes").values()) < 0.1 * schedule.step_seconds


def kernels_beside_sends(module, computation):
    """For each send of a computation, its dtype and how many kernels stand between its start and its done."""
    order = list(module.computations[computation].instructions.values())
    for place, start in enumerate(order):
        if start.opcode == "collective-permute-start":
            rest = order[place + 1 :]
            done = next(i for i, x in enumerate(rest) if start.name in x.operands and x.opcode.endswith("-done"))
            kernels = sum("tpu_custom_call" in str(dict(x.attributes)) for x in rest[:done])
            yield next(start.shape.arrays()).dtype, kernels


def blocks_per_device(segments, degree, mask, *, block):
    """The number of unmasked blocks on each device for a sequence [1, length] sharded over `degree` devices."""
    tiles = np.asarray(segments.positions).reshape(-1, 1, block)
    visible = [[bool(any_visible(Segments(row), Segments(column), mask)) for column in tiles] for row in tiles]
    return np.reshape(visible, (degree, -1)).sum(axis=1)


def test_the_zigzag_order_gives_every_device_as_much_to_do():
    order = zigzag(4096, 8)
    balanced = blocks_per_device(Segments(order[None]), 8, Mask(), block=64)
    assert max(balanced) == min(balanced)
    in_order = blocks_per_device(Segments(np.arange(4096)[None]), 8, Mask(), block=64)
    assert sum(in_order) == sum(balanced)
    # The last device of a sequence in order has (2 P - 1) / P times the mean, as finely as blocks count it.
    assert max(in_order) / max(balanced) == pytest.approx(15 / 8, rel=0.01)


def test_the_zigzag_order_is_an_order():
    for degree in (1, 2, 4, 8):
        assert sorted(zigzag(64, degree)) == list(range(64))
    assert zigzag(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_a_length_that_cannot_be_cut_is_one_clear_error():
    with pytest.raises(MeshwrightError, match=r"12 % 8 = 4; use a multiple of 8"):
        zigzag(12, 4)
