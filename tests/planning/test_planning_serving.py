from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.load import DATA
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.serving import Serving, ServingLayout, check_serving
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.serving_bytes import serving_memory
from meshwright.planning.cost.serving_seconds import serving_step
from meshwright.planning.serving.plan import (
    ServingSpeed,
    make_serving_plan,
    planned_speed,
    read_serving_plan,
    write_serving_plan,
)
from meshwright.planning.serving.search import best_prefill, rank_serving, serving_layouts, serving_meshes
from meshwright.planning.why.serving import prefill_share, serving_gap, thresholds, why_serving

V5E = parse_system("v5e:2x2")
LLAMA = Serving(model=PRESETS["llama2-7b"], prompt_len=1984, output_len=64, weight_dtype="int8", kv_dtype="int8")
BIG = Serving(model=PRESETS["llama3-70b"], prompt_len=8000, output_len=192, weight_dtype="int8", kv_dtype="int8")


def every_step(serving, system):
    """(seconds, tokens a second) of every legal layout at every batch that fits, the slow way."""
    for mesh in serving_meshes(serving, system.num_devices):
        for layout in serving_layouts(serving, mesh):
            try:
                check_serving(serving, layout)
            except MeshwrightError:
                continue
            laid, batch = lay_mesh(system, mesh.layout), layout.num_groups
            while serving_memory(serving, layout, batch)["peak"] <= system.usable_bytes:
                seconds = serving_step(serving, layout, batch, laid).seconds
                yield seconds, batch / seconds
                batch += layout.num_groups


@pytest.mark.parametrize("latency", [0.008, 0.012, 0.03])
def test_the_search_finds_what_trying_everything_finds(latency):
    """No more than 0.01% are lost where a collective's time steps up from its hops to its bytes."""
    in_time = [rate for seconds, rate in every_step(LLAMA, V5E) if seconds <= latency]
    best = rank_serving(replace(LLAMA, latency_seconds=latency), V5E).candidates[0]
    assert best.seconds <= latency
    assert max(in_time) * (1 - 1e-4) <= best.tokens_per_second <= max(in_time)


def test_without_a_latency_the_shortest_step_is_first():
    best = rank_serving(LLAMA, V5E).candidates[0]
    assert best.seconds == min(seconds for seconds, _ in every_step(LLAMA, V5E))


def test_no_point_of_the_frontier_is_beaten_and_nothing_beats_it_by_much():
    """Between powers of two a batch may be better than the frontier's, by less than what lies between its points."""
    frontier = rank_serving(LLAMA, V5E).frontier
    for fast, slow in pairwise(frontier):
        assert fast.seconds < slow.seconds
        assert fast.tokens_per_second < slow.tokens_per_second
    steps = list(every_step(LLAMA, V5E))
    assert frontier[0].seconds == min(seconds for seconds, _ in steps)
    assert frontier[-1].tokens_per_second == max(rate for _, rate in steps)


def test_what_is_in_time_comes_before_what_is_late_and_what_fits_before_what_does_not():
    plans = rank_serving(replace(BIG, latency_seconds=0.02), parse_system("v5e:4x4")).candidates
    kinds = [(not plan.predicted.fits, not plan.is_in_time) for plan in plans if plan.predicted.fits]
    assert kinds == sorted(kinds)
    assert [bool(plan.predicted.fits) for plan in plans] == sorted(
        (bool(p.predicted.fits) for p in plans), reverse=True
    )
    rates = [plan.tokens_per_second for plan in plans if plan.predicted.fits and plan.is_in_time]
    assert rates == sorted(rates, reverse=True)


def test_a_batch_that_is_said_is_kept():
    ranking = rank_serving(replace(LLAMA, batch=24), V5E)
    assert {plan.batch for plan in ranking.candidates} == {24}
    assert {point.batch for point in ranking.frontier} == {24}
    steps = [plan.seconds for plan in ranking.candidates if plan.predicted.fits]
    assert steps == sorted(steps)


def test_one_mesh_alone_is_priced_with_every_split_of_its_cache():
    plans = rank_serving(BIG, parse_system("v5e:4x4"), MeshShape(tp=8, sp=2)).candidates
    assert {(str(plan.mesh), plan.cache) for plan in plans} == {
        ("tp=8,sp=2", cache) for cache in ("heads", "batch", "sequence")
    }


def test_tp_takes_kv_heads_before_sp_takes_what_is_left():
    """32 devices, 8 kv heads: sp beyond 1 only where tp has all of them."""
    found = {(mesh.tp, mesh.sp) for mesh in serving_meshes(BIG, 32)}
    assert (8, 4) in found
    assert (4, 2) not in found
    assert all(mesh.sp == 1 for mesh in serving_meshes(replace(BIG, model=PRESETS["deepseek-v3"]), 32))


def test_what_does_not_fit_says_by_how_much():
    system = parse_system("v5e:2x2")
    ranking = rank_serving(replace(BIG, latency_seconds=0.03), system)
    assert ranking.num_fit == 0
    assert ranking.frontier == ()
    best = ranking.candidates[0]
    memory = best.predicted.memory_bytes
    assert memory["peak"] == min(plan.predicted.memory_bytes["peak"] for plan in ranking.candidates)
    lines = [str(fact) for fact in why_serving(best, system)]
    assert lines[0].startswith("nothing fits: 18.2 GB of weights and 336 MB of cache a device at batch 1 need")
    assert prefill_share(best, system) is None
    other = ranking.candidates[1]
    assert str(serving_gap(other, best, system)).endswith("GB too much")


def test_what_is_late_says_by_how_much():
    system = parse_system("v5e:4x4")
    ranking = rank_serving(replace(BIG, latency_seconds=0.001), system)
    best = ranking.candidates[0]
    assert not best.is_in_time
    assert best.seconds == min(plan.seconds for plan in ranking.candidates if plan.predicted.fits)
    assert "nothing is in time: the shortest step is" in str(why_serving(best, system)[0])
    assert " late at batch " in str(serving_gap(ranking.candidates[1], best, system))


def test_what_keeps_the_batch_is_named():
    """One split of the cache alone, so that both are of the same layout."""
    system, mesh = parse_system("v5e:4x4"), MeshShape(dp=2, tp=8)
    tight, loose = (rank_serving(replace(BIG, latency_seconds=s), system, mesh).candidates[0] for s in (0.02, 1.0))
    late = make_serving_plan(replace(tight.serving, batch=tight.batch + 2), tight.layout, system)
    assert late.seconds > 0.02
    said = f"latency limits the batch: batch {late.batch} takes 20.3 ms; {loose.batch} fit in memory"
    assert said in map(str, why_serving(tight, system))
    assert any(
        f"memory limits the batch: batch {loose.batch + 2} needs" in line
        for line in map(str, why_serving(loose, system))
    )


def test_each_runner_up_loses_for_one_reason():
    system = parse_system("v5e:4x4")
    ranking = rank_serving(replace(BIG, latency_seconds=0.03), system)
    best, *others = ranking.candidates
    assert str(serving_gap(best, best, system)) == "-"
    reasons = [str(serving_gap(plan, best, system)) for plan in others if plan.predicted.fits and plan.is_in_time]
    assert all("+" in reason and reason.endswith("/token") for reason in reasons)
    replicas = next(plan for plan in others if plan.mesh == MeshShape(dp=2, tp=8))
    assert str(serving_gap(replicas, best, system)).startswith("HBM weights +")  # each of the two reads them all


def test_as_many_prompts_are_prefilled_as_sequences_end():
    """Systems that prefill, times the prompts a second of one, are the sequences a second that end on one."""
    system = parse_system("v5e:4x4")
    plan = rank_serving(replace(BIG, latency_seconds=0.03), system).candidates[0]
    share = prefill_share(plan, system)
    prompts = share.plan.batch / share.plan.seconds
    assert share.systems * prompts == pytest.approx(plan.tokens_per_second / 192)
    assert share.plan.tokens_per_second == best_prefill(plan.serving, system).tokens_per_second


def test_thresholds_are_those_of_the_plan():
    plan = make_serving_plan(replace(LLAMA, batch=8), ServingLayout(MeshShape(tp=4)), V5E)
    found = thresholds(plan, V5E)
    assert found.compute_bound == pytest.approx(120.12, abs=0.01)
    # 7.01e9 bytes of weights over 2,048 tokens x 2 x 32 x 32 x 128 bytes; the table and the head have two an element.
    assert found.equal_reads == pytest.approx(13.06, abs=0.01)


@pytest.mark.parametrize("name", ["serve.yaml", "serve.json"])
@pytest.mark.parametrize("model", ["llama2-7b", "deepseek-v3"])
def test_a_plan_survives_its_file(tmp_path, name, model):
    serving = replace(LLAMA, model=PRESETS[model], latency_seconds=0.02)
    plan = rank_serving(serving, parse_system("v5p:2x2x1"), MeshShape(tp=4)).candidates[0]
    write_serving_plan(plan, tmp_path / name)
    assert read_serving_plan(tmp_path / name) == plan
    assert make_serving_plan(plan.serving, plan.layout, plan.system) == plan


def test_a_plan_keeps_the_file_of_its_chip_and_its_headroom(tmp_path):
    own = tmp_path / "mine.toml"
    own.write_text((DATA / "h100.toml").read_text().replace('name = "h100"', 'name = "mine"'))
    system = replace(parse_system("mine:8", hardware_file=str(own)), memory_headroom=0.2)
    plan = make_serving_plan(replace(LLAMA, batch=8), ServingLayout(MeshShape(tp=8)), system)
    write_serving_plan(plan, tmp_path / "serve.yaml")
    assert read_serving_plan(tmp_path / "serve.yaml").system == system


def test_a_plan_whose_prediction_is_cut_or_edited_is_predicted_again_and_says_so(tmp_path):
    """A file that was cut in its prediction, or had another number there, was taken as it was."""
    plan = make_serving_plan(replace(LLAMA, batch=8), ServingLayout(MeshShape(tp=4)), V5E)
    path = tmp_path / "serve.yaml"
    write_serving_plan(plan, path)
    text = path.read_text()
    for other in (
        text[: text.index("breakdown_seconds")],
        text.replace("step_seconds: 0.", "step_seconds: 1."),
    ):
        path.write_text(other)
        found = read_serving_plan(path)
        assert found.predicted.notes[0].startswith(f"predicted again: {path} was edited, or written by another version")
        assert replace(found.predicted, notes=plan.predicted.notes) == plan.predicted
    path.write_text(text[: text.index("predicted:")])
    with pytest.raises(MeshwrightError, match="is not a whole serving plan: predicted is missing"):
        read_serving_plan(path)
    path.write_text(text + "prediction: 1\n")
    with pytest.raises(MeshwrightError, match="is not a whole serving plan: prediction is not a known field"):
        read_serving_plan(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"is not a serving plan of format 1; `meshwright plan … --serve decode -o"),
        ("meshwright_plan: 1", "is not a serving plan of format 1"),
        ("meshwright_serving_plan: 1", "is not a whole serving plan: serving is missing"),
        ("[", "is not YAML"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, text, message):
    (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(MeshwrightError, match=message):
        read_serving_plan(tmp_path / "serve.yaml")
    with pytest.raises(MeshwrightError, match="no serving plan"):
        read_serving_plan(tmp_path / "other.yaml")
    (tmp_path / "serve.json").write_text("[")
    with pytest.raises(MeshwrightError, match="is not JSON"):
        read_serving_plan(tmp_path / "serve.json")


def test_a_dtype_that_the_chip_has_not_is_refused():
    with pytest.raises(MeshwrightError, match="v5e has no peak for fp8"):
        rank_serving(replace(LLAMA, compute_dtype="fp8"), V5E)


def test_where_no_layout_is_legal_one_refusal_is_told():
    odd = replace(LLAMA, batch=7)
    with pytest.raises(
        MeshwrightError, match="none of 1 layouts can serve llama2-7b on 4 devices; for one, dp=4: batch 7"
    ):
        rank_serving(odd, V5E, MeshShape(dp=4))


def test_deepseek_v3_decodes_on_hopper_within_its_stated_error():
    """14.8k tokens a second on 8 H800s, at 20 to 22 a sequence, 4,989 kept on average (github.com/deepseek-ai/
    open-infra-index, day 6: 144 GPUs). Predicted 37% under it: exchanges there hide behind a second
    microbatch, and small kernels are fused.
    """
    serving = Serving(
        model=PRESETS["deepseek-v3"],
        prompt_len=4489,
        output_len=500,
        weight_dtype="fp8",
        compute_dtype="fp8",
        latency_seconds=1 / 21,
    )
    plan = rank_serving(serving, parse_system("h100:128"), MeshShape(ep=128)).candidates[0]
    assert plan.tokens_per_second / 16 / 14_800 - 1 == pytest.approx(-0.37, abs=0.02)
    without = plan.seconds - plan.predicted.breakdown_seconds["communication"]
    assert plan.batch / without / 16 > 14_800


def test_the_speed_of_texts_is_that_of_the_plans_of_their_steps():
    layout, system = ServingLayout(MeshShape(dp=2, tp=8)), parse_system("v5e:4x4")
    texts = Serving(model=PRESETS["llama3-8b"], prompt_len=600, output_len=100, batch=5)
    found = planned_speed(texts, layout, system, prompts=1, chunk=256)
    read = replace(texts, phase="prefill", chunk=256, batch=2)
    # Prompts of 600 tokens are 3 chunks of up to 256; batches are filled up to what dp splits.
    assert found == ServingSpeed(
        first_token_seconds=3 * make_serving_plan(read, layout, system).seconds,
        step_seconds=make_serving_plan(replace(texts, batch=6), layout, system).seconds,
        batch=6,
    )
    assert planned_speed(texts, ServingLayout(MeshShape(tp=64)), system, prompts=1) is None


def test_prompts_of_many_tokens_gather_weights_where_that_is_faster():
    """PaLM 540B read a million tokens at 76% MFU on 64 TPU v4 so (arXiv:2211.05102, abstract)."""
    system = parse_system("v4:4x4x4")
    palm = Serving(model=PRESETS["palm-540b"], phase="prefill", prompt_len=2048, output_len=1, batch=512)
    gathered = make_serving_plan(palm, ServingLayout(MeshShape(fsdp=64), "batch"), system)
    stationary = make_serving_plan(palm, ServingLayout(MeshShape(fsdp=64), "sequence"), system)
    assert gathered.predicted.mfu == pytest.approx(0.76, rel=0.08)
    assert gathered.seconds < 0.5 * stationary.seconds
    llama = Serving(model=PRESETS["llama3-70b"], phase="prefill", prompt_len=2048, output_len=1, weight_dtype="int8")
    on = parse_system("v5e:4x4")
    assert rank_serving(replace(llama, batch=64), on).candidates[0].layout.cache == "batch"
    assert rank_serving(replace(llama, batch=1), on).candidates[0].layout.cache != "batch"


def test_weights_are_not_gathered_where_the_runtime_has_no_layout_for_it():
    for model, mesh in (("mixtral-8x7b", MeshShape(fsdp=8)), ("llama3-8b", MeshShape(fsdp=4, sp=2))):
        serving = Serving(model=PRESETS[model], phase="prefill", prompt_len=64, output_len=1, batch=8)
        with pytest.raises(MeshwrightError, match="weights are gathered over fsdp alone"):
            make_serving_plan(serving, ServingLayout(mesh, "batch"), parse_system("v5e:2x4"))
