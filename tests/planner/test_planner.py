from dataclasses import replace

import pytest

from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_system
from meshwright.mesh import AXES, MeshShape
from meshwright.planner import find_best, make_plan, predict, price, rank, read_plan, reason, why, write_plan
from meshwright.workload import PRESETS, Experts, Strategy, Workload

LLAMA = Workload(model=PRESETS["llama3-8b"], batch=512, seq_len=8192)
V5P = parse_system("v5p:4x4x4")
TINY = Workload(model=PRESETS["tiny"], batch=16, seq_len=256, compute_dtype="f32")


def test_the_breakdown_sums_to_the_step_and_the_terms_to_the_peak():
    for mesh in (MeshShape(fsdp=64), MeshShape(dp=4, fsdp=4, tp=4), MeshShape(fsdp=8, sp=8)):
        record = predict(LLAMA, mesh, V5P)
        assert sum(record.breakdown_seconds.values()) == pytest.approx(record.step_seconds)
        terms = [size for name, size in record.memory_bytes.items() if name != "peak"]
        assert sum(terms) == record.memory_bytes["peak"]
        exposed = sum(move.exposed_seconds for move in record.collectives)
        assert exposed == pytest.approx(record.breakdown_seconds["exposed communication"])


def test_candidates_come_best_first_and_those_that_fit_before_those_that_do_not():
    ranking = rank(LLAMA, V5P)
    fits = [record.fits for record in ranking.candidates]
    assert fits == sorted(fits, reverse=True)
    assert 0 < ranking.num_fit < len(fits)
    steps = [record.step_seconds for record in ranking.candidates[: ranking.num_fit]]
    assert steps == sorted(steps)


def test_every_mesh_of_the_devices_is_a_candidate_or_illegal():
    """84 ways to write 64 as a product of four; tp cannot exceed the 8 kv heads, in 10 of them it does."""
    ranking = rank(LLAMA, V5P)
    assert ranking.num_meshes == 84
    assert len(ranking.candidates) == 84 - 10
    assert len({tuple(record.mesh.items()) for record in ranking.candidates}) == 74


def test_what_does_not_fit_says_what_it_wants():
    ranking = rank(LLAMA, V5P)
    assert reason(ranking.candidates[-1], ranking.candidates[0]).startswith("wants ")
    assert reason(ranking.candidates[0], ranking.candidates[0]) == "-"


def test_a_batch_that_cannot_hide_its_gathers_is_communication_bound():
    """One sequence of 2,048 tokens a device, where v5e wants thousands to hide gathers over a line of 4."""
    small = replace(LLAMA, batch=16, seq_len=128)
    record = predict(small, MeshShape(fsdp=16), parse_system("v5e:4x4"))
    assert record.bound == "communication"
    assert record.breakdown_seconds["exposed communication"] > 0


def test_a_large_batch_hides_them():
    record = predict(LLAMA, MeshShape(fsdp=64), V5P)
    gathers = [move for move in record.collectives if move.kind == "all-gather"]
    assert gathers
    assert all(move.exposed_seconds == 0 for move in gathers)
    assert record.bound == "compute"


def test_tensor_parallel_collectives_are_exposed():
    record = predict(LLAMA, MeshShape(fsdp=16, tp=4), V5P)
    over_tp = [move for move in record.collectives if move.axes == ("tp",)]
    assert all(move.exposed_seconds == move.seconds > 0 for move in over_tp)


def test_more_devices_hold_less_and_take_less_time():
    one, two = (predict(TINY, MeshShape(fsdp=n), parse_system("h100:8")) for n in (4, 8))
    assert two.memory_bytes["parameters"] < one.memory_bytes["parameters"]
    assert two.flops == one.flops / 2


def test_a_plan_survives_its_file(tmp_path):
    plan = make_plan(TINY, MeshShape(fsdp=2, tp=4), parse_system("cpu:8"))
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize("text", ["", "a: [", "a: 1", "meshwright_plan: 1\nworkload: {}", "meshwright_plan: 99"])
def test_a_file_that_is_no_plan_is_told(text, tmp_path):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(MeshwrightError, match=r"plan\.yaml is not"):
        read_plan(tmp_path / "plan.yaml")


def test_a_plan_that_is_not_there_is_told(tmp_path):
    with pytest.raises(MeshwrightError, match="no plan"):
        read_plan(tmp_path / "plan.yaml")


def test_no_legal_mesh_is_told_with_one_reason():
    with pytest.raises(MeshwrightError, match="none of 4 meshes of 7 devices can split tiny"):
        rank(replace(TINY, batch=1, seq_len=5), parse_system("cpu:7"))


def test_the_reasons_have_numbers():
    record = predict(LLAMA, MeshShape(fsdp=64), V5P)
    first = why(record, LLAMA, V5P)[0]
    assert first == "why: 65,536 tokens a device hides weights and gradients over fsdp, which want 850"


MOE = replace(TINY, model=replace(TINY.model, num_layers=4, experts=Experts(count=8, num_active=2, mlp=192)))
SPACES = [(TINY, "cpu:8"), (MOE, "h100:16"), (replace(LLAMA, batch=64), "v5p:2x2x4"), (LLAMA, "a100-80gb:16")]


@pytest.mark.parametrize(("workload", "hardware"), SPACES, ids=[hardware for _, hardware in SPACES])
def test_the_search_finds_what_pricing_every_mesh_finds(workload, hardware):
    system = parse_system(hardware)
    best, first = find_best(workload, system), rank(workload, system, AXES).candidates[0]
    assert (best.step_seconds, best.fits) == (first.step_seconds, first.fits)


def test_a_mesh_that_cannot_run_yet_says_that_it_is_planned_only():
    record = price(TINY, MeshShape(dp=4, pp=2), parse_system("cpu:8"))
    assert any(note.startswith("planned only: ") and "pp=1" in note for note in record.notes)
    assert not any("planned only" in note for note in price(TINY, MeshShape(dp=8), parse_system("cpu:8")).notes)
    experts = price(MOE, MeshShape(fsdp=8), parse_system("h100:8"))
    assert any("experts=Experts(count=8" in note for note in experts.notes)


def test_the_search_over_all_axes_says_what_is_planned_only():
    """175 billion parameters on 64 A100s of 80 GB: 2.8 TB of parameters, moments and gradients for 5.4 TB of memory."""
    best = find_best(Workload(model=PRESETS["gpt3-175b"], batch=64, seq_len=2048), parse_system("a100-80gb:64"))
    assert best.fits
    assert any(note.startswith("planned only: ") for note in best.notes)


@pytest.mark.parametrize(("parts", "stages", "virtual"), [(1, 2, 1), (8, 4, 1), (32, 8, 1), (8, 4, 2), (16, 2, 4)])
def test_a_pipeline_works_m_of_m_plus_p_minus_1_over_v(parts, stages, virtual):
    """GPipe and 1F1B (arXiv:1811.06965), interleaved (arXiv:2104.04473, section 2.2); links taken as free."""
    workload = replace(LLAMA, model=replace(LLAMA.model, num_layers=32, vocab=8))
    strategy = Strategy(num_microbatches=parts, virtual_stages=virtual)
    record = predict(workload, MeshShape(pp=stages), parse_system("h100:8"), strategy)
    spent = record.breakdown_seconds
    worked = spent["forward"] + spent["recompute"] + spent["backward"] + spent["exposed communication"]
    assert worked / (worked + spent["pipeline bubble"]) == pytest.approx(parts / (parts + (stages - 1) / virtual))
    assert sum(spent.values()) == pytest.approx(record.step_seconds)


def test_collectives_over_tp_that_overlap_are_not_exposed():
    exposed, hidden = (
        predict(LLAMA, MeshShape(fsdp=16, tp=4), V5P, Strategy(overlaps_tp=overlaps)) for overlaps in (False, True)
    )
    assert exposed.breakdown_seconds["exposed communication"] > hidden.breakdown_seconds["exposed communication"]
    assert exposed.collectives[0].seconds == hidden.collectives[0].seconds


def test_experts_exchange_their_tokens_over_ep_and_split_their_weights():
    one, four = (predict(MOE, MeshShape(dp=8 // ep, ep=ep), parse_system("h100:8")) for ep in (1, 4))
    assert four.memory_bytes["parameters"] < one.memory_bytes["parameters"]
    assert four.flops == one.flops
    assert {move.kind for move in four.collectives if move.axes == ("ep",)} >= {"all-to-all"}
