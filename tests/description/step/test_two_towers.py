"""A step of no decoder: two towers over a shared table of embeddings, a dot product in the batch, a loss.

Written in the ops of `step.layer` and nothing else; sharded, differentiated, priced and planned as any model.
"""

from dataclasses import replace

import pytest

from meshwright.description.hardware.system import parse_system
from meshwright.description.step.layer import (
    Add,
    Block,
    CrossEntropy,
    DotProduct,
    Gated,
    Linear,
    Lookup,
    Program,
    Stack,
)
from meshwright.description.step.legality import check_mesh, check_runnable
from meshwright.description.step.model import ProgramModel
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import step_collectives
from meshwright.planning.cost.flops import model_flops, step_flops
from meshwright.planning.cost.memory import step_memory
from meshwright.planning.cost.table import op_table
from meshwright.planning.plan import make_plan
from meshwright.planning.prediction import predict
from meshwright.planning.search import find_best, rank
from meshwright.planning.space import whole_space
from meshwright.record import merge

ROWS, WIDTH = 1 << 17, 512
"""Of the table of embeddings."""

QUERY_MLP, ITEM_MLP = 2048, 1024
QUERY_LAYERS, ITEM_LAYERS = 4, 2


def tower(name, num_layers, mlp):
    """Layers that each add a gated MLP to the vectors of their tower."""

    def linear(name, source, inputs, outputs):
        return Linear(name=name, source=source, target=name, inputs=(inputs,), outputs=(outputs,))

    ops = (
        linear("gate", "stream", ("embed", WIDTH), ("mlp", mlp)),
        linear("up", "stream", ("embed", WIDTH), ("mlp", mlp)),
        Gated(sources=("gate", "up"), target="hidden", width=mlp),
        linear("down", "hidden", ("mlp", mlp), ("embed", WIDTH)),
        Add(sources=("down",)),
    )
    return Stack(name=name, num_layers=num_layers, blocks=(Block(name="mlp", ops=ops),))


def lookup(target):
    return Lookup(name="table", rows=("vocab", ROWS), columns=("embed", WIDTH), target=target)


TOWERS = ProgramModel(
    name="two towers",
    program=Program(
        embedding=(lookup("queries"), lookup("items")),
        stacks=(tower("query_tower", QUERY_LAYERS, QUERY_MLP), tower("item_tower", ITEM_LAYERS, ITEM_MLP)),
        logits=(
            DotProduct(name="similarity", left="query", right="item", target="logits", size=WIDTH),
            CrossEntropy(source="logits"),
        ),
    ),
)

WORKLOAD = Workload(model=TOWERS, batch=512, seq_len=8, remat="none")
TOKENS = 512 * 8
SYSTEM = parse_system("h100:8")
OF_WEIGHTS = 3 * WIDTH * (QUERY_LAYERS * QUERY_MLP + ITEM_LAYERS * ITEM_MLP)


def amounts(mesh, strategy=DEFAULT):
    """Bytes and runs of the collectives of a step by kind, axes, phase and array."""
    return {(m.kind, m.axes, m.phase, m.array): (m.bytes, m.count) for m in step_collectives(WORKLOAD, mesh, strategy)}


def test_its_parameters_are_those_of_both_towers_and_of_one_table():
    assert num_parameters(TOWERS) == ROWS * WIDTH + OF_WEIGHTS


def test_its_flops_are_those_of_both_towers_and_of_every_row_with_every_other():
    forward = 2 * TOKENS * OF_WEIGHTS + 2 * TOKENS**2 * WIDTH
    assert model_flops(WORKLOAD) == 3 * forward
    found = step_flops(WORKLOAD, MeshShape())
    assert (found.forward, found.recompute, found.backward) == (forward, 0, 2 * forward)
    for mesh in (MeshShape(dp=8), MeshShape(fsdp=4, tp=2), MeshShape(tp=8)):
        assert step_flops(WORKLOAD, mesh).total * 8 == 3 * forward


def test_what_backward_recomputes_is_all_but_the_last_product_of_a_layer():
    again = step_flops(replace(WORKLOAD, remat="block"), MeshShape()).recompute
    assert again == 2 * TOKENS * OF_WEIGHTS * 2 / 3


def test_copies_of_the_weights_sum_their_gradients():
    found = amounts(MeshShape(dp=8))
    each = 2 * WIDTH * QUERY_MLP
    assert found["all-reduce", ("dp",), "backward", "query_tower.up"] == (QUERY_LAYERS * each, QUERY_LAYERS)
    assert found["all-reduce", ("dp",), "backward", "table"] == (2 * ROWS * WIDTH, 1)


def test_every_device_gathers_the_items_of_the_batch_and_scatters_their_gradient():
    found = amounts(MeshShape(dp=8))
    assert found["all-gather", ("dp",), "forward", "item"] == (2 * TOKENS * WIDTH, 1)
    assert found["reduce-scatter", ("dp",), "backward", "item gradient"] == (2 * TOKENS * WIDTH, 1)


def test_a_table_that_both_towers_look_up_in_is_gathered_once():
    gathers = {key: value for key, value in amounts(MeshShape(fsdp=8)).items() if key[3] == "table"}
    assert gathers["all-gather", ("fsdp",), "forward", "table"] == (2 * ROWS * WIDTH, 1)
    assert gathers["reduce-scatter", ("fsdp",), "backward", "table"] == (2 * ROWS * WIDTH, 1)


def test_tensor_parallel_items_leave_a_softmax_to_be_summed():
    found = amounts(MeshShape(dp=2, tp=4))
    # The largest of each row, the sum, and the target's logit, in float32.
    assert found["all-reduce", ("tp",), "forward", "softmax"] == (3 * 4 * TOKENS // 2, 3)
    # Each device of tp has a quarter of the rows of each sequence, and of half of the sequences: it gathers the rest.
    assert found["all-gather", ("dp",), "forward", "item"] == (2 * TOKENS * WIDTH // 4, 1)
    assert found["all-gather", ("tp",), "forward", "query"] == (2 * TOKENS * WIDTH // 2, 1)


def test_its_states_are_stored_in_shards():
    for mesh, shards in ((MeshShape(dp=8), 1), (MeshShape(fsdp=8), 8), (MeshShape(fsdp=4, tp=2), 8)):
        memory = step_memory(WORKLOAD, mesh)
        assert memory["parameters"] == 4 * num_parameters(TOWERS) // shards
        assert memory["optimizer"] == 8 * num_parameters(TOWERS) // shards


def test_its_logits_are_held_in_float32():
    memory = step_memory(replace(WORKLOAD, batch=8192), MeshShape(dp=8), Strategy(optimizer="sgd"), kind="tpu")
    assert memory["logits"] >= 4 * (8 * TOKENS * 2) ** 2 // 8


@pytest.mark.parametrize("mesh", [MeshShape(dp=8), MeshShape(fsdp=4, tp=2), MeshShape(dp=2, fsdp=2, tp=2)], ids=str)
def test_its_table_of_ops_adds_up(mesh):
    rows = op_table(WORKLOAD, mesh, SYSTEM)
    assert sum(row.step_flops for row in rows) == step_flops(WORKLOAD, mesh).total
    moves = [move for row in rows for move in row.collectives]
    assert sum(move.bytes for move in moves) == sum(move.bytes for move in step_collectives(WORKLOAD, mesh))


def test_its_dot_product_is_written_in_the_notation():
    rows = [row for row in op_table(WORKLOAD, MeshShape(dp=4, tp=2), SYSTEM) if row.name == "similarity"]
    assert [row.notation for row in rows] == [
        "X[B_dp, S, D] @ item[I_tp, D] -> logits[B_dp, S, I_tp]",
        "dlogits[B_dp, S, I_tp] @ item[I_tp, D] -> dX[B_dp, S, D]{U_tp}",
        "X[B_dp, S, D] @ dlogits[B_dp, S, I_tp] -> ditem[I_tp, D]",
    ]


def test_a_step_takes_no_less_than_its_flops_at_the_peak():
    record = predict(WORKLOAD, MeshShape(dp=8), SYSTEM)
    assert record.step_seconds == pytest.approx(sum(record.breakdown_seconds.values()))
    assert record.step_seconds > record.flops / SYSTEM.peak("bf16")
    assert record.collectives == merge(record.collectives)


def test_twice_the_microbatches_multiply_half_of_the_rows_with_half_of_them():
    one, two = (step_flops(WORKLOAD, MeshShape(), Strategy(num_microbatches=parts)).total for parts in (1, 2))
    assert one - two == 3 * 2 * TOKENS**2 * WIDTH / 2


def test_the_best_mesh_is_the_fastest_that_fits_of_all_legal_ones():
    """The search against every way of every mesh, one by one."""
    space = whole_space(WORKLOAD, SYSTEM, ("none", "block"), num_microbatches=1)
    meshes = space.meshes()
    assert set(meshes) == {
        MeshShape(dp=dp, fsdp=fsdp, sp=sp, tp=8 // (dp * fsdp * sp))
        for dp in (1, 2, 4, 8)
        for fsdp in (1, 2, 4, 8)
        for sp in (1, 2, 4, 8)
        if dp * fsdp * sp in (1, 2, 4, 8)
    }
    every = [make_plan(space.with_remat(way.remat), mesh, SYSTEM, way.strategy) for mesh in meshes
             for way in space.candidates(mesh)]  # fmt: skip
    fastest = min(plan.predicted.step_seconds for plan in every if plan.predicted.fits)
    found = find_best(WORKLOAD, SYSTEM, remats=("none", "block"), num_microbatches=1)
    assert found.predicted.step_seconds == pytest.approx(fastest)


def test_a_table_that_fits_on_no_device_is_sharded():
    large = replace(TOWERS.program, embedding=tuple(
        replace(op, rows=("vocab", 1 << 25)) for op in TOWERS.program.embedding
    ))  # fmt: skip
    best = rank(replace(WORKLOAD, model=replace(TOWERS, program=large)), SYSTEM, top=1).plans[0]
    assert best.predicted.memory_bytes["parameters"] < 4 * (1 << 25) * WIDTH


def test_what_it_has_none_of_is_split_by_no_axis():
    for axis in ("ep", "pp"):
        with pytest.raises(MeshwrightError, match=f"{axis}=2, which would split nothing of two towers"):
            check_mesh(WORKLOAD, MeshShape(dp=4, **{axis: 2}))


def test_it_is_planned_and_not_run():
    with pytest.raises(MeshwrightError, match="two towers has ops of its own; it can be planned, and does not run"):
        check_runnable(TOWERS, MeshShape())
