"""A pipeline equals one device in every schedule and beside every other axis, and sends and keeps what it should."""

import math
import re
from functools import cache

import numpy as np
import pytest
from pipelined_layers import (
    BATCH,
    EMBED,
    LENGTH,
    MLP,
    STREAM_BYTES,
    compiled_pipeline,
    in_slots,
    on_one_device,
    run_schedule,
)

from meshwright.compiled import read_hlo
from meshwright.cost.pipeline import Schedule
from meshwright.mesh import MeshShape

CASES = {
    # mesh, schedule, virtual stages, microbatches, layers: m = p and 4 p, layers that p v divides and others
    "gpipe": [
        (MeshShape(pp=2), 1, 2, 4),
        (MeshShape(pp=4), 1, 16, 7),
        (MeshShape(pp=8), 1, 8, 9),
        (MeshShape(pp=4, dp=2), 1, 4, 4),
        (MeshShape(pp=2, fsdp=2, tp=2), 1, 8, 5),
        (MeshShape(pp=2, tp=2), 2, 2, 4),
        (MeshShape(pp=4, fsdp=2), 2, 16, 9),
    ],
    "1f1b": [
        (MeshShape(pp=2), 1, 8, 4),
        (MeshShape(pp=4), 1, 4, 7),
        (MeshShape(pp=8), 1, 32, 9),
        (MeshShape(pp=4), 1, 2, 4),
        (MeshShape(pp=2, dp=4), 1, 8, 2),
        (MeshShape(pp=4, fsdp=2), 1, 16, 5),
        (MeshShape(pp=2, tp=4), 1, 2, 3),
        (MeshShape(pp=2, fsdp=2, tp=2), 1, 8, 4),
        (MeshShape(pp=2), 3, 8, 7),
        (MeshShape(pp=4, tp=2), 2, 4, 8),
    ],
}
TABLE = [
    pytest.param(kind, *case, marks=[pytest.mark.slow] if case[0].num_devices > 4 else [])
    for kind, cases in CASES.items()
    for case in cases
]


@pytest.mark.parametrize(("kind", "shape", "virtual_stages", "microbatches", "num_layers"), TABLE)
def test_a_pipeline_equals_one_device(kind, shape, virtual_stages, microbatches, num_layers):
    loss, (of_ends, of_layers) = on_one_device(num_layers, microbatches)
    (found, (ends, layers)), schedule = run_schedule(shape, kind, virtual_stages, microbatches, num_layers)
    assert abs(float(found) - float(loss)) < 1e-5 * abs(float(loss))
    expected = {name: in_slots(gradient, schedule) for name, gradient in of_layers.items()} | of_ends
    for name, gradient in (layers | ends).items():
        difference = np.linalg.norm(np.asarray(gradient) - expected[name])
        assert difference < 1e-5 * np.linalg.norm(expected[name]), name
        # Nothing is exactly zero but the gradients of empty slots.
        assert not np.asarray(gradient)[expected[name] == 0].any(), name


@cache
def compiled(kind, shape, virtual_stages, microbatches):
    """The text of a compiled pipeline with two layers a chunk, and the bytes of its temporaries."""
    schedule = Schedule(stages=shape.pp, microbatches=microbatches, kind=kind, virtual_stages=virtual_stages)
    program, _ = compiled_pipeline(shape, schedule, 2 * shape.pp * virtual_stages)
    memory = program.memory_analysis()
    assert memory is not None
    return program.as_text() or "", memory.temp_size_in_bytes, schedule


def permutes(text, shape):
    """The number of permutes of each phase, and their bytes."""
    found = {}
    for move in read_hlo(text, shape.layout, hardware=f"cpu:{shape.num_devices}").collectives:
        if move.kind == "collective-permute":
            assert move.axes == ("pp",)
            count, size = found.get(move.phase, (0, 0))
            found[move.phase] = (count + move.count, size + move.bytes)
    return found


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("shape", "virtual_stages"), [(MeshShape(pp=2, tp=2), 2), (MeshShape(pp=4), 1)])
def test_every_tick_has_one_permute_of_a_stream(kind, shape, virtual_stages):
    text, _, schedule = compiled(kind, shape, virtual_stages, 8)
    sent = (schedule.ticks, schedule.ticks * STREAM_BYTES // shape.tp)
    assert permutes(text, shape) == {"forward": sent, "backward": sent}


@pytest.mark.parametrize("stages", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_1f1b_keeps_the_inputs_of_layers_of_2p_less_1_microbatches(stages):
    text, _, schedule = compiled("1f1b", MeshShape(pp=stages), 1, 8)
    assert schedule.kept == 2 * stages - 1
    of_streams = re.findall(rf"f32\[([\d,]+),{BATCH},{LENGTH},{EMBED}\]", text)
    assert max(math.prod(map(int, dims.split(","))) for dims in of_streams) == 2 * schedule.kept


def test_temporaries_grow_with_microbatches_in_gpipe_and_not_in_1f1b():
    few, many = (compiled("1f1b", MeshShape(pp=4), 1, microbatches)[1] for microbatches in (8, 32))
    assert many - few < STREAM_BYTES
    few, many = (compiled("gpipe", MeshShape(pp=4), 1, microbatches)[1] for microbatches in (8, 32))
    # Of each microbatch the inputs of two layers and that of the loss.
    assert many - few >= 24 * 3 * STREAM_BYTES


def test_gathered_weights_are_not_kept_from_tick_to_tick():
    """JAX took the gathers of all layers out of the loop over ticks: one for each layer, all held at once."""
    shape = MeshShape(pp=2, fsdp=2)
    text, _, schedule = compiled("gpipe", shape, 1, 4)
    moves = read_hlo(text, shape.layout, hardware="cpu:4").collectives
    of_layers = [move for move in moves if move.kind == "all-gather" and f"{EMBED},{MLP}]" in move.array]
    counts = {phase: sum(m.count for m in of_layers if m.phase == phase) for phase in ("forward", "recompute")}
    assert counts == dict.fromkeys(counts, 2 * schedule.ticks)
