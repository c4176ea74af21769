"""What a step costs, predicted, against the program that the compiler makes of it."""

import math
from dataclasses import asdict, replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.records import read_hlo
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import REMATS, Workload
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.training.step import lower_train_step
from meshwright.mesh import MeshShape, parse_mesh
from meshwright.planning.cost.arguments import argument_bytes
from meshwright.planning.cost.comm_volume import step_collectives
from meshwright.planning.cost.elementwise import OF_EXPERTS
from meshwright.planning.cost.flops import model_flops, step_flops
from meshwright.planning.prediction import predict
from meshwright.proof.verification.comparison import compare, in_plans_terms
from meshwright.proof.verification.differences import Cause, Difference
from meshwright.record import merge

TINY = Workload(
    model=replace(PRESETS["tiny"], embed=64, mlp=128, num_heads=16), batch=16, seq_len=32, compute_dtype="f32"
)

STEPS = [
    ("1,1,1,1", TINY),
    ("2,2,2,1", replace(TINY, compute_dtype="bf16")),
    ("2,2,2,1", replace(TINY, remat="offload")),
    ("1,2,1,1", replace(TINY, model=replace(TINY.model, num_layers=5))),
]


@pytest.mark.parametrize(("mesh_dim", "workload"), STEPS, ids=lambda v: v if isinstance(v, str) else v.remat)
def test_flops_arguments_and_every_collective_are_what_the_compiler_makes(mesh_dim, workload):
    """To the flop and to the byte, by kind, mesh axes and phase, as of every row of `kit_rows.py`."""
    shape = parse_mesh(mesh_dim, num_devices=math.prod(map(int, mesh_dim.split(","))))
    compiled = lower_train_step(build_mesh(shape, _devices(shape)), workload=asdict(workload)).compile()
    hardware = f"cpu:{shape.num_devices}"
    found = in_plans_terms(read_hlo(compiled.as_text(), shape.layout, hardware=hardware))
    planned = predict(workload, shape, parse_system(hardware))
    assert found.flops == planned.flops
    assert compiled.memory_analysis().argument_size_in_bytes == argument_bytes(workload, shape)
    assert _amounts(found.collectives) == _amounts(planned.collectives)


@pytest.mark.parametrize("remat", REMATS)
def test_chunks_of_queries_make_their_scores_again_once(remat, monkeypatch):
    """A name inside the chunks would keep the scores of all of them under `none`: it once did."""
    for module in ("execution.models.attention", "description.step.train", "description.step.workload"):
        monkeypatch.setattr(f"meshwright.{module}.num_query_chunks", lambda seq_len: 4)
    # Of a batch that no other test has: steps are cached by their workload.
    shape, workload = parse_mesh("1,2,1,1", num_devices=2), replace(TINY, remat=remat, batch=24)
    compiled = lower_train_step(build_mesh(shape, _devices(shape)), workload=asdict(workload)).compile()
    found = in_plans_terms(read_hlo(compiled.as_text(), shape.layout, hardware="cpu:2"))
    assert found.flops == step_flops(workload, shape).total


def _devices(shape):
    import jax

    return jax.devices()[: shape.num_devices]


def _amounts(collectives):
    return {(c.kind, c.axes, c.phase): c.bytes for c in collectives}


def test_a_difference_is_named():
    """A plan for another remat policy than the one compiled is not what the program does, and the rows say where."""
    shape = parse_mesh("1,2,4,1", num_devices=8)
    compiled = lower_train_step(build_mesh(shape), workload=asdict(TINY)).compile()
    found = in_plans_terms(read_hlo(compiled.as_text(), shape.layout, hardware="cpu:8"))
    other = predict(replace(TINY, remat="none"), shape, parse_system("cpu:8"))
    rows = {row.quantity: row for row in compare(other, found, argument_bytes=argument_bytes(TINY, shape))}
    assert rows["all-gather tp recompute"].causes == (Cause(difference=Difference.NOT_PREDICTED),)
    assert rows["all-gather tp recompute"].exceeds(10.0)
    assert rows["flops"].relative > 0
    assert rows["all-gather tp forward"].is_equal


def test_model_flops_are_six_a_parameter_and_token_and_the_scores():
    """PaLM, arXiv:2204.02311, appendix B: 6 N + 12 L H Q T a token, N without the table that is only looked up."""
    workload = Workload(model=PRESETS["llama3-8b"], batch=4, seq_len=8192)
    model = workload.model
    multiplied = num_parameters(model) - model.vocab * model.embed - (2 * model.num_layers + 1) * model.embed
    scores = 12 * model.num_layers * model.num_heads * model.head_dim * 8192
    assert model_flops(workload) == workload.tokens * (6 * multiplied + scores)


def test_executed_flops_are_the_models_where_nothing_is_recomputed():
    """But for a quarter of attention's, 12 L H Q T a token, where a device has the whole sequence."""
    kept, model = replace(TINY, remat="none"), TINY.model
    assert step_flops(kept, MeshShape(dp=2, tp=2, sp=2)).total * 8 == model_flops(TINY)
    hidden = 12 * model.num_layers * model.num_heads * model.head_dim * TINY.seq_len / 4
    mesh = MeshShape(dp=2, fsdp=2, tp=2)
    assert step_flops(kept, mesh).total * 8 == model_flops(TINY) - TINY.tokens * hidden
    assert step_flops(TINY, mesh).total * 8 > model_flops(TINY)


def test_whole_block_remat_stays_under_four_thirds():
    """A third more would be every product again; that of the mlp's last weight and the logits are not.

    With sp, so that all scores are made.
    """
    workload = Workload(model=PRESETS["llama2-7b"], batch=16, seq_len=1024)
    assert 1.25 < 2 * step_flops(workload, MeshShape(sp=2)).total / model_flops(workload) < 4 / 3


def test_llama3_8b_gathers_its_16_gb_over_fsdp_each_way():
    """8.03 billion parameters in bf16 are 16.06 GB; the layers' 13.96 GB of them again for backward."""
    workload = Workload(model=PRESETS["llama3-8b"], batch=64, seq_len=2048)
    amounts = _amounts(merge(step_collectives(workload, MeshShape(fsdp=64))))
    assert amounts["all-gather", ("fsdp",), "forward"] == pytest.approx(16.06e9, rel=1e-3)
    assert amounts["all-gather", ("fsdp",), "recompute"] == pytest.approx(13.96e9, rel=1e-3)
    assert amounts["reduce-scatter", ("fsdp",), "backward"] == pytest.approx(16.06e9, rel=1e-3)


@pytest.mark.parametrize(("mesh", "copies"), [(MeshShape(fsdp=8), 1), (MeshShape(ep=8), 1), (MeshShape(tp=2, ep=4), 2)])
def test_tokens_are_moved_to_their_experts_and_back_through_memory(mesh, copies):
    """Each device moves k rows of each token of its tp group; 12 k bytes an element of the stream in all."""
    workload = Workload(model=PRESETS["mixtral-8x7b"], batch=8, seq_len=4096, remat="none")
    step = train_step(workload, mesh)
    passes = [op for op in step.ops.computing["layers"].rest if getattr(op, "kind", "") in OF_EXPERTS]
    assert {(op.kind, op.phase) for op in passes} == {
        (kind, phase) for kind in ("dispatch", "combine") for phase in ("forward", "backward")
    }
    elements = copies * workload.tokens / 8 * 2 * workload.model.embed
    assert {step.extents.local(op.arrays[0]) for op in passes} == {elements}
    assert sum(one.forward_bytes + one.backward_bytes for one in OF_EXPERTS.values()) == 12
