"""Where a plan takes a sum onto shards as the all-reduce that the TPU compiler makes of it."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.rates.collective_time import planned_seconds, runs_as_all_reduce
from meshwright.planning.prediction import predict
from meshwright.record import Collective

SUMS = {
    "v5e:2x2": False,
    "v5e:2x4": False,
    "v5e:4x4": True,
    "v5e:4x8": False,
    "v5e:16x16": True,
    "v6e:4x4": True,
    "v6e:4x8": False,
    "v4:2x2x1": False,
    "v4:2x2x2": True,
    "v5p:2x2x4": True,
    "v5p:4x4x4": True,
    "2*v5p:4x4x4": True,
    "tpu7x:4x4x4": False,
    "h100:16": False,
}
GATHERS = {
    "v5e:16x16": False,
    "v6e:4x4": False,
    "v5p:2x4x4": False,
    "v4:4x4x4": True,
    "v5p:4x4x4": True,
    "v5p:4x4x8": True,
    "2*v5p:4x4x4": True,
    "tpu7x:2x2x4": False,
    "tpu7x:4x4x4": True,
    "h100:16": False,
}
"""Whether the compiler makes an all-reduce of a sum onto shards, and of a gather, over a whole slice.

`benchmarks/whole_slices.py` prints what it makes.
"""


def collective(kind="reduce-scatter", axes=("fsdp",)):
    return Collective(kind=kind, axes=axes, phase="backward", bytes=1 << 30, count=4)


def is_all_reduce(hardware, kind="reduce-scatter", **degrees):
    """Whether the compiler makes an all-reduce of a collective over fsdp, over all devices where none are said."""
    system = parse_system(hardware)
    mesh = MeshShape(**(degrees or {"fsdp": system.num_devices}))
    return runs_as_all_reduce(collective(kind), lay_mesh(system, mesh.layout))


@pytest.mark.parametrize(("hardware", "expected"), SUMS.items())
def test_a_sum_over_a_whole_slice_is_what_its_compiler_makes_of_it(hardware, expected):
    assert is_all_reduce(hardware) == expected


@pytest.mark.parametrize(("hardware", "expected"), GATHERS.items())
def test_a_gather_over_a_whole_slice_is_what_its_compiler_makes_of_it(hardware, expected):
    assert is_all_reduce(hardware, "all-gather") == expected


def test_collectives_over_a_part_of_a_slice_stay_what_they_are():
    assert not is_all_reduce("v5e:4x4", fsdp=4, tp=4)
    assert not is_all_reduce("v5p:4x4x4", "all-gather", fsdp=16, tp=4)
    assert not is_all_reduce("v5p:4x4x8", "all-gather", dp=4, fsdp=32)


def test_each_of_several_slices_is_whole():
    assert is_all_reduce("2*v5e:4x4", dp=2, fsdp=16)
    assert is_all_reduce("2*v5e:4x4", fsdp=32)
    assert not is_all_reduce("2*v5e:4x4", fsdp=8, tp=4)


def test_a_plan_on_a_cube_waits_for_gathers_as_its_program_does():
    """Llama 3 8B with 4 layers on v5p:4x4x4, whose compiled step waits 36.3 ms for collectives over fsdp."""
    workload = Workload(model=replace(PRESETS["llama3-8b"], num_layers=4), batch=128, seq_len=8192)
    system, strategy = parse_system("v5p:4x4x4"), Strategy(attention="flash")
    whole, part = (predict(workload, mesh, system, strategy) for mesh in (MeshShape(fsdp=64), MeshShape(dp=4, fsdp=16)))
    assert whole.breakdown_seconds["exposed communication"] == pytest.approx(36.3e-3, rel=0.02)
    assert part.breakdown_seconds["exposed communication"] < 1e-3


def test_a_sum_over_slices_at_once_takes_as_long_as_in_turn():
    """A sum over two slices at once waits for the all-reduce in each of them as one slice after the other does."""
    workload = Workload(model=PRESETS["llama3-70b"], batch=1024, seq_len=8192)
    at_once, in_turn = (
        predict(workload, mesh, parse_system("2*v5p:8x8x8"), Strategy(num_microbatches=2))
        for mesh in (MeshShape(fsdp=128, sp=8), MeshShape(dp=2, fsdp=64, sp=8))
    )
    assert in_turn.step_seconds == pytest.approx(at_once.step_seconds, rel=1e-3)


def scatters(hardware, mesh):
    """The seconds of a step's reduce-scatters over fsdp, and of them what ops wait for."""
    workload = Workload(model=PRESETS["llama2-7b"], batch=64, seq_len=4096)
    moves = predict(workload, mesh, parse_system(hardware)).collectives
    found = [move for move in moves if (move.kind, move.axes) == ("reduce-scatter", ("fsdp",))]
    return sum(move.seconds for move in found), sum(move.exposed_seconds for move in found)


def test_a_plan_waits_for_sums_that_are_made_whole():
    seconds, exposed = scatters("v5e:4x4", MeshShape(fsdp=16))
    assert exposed == seconds > 0


def test_a_plan_hides_sums_onto_shards():
    seconds, exposed = scatters("v5e:4x8", MeshShape(fsdp=32))
    assert exposed < seconds


def test_a_sum_that_is_made_whole_takes_as_long_as_an_all_reduce():
    layout = lay_mesh(parse_system("v5e:4x4"), MeshShape(fsdp=16).layout)
    assert planned_seconds(collective(), layout) == planned_seconds(collective("all-reduce"), layout)
    assert planned_seconds(collective("all-gather"), layout) < planned_seconds(collective(), layout)
    cube = lay_mesh(parse_system("v5p:4x4x4"), MeshShape(fsdp=64).layout)
    assert planned_seconds(collective("all-gather"), cube) == planned_seconds(collective("all-reduce"), cube)
