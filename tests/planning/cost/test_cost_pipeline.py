"""A schedule of a pipeline is one that can run, waits as long as its formula says, and keeps what it says."""

from collections import Counter, defaultdict

import pytest

from meshwright.description.step.passes.schedule import Schedule, chunk_layers, slot_layers
from meshwright.errors import MeshwrightError

SCHEDULES = [
    Schedule(stages=stages, microbatches=microbatches, kind=kind, virtual_stages=virtual_stages)
    for kind in ("gpipe", "1f1b")
    for stages in (1, 2, 4, 8)
    for microbatches in (stages, 4 * stages)
    for virtual_stages in (1, 2, 3)
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_unit_is_done_once_after_those_it_needs(schedule):
    done = {}
    for cell in schedule.cells():
        place = cell.chunk * schedule.stages + cell.stage
        key = (cell.microbatch, place, cell.phase)
        assert key not in done
        done[key] = cell.slot
    last = schedule.stages * schedule.virtual_stages - 1
    assert len(done) == 2 * schedule.microbatches * (last + 1)
    for (microbatch, place, phase), slot in done.items():
        if phase == "forward" and place:
            assert done[microbatch, place - 1, "forward"] < slot
        if phase == "backward":
            before = (microbatch, place + 1, "backward") if place < last else (microbatch, place, "forward")
            assert done[before] < slot


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_slot_has_one_phase_and_every_stage_waits_for_the_bubble(schedule):
    phases, work = defaultdict(set), Counter()
    for cell in schedule.cells():
        phases[cell.slot].add(cell.phase)
        work[cell.stage] += 1
    assert all(len(found) == 1 for found in phases.values())
    assert sorted(phases) == list(range(2 * schedule.ticks))
    assert set(work.values()) == {2 * schedule.units}
    assert 2 * schedule.ticks - 2 * schedule.units == pytest.approx(schedule.bubble * 2 * schedule.units)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_what_waits_for_its_backward_has_its_place(schedule):
    made, latest, kept = {}, -1, Counter()
    slots = dict.fromkeys(cell.slot for cell in schedule.cells() if cell.phase == "forward")
    tick_of = {slot: tick for tick, slot in enumerate(slots)}
    for cell in schedule.cells():
        unit = (cell.stage, cell.microbatch, cell.chunk)
        latest = max(latest, tick_of.get(cell.slot, -1))
        if cell.phase == "forward":
            made[unit] = latest
        else:
            away = max(0, schedule.stages - 1 - 2 * cell.stage) if schedule.is_balanced else 0
            for tick in range(made[unit], latest + 1):
                is_away = tick < made[unit] + away
                kept[schedule.stages - 1 - cell.stage if is_away else cell.stage, tick] += 1
    assert max(kept.values()) == schedule.most_kept <= schedule.kept


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_1f1b_keeps_as_many_microbatches_as_stages_and_gpipe_all(stages):
    most = {kind: Schedule(stages=stages, microbatches=32, kind=kind).most_kept for kind in ("gpipe", "1f1b")}
    assert most == {"gpipe": 32, "1f1b": stages}


def test_layers_are_dealt_out_as_evenly_as_can_be():
    assert chunk_layers(7, 4) == (2, 2, 2, 1)
    assert slot_layers(8, 2) == tuple(range(8))
    assert slot_layers(7, 2, 2) == (0, 1, 4, 5, 2, 3, 6, None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Schedule(stages=4, microbatches=6, virtual_stages=2), r"in groups of pp=4: 6 % 4 = 2"),
        (lambda: Schedule(stages=4, microbatches=0), "0 microbatches"),
        (lambda: chunk_layers(3, 4), "3 layers cannot fill the 4 chunks"),
    ],
)
def test_what_cannot_be_a_pipeline_is_one_clear_error(call, message):
    with pytest.raises(MeshwrightError, match=message):
        call()
