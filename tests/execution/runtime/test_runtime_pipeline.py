"""A pipeline equals one device in every schedule and beside every other axis, and sends and keeps what it should."""

from functools import cache

import numpy as np
import pytest
from pipelined_layers import (
    BATCH,
    EMBED,
    LENGTH,
    MLP,
    STREAM_BYTES,
    VOCAB,
    compiled_pipeline,
    in_slots,
    on_one_device,
    run_schedule,
)

from meshwright.description.hlo.flops import flops_of
from meshwright.description.hlo.loops import count_executions
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.records import read_hlo
from meshwright.description.step.passes.schedule import Schedule
from meshwright.mesh import MeshShape
from meshwright.proof.simulate.buffers import read_buffers

MATRIX = pytest.mark.matrix

CORE = {
    # mesh, virtual stages, microbatches, layers: m = p and 4 p, layers that p v divides and others
    "gpipe": [
        (MeshShape(pp=2), 1, 2, 4),
        (MeshShape(pp=2, fsdp=2, tp=2), 1, 8, 5),
        (MeshShape(pp=4, fsdp=2), 2, 16, 9),
    ],
    "1f1b": [
        (MeshShape(pp=4), 1, 4, 7),
        (MeshShape(pp=8), 1, 32, 9),
        (MeshShape(pp=3), 1, 7, 6),
        (MeshShape(pp=2), 3, 8, 7),
        (MeshShape(pp=4, tp=2), 2, 4, 8),
    ],
}
MORE = {
    "gpipe": [
        (MeshShape(pp=4), 1, 16, 7),
        (MeshShape(pp=8), 1, 8, 9),
        (MeshShape(pp=4, dp=2), 1, 4, 4),
        (MeshShape(pp=2, tp=2), 2, 2, 4),
    ],
    "1f1b": [
        (MeshShape(pp=2), 1, 8, 4),
        (MeshShape(pp=4), 1, 2, 4),
        (MeshShape(pp=2, dp=4), 1, 8, 2),
        (MeshShape(pp=4, fsdp=2), 1, 16, 5),
        (MeshShape(pp=2, tp=4), 1, 2, 3),
        (MeshShape(pp=2, fsdp=2, tp=2), 1, 8, 4),
    ],
}
TABLE = [
    pytest.param(kind, *case, marks=marks)
    for cases, marks in ((CORE, [pytest.mark.slow]), (MORE, [pytest.mark.slow, pytest.mark.matrix]))
    for kind, of_kind in cases.items()
    for case in of_kind
]


@pytest.mark.parametrize(("kind", "shape", "virtual_stages", "microbatches", "num_layers"), TABLE)
def test_a_pipeline_equals_one_device(kind, shape, virtual_stages, microbatches, num_layers):
    check_equal(shape, kind, virtual_stages, microbatches, num_layers, num_kinds=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape", "virtual_stages", "microbatches", "num_cycles"),
    [
        ("gpipe", MeshShape(pp=2), 1, 2, 3),
        ("1f1b", MeshShape(pp=4, tp=2), 1, 8, 6),
        pytest.param("1f1b", MeshShape(pp=2), 2, 4, 4, marks=MATRIX),
        pytest.param("gpipe", MeshShape(pp=2), 2, 4, 5, marks=MATRIX),
    ],
)
def test_layers_of_two_kinds_in_cycles_equal_one_device(kind, shape, virtual_stages, microbatches, num_cycles):
    check_equal(shape, kind, virtual_stages, microbatches, num_cycles, num_kinds=2)


def check_equal(shape, kind, virtual_stages, microbatches, num_cycles, num_kinds):
    """The loss and every gradient are those of one device."""
    loss, (of_ends, of_layers) = on_one_device(num_cycles, microbatches, num_kinds)
    (found, (ends, layers)), schedule = run_schedule(shape, kind, virtual_stages, microbatches, num_cycles, num_kinds)
    assert abs(float(found) - float(loss)) < 1e-5 * abs(float(loss))
    wanted = [{name: in_slots(gradient, schedule) for name, gradient in own.items()} for own in of_layers]
    for own, expected in zip((*layers, ends), (*wanted, of_ends), strict=True):
        for name, gradient in own.items():
            difference = np.linalg.norm(np.asarray(gradient) - expected[name])
            assert difference < 1e-5 * np.linalg.norm(expected[name]), name
            # Nothing is exactly zero but the gradients of empty slots.
            assert not np.asarray(gradient)[expected[name] == 0].any(), name


@cache
def compiled(kind, shape, virtual_stages, microbatches):
    """The text of a compiled pipeline with two layers a chunk."""
    schedule = Schedule(stages=shape.pp, microbatches=microbatches, kind=kind, virtual_stages=virtual_stages)
    program, _ = compiled_pipeline(shape, schedule, 2 * shape.pp * virtual_stages)
    return program.as_text() or "", schedule


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
def test_every_tick_has_one_permute_of_a_stream_and_one_of_what_is_lent(kind, shape, virtual_stages):
    text, schedule = compiled(kind, shape, virtual_stages, 16 if virtual_stages == 1 else 8)
    stream, layers = schedule.ticks * STREAM_BYTES // shape.tp, 2
    found = permutes(text, shape)
    assert found["backward"] == (schedule.ticks, stream)
    if schedule.is_balanced:
        assert found["forward"] == (2 * schedule.ticks, (1 + layers) * stream)
    else:
        assert found["forward"] == (schedule.ticks, stream)


def streams(text):
    """What layers keep for backward where memory is fullest: the inputs that wait, in microbatches of two layers."""
    live = read_buffers(parse_hlo(text)).live
    slots = [b.shape.dims for b in live if b.shape.dims[-3:] == (BATCH, LENGTH, EMBED) and len(b.shape.dims) == 6]
    assert all(dims[1:3] == (2, 1) for dims in slots)
    return sum(dims[0] for dims in slots)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [pytest.param(2, marks=MATRIX), 4, pytest.param(8, marks=MATRIX)])
def test_1f1b_holds_as_many_microbatches_as_stages_and_gpipe_all(stages):
    microbatches = 2 * stages + 1, 4 * stages
    few, many = (compiled("1f1b", MeshShape(pp=stages), 1, m)[0] for m in microbatches)
    assert streams(few) == streams(many) == stages
    # Beside its inputs, a pipeline wants nothing more for a microbatch than the number of its tick.
    memory = [read_buffers(parse_hlo(text)) for text in (few, many)]
    less, more = (found.peak_bytes - found.argument_bytes for found in memory)
    assert more - less == 4 * (microbatches[1] - microbatches[0])
    text, schedule = compiled("gpipe", MeshShape(pp=stages), 1, 2 * stages + 1)
    # The ticks of the warm-up too, but for a single one, which XLA has no loop for.
    assert streams(text) == schedule.kept - (stages == 2) == 3 * stages - (stages == 2)


@pytest.mark.slow
def test_interleaved_1f1b_holds_the_chunks_of_the_last_ticks():
    text, schedule = compiled("1f1b", MeshShape(pp=2), 2, 4)
    assert streams(text) == schedule.kept == 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("virtual_stages", "stages"),
    [(1, 4), (2, 2), *(pytest.param(*case, marks=MATRIX) for case in [(1, 2), (1, 8), (2, 4), (2, 8)])],
)
def test_the_work_of_a_device_is_that_of_its_microbatches_and_the_bubble(kind, stages, virtual_stages):
    m = 4 * stages if virtual_stages == 1 else 2 * stages
    text, _ = compiled(kind, MeshShape(pp=stages), virtual_stages, m)
    module = parse_hlo(text)
    times = count_executions(module).times
    done = sum(
        times[product.computation] * (flops_of(module, product) or 0)
        for product in module.instructions()
        if product.opcode == "dot" and VOCAB not in {dim for one in arrays(module, product) for dim in one}
    )
    # Of each layer two products forward, four backward, and one that is made again.
    needed = m * virtual_stages * 2 * 7 * 2 * BATCH * LENGTH * EMBED * MLP
    assert needed / done == pytest.approx(m / (m + (stages - 1) / virtual_stages), rel=1e-12)


def arrays(module, product):
    """The dims of a product and of what it multiplies."""
    return [one.shape.dims for one in (product, *module.operands(product))]


def test_gathered_weights_are_not_kept_from_tick_to_tick():
    """JAX took the gathers of all layers out of the loop over ticks: one for each layer, all held at once."""
    shape = MeshShape(pp=2, fsdp=2)
    text, schedule = compiled("gpipe", shape, 1, 4)
    moves = read_hlo(text, shape.layout, hardware="cpu:4").collectives
    of_layers = [move for move in moves if move.kind == "all-gather" and f"{EMBED},{MLP}]" in move.array]
    counts = {phase: sum(m.count for m in of_layers if m.phase == phase) for phase in ("forward", "recompute")}
    assert counts == dict.fromkeys(counts, 2 * schedule.ticks)
