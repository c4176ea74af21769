"""What stages in lockstep run, and what they move: in the ticks of the bubble too, and for each other."""

from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.blocks import program
from meshwright.description.step.passes.pipeline import EMBEDDING, KEPT_INPUTS, LOGITS, STAGES, repeats
from meshwright.description.step.strategy import STAGES_APART, Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import step_collectives, untaken_branch_collectives
from meshwright.planning.cost.flops import step_flops, untaken_branch_flops
from meshwright.planning.plan import as_run
from meshwright.planning.prediction import predict

MODEL = replace(PRESETS["tiny"], num_layers=8)
WORKLOAD = Workload(model=MODEL, batch=16, seq_len=32, compute_dtype="f32")
STREAM = 16 * 32 * MODEL.embed * 4
FOUR = Strategy(num_microbatches=4)
TWICE = replace(FOUR, virtual_stages=2)
TWO = MeshShape(pp=2)

REGIONS = ("layers", EMBEDDING, LOGITS, STAGES)

RUNS = [
    (8, MeshShape(), FOUR, (32, 4, 4, 4), {}),
    (8, MeshShape(pp=2), replace(FOUR, profile=STAGES_APART.profile), (16, 4, 4, 4), {}),
    (8, MeshShape(pp=2), FOUR, (20, 5, 4, 5), {}),
    (7, MeshShape(pp=4), FOUR, (14, 7, 4, 7), {}),
    (8, TWO, TWICE, (18, 4, 4, 9), {EMBEDDING: 9, LOGITS: 6}),
    (5, TWO, TWICE, (18, 4, 4, 9), {EMBEDDING: 9, LOGITS: 6}),
]
"""How often a device executes `REGIONS`, and the regions that stand more often in the program's text."""


@pytest.mark.parametrize(("layers", "mesh", "strategy", "executed", "in_text"), RUNS)
def test_a_step_runs_its_parts_in_every_tick(layers, mesh, strategy, executed, in_text):
    found = repeats(program(replace(MODEL, num_layers=layers)), mesh, strategy)
    runs = dict(zip(REGIONS, executed, strict=True))
    assert {name: found[name].executed for name in REGIONS} == runs
    assert {name: found[name].static for name in REGIONS} == runs | in_text
    assert found[EMBEDDING].useful == found[LOGITS].useful == 4
    assert found[STAGES].useful == 4 * strategy.virtual_stages


def over_pp(strategy, mesh=TWO):
    """The permutes over pp of a step as it runs: phase, array, times and bytes."""
    moves = step_collectives(WORKLOAD, mesh, strategy, counted="executed")
    return {(m.phase, m.array): (m.count, m.bytes) for m in moves if m.kind == "collective-permute"}


def test_stages_in_lockstep_hand_on_in_every_tick_and_keep_for_each_other():
    each = STREAM // 4
    # Of two stages the last tick's gradient goes nowhere.
    assert over_pp(FOUR) == {
        ("forward", "stream"): (5, 5 * each),
        ("backward", "stream"): (4, 4 * each),
        ("forward", KEPT_INPUTS): (5, 5 * 4 * each),
    }
    assert over_pp(FOUR, MeshShape(pp=4))["backward", "stream"] == (7, 7 * each)
    for way in ({"schedule": "gpipe"}, {"virtual_stages": 2}):
        assert KEPT_INPUTS not in {array for _, array in over_pp(replace(FOUR, **way))}


def test_stages_of_their_own_programs_move_the_stream_alone():
    """As Megatron-LM's do (arXiv:2104.04473): nothing is shared, and nothing kept for others."""
    moves = step_collectives(WORKLOAD, MeshShape(pp=2), replace(FOUR, profile=STAGES_APART.profile), counted="executed")
    assert {move.array for move in moves if "pp" in move.axes} == {"stream"}
    assert sum(move.bytes for move in moves if "pp" in move.axes) == 2 * STREAM


def test_ticks_of_the_bubble_are_counted_but_take_no_time_of_their_own():
    """What they move is in bytes and seconds; that nothing hides it is in the bubble."""
    mesh, system = MeshShape(pp=2, tp=4), parse_system("v5e:2x4")
    record = predict(WORKLOAD, mesh, system, FOUR)
    (gather,) = (c for c in record.collectives if (c.kind, c.axes, c.phase) == ("all-gather", ("tp",), "recompute"))
    assert gather.count == 5 * 4 * 2
    assert gather.exposed_seconds == pytest.approx(gather.seconds * 4 / 5)
    assert sum(c.exposed_seconds or 0 for c in record.collectives) == pytest.approx(
        record.breakdown_seconds["exposed communication"]
    )


PLAIN = replace(PRESETS["tiny-moe-shared"], num_layers=5)
"""One plain layer before four of experts."""


def over_pp_alone(mesh, parts):
    """The bytes of activations that a step of `PLAIN` moves over pp, by kind, phase and array."""
    moves = step_collectives(replace(WORKLOAD, model=PLAIN), mesh, Strategy(num_microbatches=parts))
    return {(m.kind, m.phase, m.array): m.bytes for m in moves if m.axes == ("pp",) and "dense" not in m.array}


@pytest.mark.parametrize(("parts", "share"), [(4, 2), (8, 2), (16, 1)])
def test_stages_share_the_plain_layers_before_those_of_experts_where_they_divide_the_sequences(parts, share):
    """16 microbatches have one sequence each, which both stages have whole."""
    assert PLAIN.experts is not None
    alone = replace(PLAIN, num_layers=4, experts=replace(PLAIN.experts, num_dense_layers=0))
    strategy, flops = Strategy(num_microbatches=parts), {}
    for mesh in (MeshShape(), TWO):
        both, staged = (step_flops(replace(WORKLOAD, model=m), mesh, strategy).total for m in (PLAIN, alone))
        flops[mesh] = both - staged
    assert flops[TWO] == pytest.approx(flops[MeshShape()] * (parts + 1) / parts / share)
    notes = predict(replace(WORKLOAD, model=PLAIN), TWO, parse_system("cpu:2"), strategy).notes
    told = [
        note for note in notes if note.endswith("1 of 5: pp=2 does not divide a device's sequences of a microbatch, 1")
    ]
    assert len(told) == (share == 1)


def test_a_stream_that_stages_share_is_scattered_and_gathered_over_pp():
    stream = 16 * 32 * PLAIN.embed * 4
    found = over_pp_alone(TWO, 4)
    for kind, phase, array in (
        ("reduce-scatter", "forward", "embedding"),
        ("all-gather", "forward", "first stage's stream"),
        ("reduce-scatter", "recompute", "embedding"),
        ("reduce-scatter", "backward", "first stage's gradient"),
        ("all-gather", "backward", "embedding gradient"),
    ):
        assert found[kind, phase, array] == stream
    whole = over_pp_alone(TWO, 16)
    assert whole["all-reduce", "forward", "embedding"] == stream
    assert whole["all-reduce", "backward", "first stage's gradient"] == stream
    assert ("all-gather", "forward", "first stage's stream") not in whole


def test_flops_are_of_every_tick_and_of_shared_logits():
    alone, two = (step_flops(WORKLOAD, mesh, Strategy(num_microbatches=4)) for mesh in (MeshShape(), MeshShape(pp=2)))
    logits = 3 * 2 * WORKLOAD.tokens * MODEL.embed * MODEL.vocab
    assert two.total == pytest.approx((alone.total - logits) / 2 * 5 / 4 + logits / 2)


def test_what_the_text_says_of_branches_is_beyond_the_plan():
    mesh, interleaved = MeshShape(pp=2), replace(FOUR, virtual_stages=2)
    assert untaken_branch_collectives(WORKLOAD, mesh, FOUR) == ()
    assert untaken_branch_flops(WORKLOAD, mesh, FOUR) == 0
    more = {(move.array, move.phase): move.count for move in untaken_branch_collectives(WORKLOAD, mesh, interleaved)}
    assert more["embedding", "forward"] == 9 - 4
    assert more["softmax", "forward"] == 3 * (6 - 4)
    logits = 3 * 2 * WORKLOAD.tokens * MODEL.embed * MODEL.vocab / 2
    assert untaken_branch_flops(WORKLOAD, mesh, interleaved) == pytest.approx(logits * (6 / 4 - 1))


@pytest.mark.parametrize(
    ("model", "mesh", "parts", "schedule", "remat", "targets", "compiled"),
    [
        ("tiny", "fsdp=2,sp=2,pp=2", 1, "gpipe", "attention", "down", 395_575_296),
        ("tiny-gpt2", "fsdp=2,sp=2,pp=2", 2, "gpipe", "matmuls", "down", 276_955_136),
        ("tiny-gpt2", "tp=4,pp=2", 4, "gpipe", "attention", "query,value", 259_129_344),
        ("tiny-gemma2", "fsdp=2,tp=2,pp=2", 1, "gpipe", "matmuls", "output", 468_451_328),
        ("tiny", "fsdp=4,pp=2", 4, "1f1b", "block", "query,value", 423_755_776),
    ],
)
def test_the_last_tick_runs_what_trained_matmuls_need(model, mesh, parts, schedule, remat, targets, compiled):
    """Flops that jaxlib 0.10.2 compiled for two stages of a layer each, of which the first has no trained input."""
    plan = mw.plan(
        replace(PRESETS[model], num_layers=2), on="cpu:8", mesh=mesh, batch=16, seq_len=64, num_microbatches=parts,
        schedule=schedule, remat=remat, lora_rank=4, lora_targets=targets,
    )  # fmt: skip
    assert as_run(plan).predicted.flops == compiled
