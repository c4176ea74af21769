import json
from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.model import Experts
from meshwright.description.step.strategy import DEFAULT, STAGES_APART, Strategy
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.library import plan_one_mesh
from meshwright.planning.plan import as_run, make_plan, plan_from_data, plan_to_data, read_plan, write_plan
from meshwright.planning.prediction import predict
from meshwright.planning.search import find_best, rank
from meshwright.planning.space import runnable_space
from meshwright.planning.why.gap import gap_to
from meshwright.planning.why.nearby import chips_that_fit, is_communication_bound, nearby
from meshwright.planning.why.rules import rules_of_thumb
from meshwright.planning.why.step import how, wanted_tokens, why

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


def test_plans_come_best_first_and_those_that_fit_before_those_that_do_not():
    ranking = rank(LLAMA, parse_system("v5e:4x4"), top=400)
    records = [plan.predicted for plan in ranking.plans]
    fitting = [record.step_seconds for record in records if record.fits]
    peaks = [record.memory_bytes["peak"] for record in records if not record.fits]
    assert [bool(record.fits) for record in records] == [True] * len(fitting) + [False] * len(peaks)
    assert 0 < len(fitting) < len(records)
    assert (fitting, peaks) == (sorted(fitting), sorted(peaks))


def test_every_mesh_of_the_devices_is_a_candidate_or_illegal():
    """210 ways to write 64 as a product of five; in 15 tp exceeds kv heads and a node, in one pp the 32 layers."""
    system = parse_system("h100:64")
    assert len(set(runnable_space(LLAMA, system).meshes())) == 210 - 15 - 1
    assert rank(LLAMA, system, is_runnable=True, top=1).num_meshes == 194


def test_what_runs_takes_whole_axes_of_a_torus_where_jax_wants_them():
    """On 4x4x4 chips a degree is 1, 4, 16 or 64; v5e takes parts of axes."""
    plans = rank(LLAMA, V5P, is_runnable=True, top=100).plans
    assert {degree for plan in plans for degree in plan.mesh.degrees.values()} == {1, 4, 16, 64}
    split = make_plan(LLAMA, MeshShape(fsdp=32, tp=2), V5P)
    assert split.planned_only == "fsdp=32,tp=2 splits physical axes of v5p:4x4x4, which jax.make_mesh refuses"
    with pytest.raises(MeshwrightError, match=r"jax\.make_mesh refuses"):
        as_run(split)


def test_what_does_not_fit_says_what_it_wants():
    plans = rank(LLAMA, V5P, is_runnable=True, top=100).plans
    assert str(gap_to(plans[-1], plans[0])).startswith("needs ")
    assert str(gap_to(plans[0], plans[0])) == "-"


def test_a_batch_that_cannot_hide_its_gathers_is_communication_bound():
    """One sequence of 2,048 tokens a device, where v5e wants thousands to hide gathers over a line of 4."""
    small = replace(LLAMA, batch=16, seq_len=128)
    record = predict(small, MeshShape(fsdp=16), parse_system("v5e:4x4"))
    assert record.bound == "communication"
    assert record.breakdown_seconds["exposed communication"] > 0


def test_a_large_batch_hides_them():
    record = predict(LLAMA, MeshShape(dp=4, fsdp=16), V5P)
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
    strategy = Strategy(num_microbatches=2, zero_stage=2, attention="flash")
    plan = make_plan(TINY, MeshShape(fsdp=2, tp=4), parse_system("cpu:8"), strategy)
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]
    assert plan_from_data(json.loads(json.dumps(plan_to_data(plan))), name="plan.json") == plan


def test_a_plan_of_before_the_fields_were_renamed_is_read():
    strategy = Strategy(attention="flash", sp_method="ring", tp_stream="whole", profile=STAGES_APART.profile)
    plan = make_plan(replace(LLAMA, batch=64), MeshShape(fsdp=8, tp=4, sp=2), V5P, strategy)
    data = plan_to_data(plan)
    fields = data["strategy"]
    fields["sequence"], fields["lockstep"] = fields.pop("sp_method"), fields.pop("profile")["spmd_pipeline"]
    fields["overlaps_tp"] = fields.pop("collective_matmul")
    fields["sequence_parallel"] = fields.pop("tp_stream") == "split"
    assert plan_from_data(data, name="plan.yaml") == plan


def test_any_number_in_a_plan_is_taken_or_refused_in_a_line():
    """A flipped bit made a rate 0, by which the prediction was divided; so were widths of 0, and factors of 1e300."""
    workload = replace(TINY, model=PRESETS["tiny-deepseek"])
    plan = plan_to_data(make_plan(workload, MeshShape(fsdp=8), parse_system("cpu:8")))
    refused, given = {}, json.loads(json.dumps(plan))

    def numbers(data, path=()):
        for name, value in data.items():
            if isinstance(value, dict):
                yield from numbers(value, (*path, name))
            elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
                yield data, name, (*path, name)

    for place, name, path in [*numbers({"workload": given["workload"], "strategy": given["strategy"]})]:
        value = place[name]
        for other in (0, -1, 1e300):
            place[name] = other
            try:
                plan_from_data(given, name="plan.yaml")
            except MeshwrightError as error:
                refused[path[-1], other] = str(error)
        place[name] = value
    assert {("attention_rate", 0), ("host_seconds", -1), ("kv_rank", 0), ("capacity_factor", 1e300)} <= refused.keys()
    assert not any("\n" in line for line in refused.values())


@pytest.mark.parametrize("text", ["", "a: [", "a: 1", "meshwright_plan: 1\nworkload: {}", "meshwright_plan: 99"])
def test_a_file_that_is_no_plan_is_told(text, tmp_path):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(MeshwrightError, match=r"plan\.yaml is not"):
        read_plan(tmp_path / "plan.yaml")


def test_a_plan_that_is_not_there_is_told(tmp_path):
    with pytest.raises(MeshwrightError, match="no plan"):
        read_plan(tmp_path / "plan.yaml")


def test_no_legal_mesh_is_told_with_one_reason():
    with pytest.raises(MeshwrightError, match="none of 6 meshes of 7 devices can split tiny"):
        rank(replace(TINY, batch=1, seq_len=5), parse_system("cpu:7"))


def test_a_plan_says_how_it_runs_and_what_decides_with_numbers():
    plan = make_plan(LLAMA, MeshShape(fsdp=64), V5P)
    assert how(plan) == "remat block · ZeRO-3 · attention scores through memory · adamw"
    assert str(why(plan)[0]) == "65,536 tokens per device; fsdp needs 850 to hide its collectives"
    few = make_plan(replace(LLAMA, batch=16, seq_len=128), MeshShape(fsdp=16), parse_system("v5e:4x4"))
    assert "128 tokens per device are too few" in str(why(few)[0])
    # ZeRO-3 gathers weights for each microbatch, ZeRO-1 once a step.
    [each, once] = (replace(plan.strategy, num_microbatches=8, zero_stage=stage) for stage in (3, 1))
    gathered = make_plan(plan.workload, plan.mesh, plan.system, each)
    assert "8,192 tokens per device and microbatch; fsdp needs" in str(why(gathered)[0])
    assert str(why(make_plan(plan.workload, plan.mesh, plan.system, once))[0]).startswith(
        "65,536 tokens per device; fsdp needs"
    )
    piped = make_plan(LLAMA, MeshShape(fsdp=8, tp=2, pp=4), V5P, Strategy(num_microbatches=8, zero_stage=2))
    assert "8 microbatches · 1f1b · ZeRO-2" in how(piped)
    assert any("4 - 1 stages for 8 microbatches" in line for line in map(str, why(piped)))
    assert any(
        line.startswith("tp=2 stays compute bound, up to tp=2.81 (mlp 14,336 / 5,100 flops per byte)")
        for line in map(str, why(piped))
    )


def test_experts_want_as_many_times_the_tokens_as_are_gathered_for_each_that_works():
    """8 experts of which 2 work on a token: 4 times, unless ep splits them (scaling book, gpus: MoE models)."""
    dense, sparse = (make_plan(workload, MeshShape(fsdp=8), parse_system("h100:8")) for workload in (TINY, MOE))
    assert wanted_tokens(sparse, ("fsdp",)) == pytest.approx(4 * wanted_tokens(dense, ("fsdp",)), abs=4)
    split = make_plan(MOE, MeshShape(fsdp=2, ep=4), parse_system("h100:8"))
    assert "needs" in str(why(split)[0])


def test_a_plan_that_cannot_run_yet_says_why():
    runs = make_plan(TINY, MeshShape(dp=8), parse_system("cpu:8"))
    assert runs.planned_only == ""
    assert "ep=1" in replace(runs, mesh=MeshShape(dp=4, ep=2)).planned_only
    assert replace(runs, mesh=MeshShape(fsdp=8), strategy=Strategy(num_microbatches=2, zero_stage=1)).planned_only == ""
    assert "adamw-8bit" in replace(runs, strategy=Strategy(optimizer="adamw-8bit")).planned_only
    assert "ZeRO-2" in replace(runs, mesh=MeshShape(fsdp=4, pp=2), strategy=Strategy(zero_stage=2)).planned_only


def test_what_is_run_of_a_plan_is_its_attention():
    """So that what is verified is compared with what is lowered."""
    plan = plan_one_mesh(LLAMA, MeshShape(fsdp=64), V5P, ("block",), {"num_microbatches": 1, "zero_stage": 3})
    assert plan.strategy.attention == "flash"
    run = as_run(plan)
    assert run.strategy == replace(DEFAULT, attention="flash")
    assert run.predicted == predict(plan.workload, plan.mesh, V5P, run.strategy)
    assert as_run(run) is run
    with pytest.raises(MeshwrightError, match="adamw-8bit can be planned"):
        as_run(replace(plan, strategy=replace(plan.strategy, optimizer="adamw-8bit")))


def test_a_learned_position_table_bounds_the_sequence():
    with pytest.raises(MeshwrightError, match="2048 is more than the 1024 positions that gpt2-xl has learned"):
        find_best(Workload(model=PRESETS["gpt2-xl"], batch=8, seq_len=2048), parse_system("h100:8"))


def test_thresholds_near_a_plan_name_chips_batch_and_length():
    chips, batch, length = map(
        str, nearby(make_plan(replace(LLAMA, batch=64), MeshShape(fsdp=16), parse_system("h100:16")))
    )
    assert "x the chips" in chips or "chips it stays" in chips
    assert "batch of" in batch
    assert "tokens" in length
    bound = make_plan(replace(LLAMA, batch=16, seq_len=128), MeshShape(fsdp=16), parse_system("v5e:4x4"))
    first, second, _ = map(str, nearby(bound))
    assert first.startswith("communication bound already on fsdp: 128 tokens per device < 2,")
    assert "this becomes compute bound" in second


def test_the_fewest_chips_that_fit_are_found_by_doubling():
    plan = find_best(Workload(model=PRESETS["llama3-70b"], batch=64, seq_len=4096), parse_system("h100:8"))
    assert not plan.predicted.fits
    found = chips_that_fit(plan)
    assert found is not None
    assert found.predicted.fits
    half = parse_system(f"h100:{found.system.num_devices // 2}")
    assert not find_best(plan.workload, half, remats=(plan.workload.remat,)).predicted.fits


def test_the_first_factor_of_chips_that_is_communication_bound_is_found():
    plan = make_plan(replace(LLAMA, batch=1024, seq_len=1024), MeshShape(fsdp=16), parse_system("h100:16"))
    line = str(nearby(plan)[0])
    factor = int(line.split("at ")[1].split("x")[0])
    for scale, bound in ((factor, True), (factor // 2, False)):
        larger = make_plan(plan.workload, MeshShape(fsdp=16 * scale), parse_system(f"h100:{16 * scale}"))
        assert is_communication_bound(larger) is bound


@pytest.mark.parametrize(
    ("name", "devices", "says"),
    [
        ("gpt2-xl", 8, "data parallelism is enough"),
        ("llama3-8b", 8, "up to 8x needs one model axis"),
        ("llama3-70b", 64, "8x to 64x needs two model axes"),
        ("llama3-405b", 512, "above 64x needs three model axes, a pipeline among them"),
    ],
)
def test_the_rule_of_thumb_of_a_models_size_has_its_numbers(name, devices, says):
    workload = Workload(model=PRESETS[name], batch=devices, seq_len=1024)
    plan = make_plan(workload, MeshShape(fsdp=devices), parse_system(f"h100:{devices}"))
    size, first, sequences = map(str, rules_of_thumb(plan))
    assert says in size
    assert "this plan has fsdp" in size
    assert first == f"largest fsdp first: here {devices} of {devices} devices"
    assert sequences == f"batch >= dp*fsdp: {devices} sequences on {devices}, 1 each"


MOE = replace(TINY, model=replace(TINY.model, num_layers=4, experts=Experts(count=8, num_active=2, mlp=192)))


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
        predict(LLAMA, MeshShape(fsdp=16, tp=4), V5P, Strategy(collective_matmul=overlaps))
        for overlaps in (False, True)
    )
    assert exposed.breakdown_seconds["exposed communication"] > hidden.breakdown_seconds["exposed communication"]
    assert exposed.collectives[0].seconds == hidden.collectives[0].seconds


def test_experts_exchange_their_tokens_over_ep_and_split_their_weights():
    one, four = (predict(MOE, MeshShape(dp=8 // ep, ep=ep), parse_system("h100:8")) for ep in (1, 4))
    assert four.memory_bytes["parameters"] < one.memory_bytes["parameters"]
    assert four.flops == one.flops
    assert {move.kind for move in four.collectives if move.axes == ("ep",)} >= {"all-to-all"}


def test_a_plan_says_what_gpus_multiply_more_than_it_prices():
    """Every row by all 8 experts of a device, but where a capacity makes blocks of rows of each."""
    bounded = replace(MOE, model=replace(MOE.model, experts=replace(MOE.model.experts, capacity_factor=1.25)))
    for workload, mesh, on, says in (
        (MOE, MeshShape(fsdp=8), "h100:8", True),
        (MOE, MeshShape(fsdp=8), "v5e:2x4", False),
        (bounded, MeshShape(fsdp=8), "h100:8", False),
    ):
        assert any("grouped matmuls" in note for note in predict(workload, mesh, parse_system(on)).notes) is says


def test_a_plan_says_what_room_for_any_routing_takes_of_memory():
    """DeepSeek-V3 over ep=64: at even routing a device has 1/32 of the rows that it has room for."""
    workload = Workload(model=PRESETS["deepseek-v3"], batch=512, seq_len=4096, remat="block")
    wide, narrow = (
        predict(workload, mesh, parse_system("v5p:8x8x8"), Strategy(attention="flash"))
        for mesh in (MeshShape(ep=64, fsdp=8), MeshShape(ep=4, fsdp=128))
    )
    assert any("a layer works with 52.0 GB" in note and "32x" in note for note in wide.notes)
    assert not any("a layer works with" in note for note in narrow.notes)


def test_a_plan_says_that_simulated_devices_exchange_rows_for_any_routing():
    bounded = replace(MOE, model=replace(MOE.model, experts=replace(MOE.model.experts, capacity_factor=1.25)))
    for workload, mesh, on, says in (
        (MOE, MeshShape(dp=2, ep=4), "cpu:8", "4x the rows"),
        (MOE, MeshShape(fsdp=8), "cpu:8", None),
        (MOE, MeshShape(dp=2, ep=4), "h100:8", None),
        (bounded, MeshShape(dp=2, ep=4), "cpu:8", None),
    ):
        found = [
            note for note in predict(workload, mesh, parse_system(on)).notes if "simulated devices exchange" in note
        ]
        assert len(found) == (says is not None)
        assert says is None or says in found[0]


def test_a_faster_plan_ties_only_within_the_error_of_a_comparison():
    best = find_best(LLAMA, V5P)

    def faster(share):
        seconds = (best.predicted.step_seconds or 0.0) * (1 - share)
        return replace(best, predicted=replace(best.predicted, step_seconds=seconds))

    assert str(gap_to(faster(0.02), best)).startswith("a tie: ")
    assert str(gap_to(faster(0.2), best)).startswith("faster by ")


@pytest.mark.parametrize(("dtype", "gradients"), [("fp8", "both gradients"), ("int8", "gradients of inputs")])
def test_a_plan_says_what_of_experts_runs_in_8_bits(dtype, gradients):
    """Every matmul of experts is rounded, forward and backward; routers and logits are not."""
    workload = Workload(model=PRESETS["mixtral-8x7b"], batch=64, seq_len=4096)
    plan = make_plan(workload, MeshShape(fsdp=4, ep=2), parse_system("h100:8"), Strategy(matmul_dtype=dtype))
    assert f"{dtype} in linear layers and experts, forward and {gradients}" in how(plan)
    rounded = {op.name: op.is_rounded for op in train_step(workload, plan.mesh, plan.strategy).ops.matmuls}
    assert {name.split(".")[-1] for name, is_rounded in rounded.items() if not is_rounded} == {"router", "unembedding"}
