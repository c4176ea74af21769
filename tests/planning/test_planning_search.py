"""The search: the same plans as pricing every way, whatever it leaves out; and fast."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step import train
from meshwright.description.step.legality import check_mesh
from meshwright.description.step.model import Experts
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import AXES, MeshShape
from meshwright.planning import search
from meshwright.planning import space as space_module
from meshwright.planning.cost import memory
from meshwright.planning.cost import seconds as cost_seconds
from meshwright.planning.library import plan_one_mesh
from meshwright.planning.overlap import least_communication
from meshwright.planning.prediction import predict, step_bound_seconds, step_seconds
from meshwright.planning.search import find_best, plan_stages, rank, rank_space
from meshwright.planning.space import factorings, run_attentions, runnable_space, whole_space

TINY = replace(PRESETS["tiny"], num_layers=4)
MOE = replace(TINY, name="moe", experts=Experts(count=8, num_active=2, mlp=192))
WIDE = replace(PRESETS["llama3-8b"], num_layers=4)
MIXTRAL = replace(PRESETS["mixtral-8x7b"], num_layers=2)

# Dense and with experts, on switches and on tori, with room to spare and without, over slices.
SPACES = [
    (Workload(model=TINY, batch=8, seq_len=64, compute_dtype="f32"), "cpu:8"),
    (Workload(model=MOE, batch=8, seq_len=64), "h100:8"),
    (Workload(model=MOE, batch=8, seq_len=64), "v5p:2x2x2"),
    (Workload(model=WIDE, batch=8, seq_len=4096), "v5e:2x4"),
    (Workload(model=WIDE, batch=4, seq_len=4096), "2*v5e:2x2"),
    (Workload(model=WIDE, batch=16, seq_len=8192), "a100-80gb:16"),
    (Workload(model=MIXTRAL, batch=4, seq_len=4096), "v5e:4x4"),
    (Workload(model=MIXTRAL, batch=4, seq_len=2048), "a100-40gb:16"),
]
IDS = [f"{workload.model.name} on {hardware}" for workload, hardware in SPACES]
EXHAUSTED = [
    # Every way of the others is priced by `make matrix`.
    pytest.param(*space, marks=[] if number in (0, 2, 4, 7) else pytest.mark.matrix)
    for number, space in enumerate(SPACES)
]


def exhaustive(space):
    """Every way priced: the best of each mesh, those that fit first and fastest first."""
    best = {}
    for mesh in space.meshes():
        for way in space.candidates(mesh):
            record = predict(space.with_remat(way.remat), mesh, space.system, way.strategy)
            peak = record.memory_bytes["peak"]
            key = (not record.fits, record.step_seconds if record.fits else 0.0, peak)
            best[mesh] = min(best.get(mesh, (True, float("inf"), peak)), key)
    return sorted(best.values())


@pytest.mark.parametrize(("workload", "hardware"), EXHAUSTED, ids=IDS)
def test_the_search_finds_what_pricing_every_way_finds(workload, hardware):
    space = whole_space(workload, parse_system(hardware))
    found = rank_space(space, top=6)
    expected = exhaustive(space)
    for plan, (misses, seconds, peak) in zip(found.plans, expected, strict=False):
        assert plan.predicted.fits == (not misses)
        assert plan.predicted.memory_bytes["peak"] == peak
        if plan.predicted.fits:
            assert plan.predicted.step_seconds == pytest.approx(seconds, rel=1e-12)
    assert found.num_priced < found.num_candidates


@pytest.mark.parametrize(("workload", "hardware"), SPACES, ids=IDS)
def test_a_step_priced_alone_is_the_records_and_never_under_its_bound(workload, hardware):
    space = whole_space(workload, parse_system(hardware))
    ways = [way for mesh in space.meshes() for way in space.candidates(mesh)]
    for way in random.Random(7).sample(ways, min(40, len(ways))):
        read = space.with_remat(way.remat)
        seconds = predict(read, way.mesh, space.system, way.strategy).step_seconds
        assert step_seconds(read, way.mesh, space.system, way.strategy) == pytest.approx(seconds, rel=1e-12), way
        communication = least_communication(read, way.mesh, space.system, way.strategy)
        bound = step_bound_seconds(read, way.mesh, space.system, way.strategy, communication)
        assert bound <= seconds * (1 + 1e-12), way


@pytest.mark.parametrize(("workload", "hardware"), SPACES, ids=IDS)
def test_the_meshes_searched_are_those_that_can_split_the_workload(workload, hardware):
    system = parse_system(hardware)
    legal = set()
    for degrees in factorings(system.num_devices, len(AXES)):
        mesh = MeshShape(**dict(zip(AXES, degrees, strict=True)))
        try:
            check_mesh(workload, mesh)
        except MeshwrightError:
            continue
        if mesh.tp <= 8 or mesh.tp <= workload.model.num_kv_heads:  # Beyond a node no search copies kv heads.
            legal.add(mesh)
    assert set(whole_space(workload, system).meshes()) == legal


def test_experts_are_searched_over_ep():
    space = whole_space(*[Workload(model=MIXTRAL, batch=8, seq_len=4096), parse_system("h100:8")])
    assert {mesh.ep for mesh in space.meshes()} == {1, 2, 4, 8}
    dense = whole_space(Workload(model=WIDE, batch=8, seq_len=4096), parse_system("h100:8"))
    assert {mesh.ep for mesh in dense.meshes()} == {1}


def test_a_pipeline_is_searched_in_every_schedule():
    space = whole_space(Workload(model=TINY, batch=8, seq_len=64), parse_system("h100:8"))
    ways = list(space.candidates(MeshShape(fsdp=4, pp=2)))
    assert {(way.strategy.schedule, way.strategy.virtual_stages) for way in ways} == {
        ("1f1b", 1),
        ("1f1b", 2),
        ("gpipe", 1),
    }
    assert {way.strategy.zero_stage for way in ways} == {1, 2, 3}
    assert {way.strategy.num_microbatches for way in ways} == {1, 2}
    assert {way.remat for way in ways} == {"none", "matmuls", "block"}
    assert space.num_candidates((MeshShape(fsdp=4, pp=2),)) == len(ways)


def test_what_runs_is_searched_like_what_can_be_planned():
    workload = Workload(model=TINY, batch=8, seq_len=64)
    space = runnable_space(workload, parse_system("h100:8"), ("block",))
    assert {
        (way.strategy.zero_stage, way.strategy.num_microbatches) for way in space.candidates(MeshShape(fsdp=4, tp=2))
    } == {(stage, parts) for stage in (1, 2, 3) for parts in (1, 2)}
    assert {way.strategy.collective_matmul for way in space.candidates(MeshShape(fsdp=4, tp=2))} == {False, True}
    assert {way.strategy.zero_stage for way in space.candidates(MeshShape(fsdp=4, pp=2))} == {1, 3}
    assert {way.strategy.attention for way in space.candidates(MeshShape(fsdp=8))} == {"cudnn"}
    single = runnable_space(replace(workload, compute_dtype="f32"), parse_system("h100:8"), ("block",))
    assert {way.strategy.attention for way in single.candidates(MeshShape(fsdp=8))} == {"scores"}
    wide = replace(workload, model=PRESETS["gemma3-1b"])
    assert [run_attentions(wide, parse_system(on))[0] for on in ("h100:8", "b200:8")] == ["cudnn", "scores"]
    tpu = runnable_space(workload, parse_system("v5e:2x4"), ("block",))
    assert {way.strategy.attention for way in tpu.candidates(MeshShape(fsdp=8))} == {"flash"}
    assert {(mesh.ep, mesh.pp) for mesh in space.meshes()} == {(1, 1), (1, 2), (1, 4)}
    experts = runnable_space(Workload(model=MOE, batch=8, seq_len=64), parse_system("h100:8"), ("block",))
    assert {mesh.ep for mesh in experts.meshes()} == {1, 2, 4, 8}
    with pytest.raises(MeshwrightError, match="can be planned"):
        runnable_space(Workload(model=PRESETS["bloom-176b"], batch=8, seq_len=64), parse_system("h100:8"))


def test_stages_run_in_every_schedule_that_keeps_what_a_policy_says():
    space = runnable_space(Workload(model=TINY, batch=8, seq_len=64), parse_system("h100:8"), ("block", "none"))
    ways = {
        (way.remat, way.strategy.schedule, way.strategy.num_microbatches, way.strategy.virtual_stages)
        for way in space.candidates(MeshShape(fsdp=4, pp=2))
    }
    assert ways == {
        *(("block", "1f1b", parts, virtual) for parts, virtual in ((1, 1), (2, 1), (2, 2))),
        *((remat, "gpipe", parts, 1) for remat in ("block", "none") for parts in (1, 2)),
    }
    offloaded = runnable_space(Workload(model=TINY, batch=8, seq_len=64), parse_system("h100:8"), ("offload",))
    assert {mesh.pp for mesh in offloaded.meshes()} == {1}


def test_a_mesh_with_stages_is_run_in_the_best_way_that_keeps_what_is_said():
    workload, system = Workload(model=TINY, batch=64, seq_len=64), parse_system("h100:8")
    plan = plan_stages(workload, MeshShape(fsdp=4, pp=2), system)
    assert plan.planned_only == ""
    assert plan.workload == workload
    with pytest.raises(MeshwrightError, match="remat offload can be planned"):
        plan_stages(replace(workload, remat="offload"), MeshShape(fsdp=4, pp=2), system)


def test_what_is_said_is_not_searched():
    workload, system = Workload(model=WIDE, batch=16, seq_len=4096), parse_system("h100:8")
    plan = find_best(workload, system, remats=("block",), num_microbatches=2, zero_stage=3, optimizer="sgd")
    said = plan.strategy
    assert (plan.workload.remat, said.num_microbatches, said.zero_stage, said.optimizer) == ("block", 2, 3, "sgd")
    with pytest.raises(MeshwrightError, match="multiple of 3 sequences"):
        find_best(workload, system, num_microbatches=3)


def test_where_nothing_fits_the_closest_comes_first():
    workload, system = Workload(model=PRESETS["llama3-405b"], batch=8, seq_len=8192), parse_system("v5e:2x4")
    plans = rank(workload, system, top=4).plans
    peaks = [plan.predicted.memory_bytes["peak"] for plan in plans]
    assert not any(plan.predicted.fits for plan in plans)
    assert peaks == sorted(peaks)
    space = whole_space(workload, system)
    assert (True, 0.0, peaks[0]) == exhaustive(space)[0]


def test_a_mesh_of_its_own_is_run_in_the_best_of_its_ways():
    workload, system = SPACES[5][0], parse_system("a100-80gb:16")
    mesh = MeshShape(fsdp=8, pp=2)
    space = whole_space(workload, system)
    records = [predict(space.with_remat(w.remat), mesh, system, w.strategy) for w in space.candidates(mesh)]
    best = min(record.step_seconds for record in records if record.fits)
    assert plan_one_mesh(workload, mesh, system, (), {}, include_planned=True).predicted.step_seconds == pytest.approx(
        best, rel=1e-12
    )


@pytest.mark.parametrize("hardware", ["h100:8192", "v5p:16x16x32"])
def test_llama_3_405b_on_8192_devices_is_searched_whole(hardware):
    """How long that takes, `benchmarks/plan_search.py` prints."""
    workload = Workload(model=PRESETS["llama3-405b"], batch=2048, seq_len=8192)
    ranking = rank(workload, parse_system(hardware), top=1)
    assert ranking.num_candidates > 50_000
    assert ranking.plans[0].predicted.fits


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(4, 8))])
def test_the_search_is_exhaustive_on_spaces_drawn_at_random(seed):
    """Sizes, batches, chips and what is left to choose; half of them with so little memory that much does not fit."""
    draw = random.Random(seed)
    experts = Experts(count=4, num_active=draw.choice((1, 2)), mlp=draw.choice((64, 4096))) if seed % 2 else None
    model = replace(
        TINY,
        num_layers=draw.choice((2, 3, 4)),
        embed=draw.choice((128, 4096, 8192)),
        mlp=draw.choice((384, 16384)),
        vocab=draw.choice((256, 32768)),
        experts=experts,
    )
    hardware = draw.choice(("h100:4", "v5e:2x2", "a100-40gb:6", "v5p:2x2x1", "v4:2x2x1", "cpu:4"))
    workload = Workload(model=model, batch=draw.choice((6, 8, 12)), seq_len=draw.choice((64, 1024)))
    space = whole_space(workload, parse_system(hardware), optimizer=draw.choice(("adamw", "sgd")))
    for plan, (misses, seconds, peak) in zip(rank_space(space, top=5).plans, exhaustive(space), strict=False):
        assert (not plan.predicted.fits, plan.predicted.memory_bytes["peak"]) == (misses, peak)
        assert misses or plan.predicted.step_seconds == pytest.approx(seconds, rel=1e-12)


WORK = {"check_runnable": 2343, "seconds": 3491, "_bound": 883, "memory": 98, "priced": 83, "built": 80}
"""At most: ways held to what runs, ops and groups priced, whole memories folded, plans priced, steps built."""


def test_the_work_of_a_search_does_not_grow(monkeypatch):
    """Counts, which no machine's load moves: what a search prices, builds and folds, from cold caches."""
    counts = Counter()

    def counted(owner, name):
        plain = getattr(owner, name)

        def counting(*args, **keywords):
            counts[name] += 1
            return plain(*args, **keywords)

        monkeypatch.setattr(owner, name, counting)

    counted(cost_seconds.OpTimer, "seconds")
    counted(memory._Step, "memory")
    counted(search._Search, "_bound")
    counted(space_module, "check_runnable")
    for cached in (train._ops, train.train_step, cost_seconds._time, space_module._does_run):
        cached.cache_clear()
    workload = Workload(model=PRESETS["llama3-8b"], batch=512, seq_len=8192)
    ranking = rank(workload, parse_system("h100:64"), is_runnable=True)
    counts |= {"priced": ranking.num_priced, "built": train._ops.cache_info().misses}
    assert {name: counts[name] for name in WORK if counts[name] > WORK[name]} == {}


def test_what_is_faster_than_a_time_is_found_or_nothing_and_nothing_slower_is_priced(monkeypatch):
    workload = Workload(model=TINY, batch=8, seq_len=64)
    system = parse_system("h100:4")
    best = find_best(workload, system)
    seconds = best.predicted.step_seconds
    assert search.find_faster(workload, system, 1.001 * seconds) == best
    assert search.find_faster(workload, system, 0.999 * seconds) is None
    priced = []
    monkeypatch.setattr(search._Search, "_push_candidates", lambda _, group: priced.append(group))
    assert search.find_faster(workload, system, 1e-9 * seconds) is None
    assert priced == []
