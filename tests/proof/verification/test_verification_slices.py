"""A train step over several slices: what its program sends between them, by axis."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.evaluation import evaluate
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.plan import make_plan
from meshwright.proof.verification.library import verify

MODEL = replace(PRESETS["tiny"], embed=256, mlp=512, num_heads=4, num_kv_heads=4, head_dim=128, num_layers=2, vocab=512)
MESH = MeshShape(dp=2, fsdp=2, tp=2)

PLACE = """
HloModule place, num_partitions=4

ENTRY %main () -> u32[] {
  %slice = u32[] custom-call(), custom_call_target="SliceId"
  %four = u32[] constant(4)
  %before = u32[] multiply(%slice, %four)
  %own = u32[] partition-id()
  ROOT %place = u32[] add(%before, %own)
}
"""


def test_a_device_of_the_first_slice_has_its_own_number_among_all():
    module = parse_hlo(PLACE)
    value = evaluate(module, module.root(module.entry), 4)
    assert value is not None
    assert value.tolist() == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def found():
    """The step on two slices, fsdp and tp inside each."""
    pytest.importorskip("libtpu")
    return verify(make_plan(Workload(model=MODEL, batch=8, seq_len=128), MESH, parse_system("2*v5e:2x2")))


@pytest.mark.slow
def test_gradients_are_scattered_inside_a_slice_and_their_shards_alone_are_summed_between(found):
    rows = {row.quantity: row for row in found.rows}
    scattered = rows["reduce-scatter fsdp backward"]
    assert scattered.is_equal
    assert rows["all-reduce dp backward"].predicted == scattered.predicted / MESH.fsdp
    for move in found.compiled.collectives:
        assert ("dp" in move.axes) == (move.note == "between slices")
        assert "dp" not in move.axes or move.kind == "all-reduce"
    assert not [note for note in found.compiled.notes if note.startswith(("send", "recv"))]


@pytest.mark.slow
def test_every_collective_of_a_step_over_slices_is_as_planned_or_has_a_name(found):
    assert [row for row in found.rows if not row.is_explained] == []
