"""A train step over several slices: what its program sends between them, by axis."""

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest

from meshwright.compiled import verify
from meshwright.hardware import parse_system
from meshwright.mesh import MeshShape
from meshwright.planner import make_plan
from meshwright.workload import PRESETS, Workload

MODEL = replace(PRESETS["tiny"], embed=256, mlp=512, num_heads=4, num_kv_heads=4, head_dim=64, num_layers=2, vocab=512)
MESH = MeshShape(dp=2, fsdp=2, tp=2)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_gradients_are_summed_between_slices_over_dp_as_planned():
    """Each slice has fsdp and tp inside; of weights, shards alone cross the data center's network."""
    workload = Workload(model=MODEL, batch=8, seq_len=128)
    found = verify(make_plan(workload, MESH, parse_system("2*v5e:2x2")))
    sums = Counter()
    for move in found.compiled.collectives:
        assert ("dp" in move.axes) == (move.note == "between slices")
        if "dp" in move.axes:
            sums[move.kind, move.axes, move.phase] += move.bytes
    (planned,) = [
        move.bytes
        for move in found.plan.predicted.collectives
        if (move.kind, move.axes, move.phase) == ("all-reduce", ("dp",), "backward")
    ]
    assert set(sums) == {("all-reduce", ("dp",), "backward"), ("all-reduce", ("dp",), "forward")}
    scales = 4 * MODEL.embed * (2 * MODEL.num_layers + 1)  # of norms, whole on every device, in float32
    assert sums["all-reduce", ("dp",), "backward"] == planned + scales
    assert not [note for note in found.compiled.notes if note.startswith(("send", "recv"))]
