"""What cannot be split, or would do nothing, is one line: the dim, the axis, both numbers, the nearest that can."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.legality import check_mesh
from meshwright.description.step.model import AttentionConfig, Experts, Norms
from meshwright.description.step.rules import RULES
from meshwright.description.step.strategy import DEFAULT, FrameworkProfile, Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape
from meshwright.planning.plan import as_run, make_plan
from meshwright.planning.space import run_attentions

TINY = PRESETS["tiny"]
MOE = replace(TINY, experts=Experts(count=8, num_active=2, mlp=64))
TWELVE = replace(TINY, num_heads=12, num_kv_heads=12, attention=AttentionConfig(qk_norm="all heads"))
"""A norm takes the mean of all heads, so that none are added."""

RING = Strategy(attention="flash", sp_method="ring")
ULYSSES = Strategy(attention="flash", sp_method="ulysses")


def refusal(model, mesh, strategy=DEFAULT, *, batch=16, seq_len=64):
    """Why a plan is not made."""
    workload = Workload(model=model, batch=batch, seq_len=seq_len, compute_dtype="f32")
    with pytest.raises(MeshwrightError) as error:
        make_plan(workload, mesh, parse_system(f"cpu:{mesh.num_devices}"), strategy)
    return str(error.value)


MESHES = [
    (
        (TINY, MeshShape(ep=2)),
        "mesh ep=2 has ep=2, which would split nothing of tiny; use ep=1 (the axes that split something are dp, fsdp,"
        " pp, sp, tp)",
    ),
    (
        (TINY, MeshShape(pp=4)),
        "mesh pp=4 has pp=4 stages for the 2 layers of tiny, so that some would split nothing; use pp in 1 to 2",
    ),
    ((TWELVE, MeshShape(tp=8)), "tp=8 cannot split kv_heads=12 of layers.query: 12 % 8 = 4; use tp=4"),
    ((TINY, MeshShape(tp=16)), "tp=16 cannot split kv_heads=8 of layers.query: 8 % 16 = 8; use tp=8"),
    ((MOE, MeshShape(ep=16)), "ep=16 cannot split expert=8 of layers.expert_gate: 8 % 16 = 8; use ep=8"),
    (
        (replace(TINY, mlp=250), MeshShape(tp=8)),
        "tp=8 cannot split mlp=250 of layers.gate: 250 % 8 = 2; use tp=2",
    ),
    (
        (replace(TINY, embed=100), MeshShape(fsdp=4, sp=2)),
        "fsdp*sp=8 cannot split embed=100 of embedding: 100 % 8 = 4; use fsdp*sp=4",
    ),
]

BATCHES = [
    ((TINY, MeshShape(dp=3)), {}, "batch 16 is not a multiple of dp*fsdp = 3*1 = 3; use 15 or 18"),
    ((TINY, MeshShape(dp=2, fsdp=4)), {"batch": 20}, "batch 20 is not a multiple of dp*fsdp = 2*4 = 8; use 16 or 24"),
    ((MOE, MeshShape(dp=2, ep=4)), {"batch": 4}, "batch 4 is not a multiple of dp*fsdp*ep = 2*1*4 = 8; use 8"),
    ((TINY, MeshShape(sp=3)), {}, "sequence length 64 is not a multiple of sp = 3; use 63 or 66"),
    (
        (TINY, MeshShape(sp=4, tp=4)),
        {"seq_len": 24},
        "sp*tp=16 cannot split sequence length=24: 24 % 16 = 8; use sp*tp=8",
    ),
    (
        (TINY, MeshShape(dp=4), Strategy(num_microbatches=8)),
        {},
        "num_microbatches=8 cannot cut a device's share of the batch, 16 over dp*fsdp=4: 4 % 8 = 4; use"
        " num_microbatches=4",
    ),
    (
        (TINY, MeshShape(sp=4), RING),
        {"seq_len": 36},
        "sequence length 36 cannot be cut into 8 parts, two for each of sp=4, as a ring in zigzag order needs:"
        " 36 % 8 = 4; use 32 or 40",
    ),
    (
        (PRESETS["tiny-qwen3.5"], MeshShape(sp=4), RING),
        {"seq_len": 24},
        "sequence length 24 has 3 tokens in each of 8 parts over sp=4, fewer than the 4 that a convolution of"
        " tiny-qwen3.5 reads; use 32 or more, or less sp",
    ),
]

IDLE = [
    (Strategy(zero_stage=1), "zero_stage=1", "fsdp*sp=1 stores no parameter in shards; use zero_stage=3"),
    (Strategy(zero_stage=0), "zero_stage=0", "fsdp*sp=1 stores no parameter in shards; use zero_stage=3"),
    (Strategy(schedule="gpipe"), "schedule='gpipe'", "pp=1 has no stages; use schedule='1f1b'"),
    (Strategy(virtual_stages=2), "virtual_stages=2", "pp=1 has no stages; use virtual_stages=1"),
    (
        Strategy(tp_stream="whole"),
        "tp_stream='whole'",
        "tp=1 splits no stream; use tp_stream='split'",
    ),
    (
        Strategy(collective_matmul=True),
        "collective_matmul=True",
        "tp=1 has no collectives; use collective_matmul=False",
    ),
    (RING, "sp_method='ring'", "sp=1 splits no sequence; use sp_method='gather'"),
    (ULYSSES, "sp_method='ulysses'", "sp=1 splits no sequence; use sp_method='gather'"),
    (
        Strategy(optimizer="sgd", moment_dtype="bf16"),
        "moment_dtype='bf16'",
        "sgd keeps no moments; use moment_dtype=None",
    ),
    (
        Strategy(master_weights=True),
        "master_weights=True",
        "parameters are float32 themselves; use master_weights=False",
    ),
]

METHODS = [
    (
        MeshShape(sp=4),
        Strategy(sp_method="ring"),
        "sp_method='ring' needs a fused attention: attention='flash'; scores that go through memory are made of"
        " gathered keys, sp_method='gather'",
    ),
    (
        MeshShape(sp=2),
        Strategy(attention="cudnn", sp_method="ring"),
        "attention='cudnn' works on whole sequences, sp_method='ring' on parts of them over sp=2; use"
        " sp_method='ulysses', or attention='flash'",
    ),
    (MeshShape(sp=16), ULYSSES, "tp*sp=16 cannot split kv_heads=8: 8 % 16 = 8; use tp*sp=8"),
]


@pytest.mark.parametrize(("asked", "said"), MESHES, ids=lambda value: value[:24] if isinstance(value, str) else "")
def test_a_mesh_that_cannot_split_a_model_is_one_line(asked, said):
    assert refusal(*asked) == said


@pytest.mark.parametrize(("asked", "sizes", "said"), BATCHES, ids=range(len(BATCHES)))
def test_a_batch_or_length_that_cannot_be_cut_is_one_line(asked, sizes, said):
    assert refusal(*asked, **sizes) == said


@pytest.mark.parametrize(("strategy", "field", "why"), IDLE, ids=[field for _, field, _ in IDLE])
def test_what_would_change_nothing_on_a_mesh_is_refused(strategy, field, why):
    assert refusal(TINY, MeshShape(dp=4), strategy) == f"{field} would have no effect on mesh dp=4: {why}"


def test_a_kernel_that_the_chip_has_not_is_refused():
    said = "attention='cudnn' is a kernel of NVIDIA GPUs, cpu:4 has none; use attention='flash'"
    assert refusal(TINY, MeshShape(dp=4), Strategy(attention="cudnn")) == said
    with pytest.raises(MeshwrightError, match="takes heads of up to 128 dims on b200, model gemma3-1b has 256; use"):
        make_plan(
            Workload(model=PRESETS["gemma3-1b"], batch=8, seq_len=64),
            MeshShape(dp=8),
            parse_system("b200:8"),
            Strategy(attention="cudnn"),
        )


def test_a_kernel_that_knows_no_documents_is_refused_for_packed_rows():
    packed = Workload(model=replace(TINY, head_dim=64), batch=8, seq_len=32, packed=True)
    with pytest.raises(MeshwrightError, match="attention='cudnn' takes one document a row"):
        make_plan(packed, MeshShape(dp=8), parse_system("h100:8"), Strategy(attention="cudnn"))
    assert "cudnn" not in run_attentions(packed, parse_system("h100:8"))
    assert "cudnn" in run_attentions(replace(packed, packed=False), parse_system("h100:8"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"z_loss": -1e-4}, "z_loss is -0.0001; it is a coefficient from 0"),
        ({"z_loss": 1e-4, "objective": "dpo"}, "and no z_loss=0.0001; leave it out"),
        ({"packed": True, "objective": "dpo"}, "and no packed=True; leave it out"),
    ],
)
def test_a_loss_that_is_none_is_refused(more, said):
    with pytest.raises(MeshwrightError, match=said):
        Workload(model=TINY, batch=8, seq_len=32, **more)


@pytest.mark.parametrize(("mesh", "strategy", "said"), METHODS, ids=["scores", "cudnn", "heads"])
def test_a_method_that_cannot_split_a_sequence_is_refused_in_a_plan_too(mesh, strategy, said):
    assert refusal(TINY, mesh, strategy) == said


RULES_REFUSED = [
    (
        {"embd": ("fsdp",)},
        "there is a rule for dim 'embd', which no array has; did you mean 'embed'? rules are for layers, ",
    ),
    ({"embed": ("model",)}, "the rule for 'embed' names axis 'model'; the axes are dp, fsdp, tp, sp, ep, pp"),
    (
        {"embed": ("tp",)},
        "embedding needs axis tp=2 on dims vocab and embed; an axis splits one dim only: take it out of the rule for"
        " one of them, or use tp=1",
    ),
]


@pytest.mark.parametrize(("rules", "said"), RULES_REFUSED, ids=["dim", "axis", "twice"])
def test_rules_that_cannot_be_are_refused(rules, said):
    workload, mesh = Workload(model=TINY, batch=16, seq_len=64), MeshShape(fsdp=2, tp=2)
    with pytest.raises(MeshwrightError) as error:
        check_mesh(workload, mesh, {**RULES, **rules})
    assert str(error.value).startswith(said)


def test_a_layout_takes_no_rule_of_a_dim_or_axis_that_does_not_exist():
    for rules, said in RULES_REFUSED[:2]:
        with pytest.raises(MeshwrightError) as error:
            ShardingContext(MeshShape(), {**RULES, **rules})
        assert str(error.value).startswith(said)


VALUES = [
    (
        lambda: Strategy(sp_method="rings"),
        "sp_method is 'rings'; did you mean ring? it is one of gather, ring, ulysses",
    ),
    (lambda: Strategy(zero_stage=4), "zero_stage is 4; it is one of 0, 1, 2, 3"),
    (lambda: Strategy(moment_dtype="f16"), "moment_dtype is 'f16'; did you mean bf16? it is one of bf16, f32, None"),
    (
        lambda: Workload(model=TINY, batch=1, seq_len=1, param_dtype="f16"),
        "param_dtype is 'f16'; did you mean bf16? it is one of bf16, f32",
    ),
    (lambda: Strategy(num_microbatches="x"), "num_microbatches is 'x'; it is a whole number"),
    (lambda: Strategy(dropout=True), "dropout is True; it is a number"),
    (lambda: Workload(model=TINY, batch=2.5, seq_len=1), "batch is 2.5; it is a whole number"),
    (lambda: replace(TINY, norms=Norms(kind="batch")), "kind is 'batch'; it is one of rms, layer"),
    (lambda: MeshShape(dp=2.0), "mesh axis dp=2.0; a degree is a whole number from 1"),
    (lambda: replace(MOE.experts, num_active=9), "9 active of 8 experts; the active are from 1 to all of them"),
    (
        lambda: replace(MOE.experts, capacity_factor=0.0),
        "experts have capacity_factor=0; it is above 0 and at most 10,000, or None where no token is dropped",
    ),
    (
        lambda: replace(MOE, experts=replace(MOE.experts, num_dense_layers=2)),
        "model tiny has num_dense_layers=2 of num_layers=2, which leaves no layer to its experts; use num_layers 3 or"
        " more",
    ),
    (
        lambda: replace(MOE, experts=replace(MOE.experts, num_dense_layers=1, layers=(False, True))),
        "model tiny has num_dense_layers=1 and layers=(False, True) of num_layers=2, which leaves no layer to its"
        " experts; use num_layers 3 or more",
    ),
    (
        lambda: replace(MOE.experts, layers=(False,)),
        "experts have layers=(False,); a cycle has at least one layer with experts",
    ),
]


@pytest.mark.parametrize(("make", "said"), VALUES, ids=range(len(VALUES)))
def test_a_value_that_cannot_be_is_refused_where_it_is_said(make, said):
    with pytest.raises(MeshwrightError) as error:
        make()
    assert str(error.value) == said


def test_what_a_plan_says_beyond_what_runs_is_refused_and_not_left_out():
    """Once verify and train took such a plan for one without it."""
    workload = Workload(model=TINY, batch=16, seq_len=64, compute_dtype="f32")
    plan = make_plan(
        workload, MeshShape(fsdp=4), parse_system("cpu:4"), Strategy(profile=FrameworkProfile(flat_buffers=True))
    )
    with pytest.raises(MeshwrightError, match=r"profile=flat_buffers=True can be planned, .* has profile=XLA"):
        as_run(plan)


def test_a_model_that_is_only_planned_says_so_once():
    workload = Workload(model=replace(TINY, planned_only=("a tail",)), batch=16, seq_len=64, compute_dtype="f32")
    with pytest.raises(MeshwrightError, match=r"^model tiny has a tail; it can be planned, and does not run yet$"):
        as_run(make_plan(workload, MeshShape(fsdp=4), parse_system("cpu:4"), Strategy()))
