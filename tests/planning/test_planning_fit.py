"""What to do about a step that does not fit."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.memory import step_memory
from meshwright.planning.prediction import predict
from meshwright.planning.why.fixes import lacking_bytes, ways_to_fit

V5E = parse_system("v5e:4x4")
LLAMA = Workload(model=PRESETS["llama3-8b"], batch=16, seq_len=8192, remat="none")
FSDP = MeshShape(fsdp=16)

TOO_LARGE = [
    (LLAMA, FSDP, V5E, Strategy(attention="flash")),
    (LLAMA, MeshShape(dp=4, fsdp=4), V5E, Strategy(attention="flash")),
    (
        Workload(model=PRESETS["llama3-70b"], batch=64, seq_len=8192),
        MeshShape(fsdp=8, tp=8),
        parse_system("h100:64"),
        Strategy(zero_stage=1),
    ),
]


@pytest.mark.parametrize(("workload", "mesh", "system", "strategy"), TOO_LARGE)
def test_every_way_fits_and_is_priced_as_a_plan_is(workload, mesh, system, strategy):
    assert lacking_bytes(workload, mesh, system, strategy) > 0
    before = predict(workload, mesh, system, strategy).step_seconds
    ways = ways_to_fit(workload, mesh, system, strategy)
    assert ways
    for way in ways:
        record = predict(way.workload, way.mesh, system, way.strategy)
        assert record.fits
        assert (record.step_seconds, record.memory_bytes["peak"]) == (way.step_seconds, way.peak_bytes)
        assert before is not None
        assert way.extra_seconds == way.step_seconds - before
        assert way.changes


def test_the_fastest_comes_first():
    ways = ways_to_fit(LLAMA, FSDP, V5E, Strategy(attention="flash"))
    assert [way.step_seconds for way in ways] == sorted(way.step_seconds for way in ways)


def test_what_fits_needs_no_change():
    small = Workload(model=PRESETS["tiny"], batch=16, seq_len=256)
    assert lacking_bytes(small, FSDP, V5E) == 0
    assert ways_to_fit(small, FSDP, V5E) == ()


def test_what_cannot_fit_has_no_way():
    """405 billion parameters of 2 bytes on 16 chips of 16 GB."""
    huge = Workload(model=PRESETS["llama3-405b"], batch=16, seq_len=2048)
    assert ways_to_fit(huge, FSDP, V5E) == ()


def test_what_lacks_is_what_exceeds_the_memory():
    peak = step_memory(LLAMA, FSDP, kind="tpu")["peak"]
    assert lacking_bytes(LLAMA, FSDP, V5E, DEFAULT) == int(peak - V5E.usable_bytes)


def test_changes_are_told_in_words_and_as_arguments():
    found = {str(change): change.flag for way in ways_to_fit(LLAMA, FSDP, V5E) for change in way.changes}
    assert found["remat block"] == "--remat block"


def test_inputs_in_the_hosts_memory_take_time_where_its_link_is_slow():
    """4,096 tokens of 8 kB and 32 layers are 1.07 GB each way: hidden at 16 GB/s, not at a hundredth."""
    workload = replace(LLAMA, batch=16, seq_len=4096, remat="offload")
    slow = replace(V5E, chip=replace(V5E.chip, host_bytes_per_second=V5E.chip.host_bytes_per_second / 100))
    hidden, shown = (predict(workload, FSDP, system).breakdown_seconds["host copies"] for system in (V5E, slow))
    assert hidden == 2 * 32 * 4096 * 4096 * 2 / V5E.hbm_bytes_per_second
    assert 0 < shown < 2 * 32 * 4096 * 4096 * 2 / slow.host_bytes_per_second
