"""Where a plan takes a sum onto shards as the all-reduce that the TPU compiler makes of it."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.rates.collective_time import planned_seconds, reduce_scatter_runs_as_all_reduce
from meshwright.planning.prediction import predict
from meshwright.record import Collective

COMPILED = {
    "v5e:2x2": False,
    "v5e:2x4": False,
    "v5e:4x4": True,
    "v5e:4x8": False,
    "v5e:8x8": True,
    "v5e:16x16": True,
    "v6e:4x4": True,
    "v6e:4x8": False,
    "v5p:2x2x4": True,
    "v5p:4x4x4": True,
    "tpu7x:2x2x2": False,
    "h100:16": False,
}
"""Whether the compiler makes an all-reduce of a sum over a whole slice: docs/verify.md, benchmarks/verify_matrix.py."""


def scatter(axes=("fsdp",)):
    return Collective(kind="reduce-scatter", axes=axes, phase="backward", bytes=1 << 30, count=4)


def runs_as_all_reduce(hardware, **degrees):
    """Whether the compiler makes an all-reduce of a sum onto shards over fsdp, over all devices where none are said."""
    system = parse_system(hardware)
    mesh = MeshShape(**(degrees or {"fsdp": system.num_devices}))
    return reduce_scatter_runs_as_all_reduce(scatter(), lay_mesh(system, mesh.layout))


@pytest.mark.parametrize(("hardware", "expected"), COMPILED.items())
def test_a_sum_over_a_whole_slice_is_what_its_compiler_makes_of_it(hardware, expected):
    assert runs_as_all_reduce(hardware) == expected


def test_a_sum_over_a_part_of_a_slice_is_onto_shards():
    assert not runs_as_all_reduce("v5e:4x4", fsdp=4, tp=4)


def test_each_of_several_slices_is_whole():
    assert runs_as_all_reduce("2*v5e:4x4", dp=2, fsdp=16)
    assert runs_as_all_reduce("2*v5e:4x4", fsdp=32)
    assert not runs_as_all_reduce("2*v5e:4x4", fsdp=8, tp=4)


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
    assert planned_seconds(scatter(), layout) == planned_seconds(replace(scatter(), kind="all-reduce"), layout)
    assert planned_seconds(replace(scatter(), kind="all-gather"), layout) < planned_seconds(scatter(), layout)
