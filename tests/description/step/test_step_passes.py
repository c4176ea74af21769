"""Each pass over a step, one fact a test: shard, differentiate, rematerialize, microbatch, pipeline, optimizer."""

from dataclasses import replace

import pytest

from meshwright.description.families.adapters import with_adapters
from meshwright.description.families.registry import PRESETS
from meshwright.description.notation.expression import Chain, Einsum, Stage
from meshwright.description.notation.inference import infer
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.steps import Communicate
from meshwright.description.step import ir
from meshwright.description.step.blocks import program
from meshwright.description.step.ir import Array, Dim, Matmul, Region
from meshwright.description.step.model import Experts
from meshwright.description.step.passes.differentiate import backward_ops, gathers, scatters, sums
from meshwright.description.step.passes.microbatch import extents_of
from meshwright.description.step.passes.nodes import Core, Move, Product, Vector, Weight, moves_between
from meshwright.description.step.passes.optimizer import update_moves
from meshwright.description.step.passes.pipeline import EMBEDDING, KEPT_INPUTS, LOGITS, repeats, stage_moves
from meshwright.description.step.passes.rematerialize import recomputed
from meshwright.description.step.passes.shard import shard_stack
from meshwright.description.step.strategy import STAGES_APART, Strategy
from meshwright.description.step.train import STAGED, layout_of, train_step
from meshwright.description.step.workload import REMATS, Workload
from meshwright.mesh import MeshShape

LLAMA = PRESETS["llama3-8b"]
REGION = Region("layers")


def layout(*axes, **how):
    """How arrays lie on axes of more than one device."""
    return layout_of(frozenset(axes), MeshShape(), Strategy(**how))


def nodes(model, *axes, **how):
    """The nodes of one layer of a model's last stack."""
    return shard_stack(program(model).stacks[-1], layout(*axes, **how))


def works(found, kind):
    """The works of a kind in some nodes."""
    return [work for node in found for work in node.work if isinstance(work, kind)]


def shown(array):
    return str(array.notation)


# Shard.


def test_a_weight_is_stored_over_fsdp_and_used_whole_but_for_tp():
    query = next(work for work in works(nodes(LLAMA, "fsdp", "tp"), Weight) if work.name == "layers.query")
    assert shown(query.stored) == "query[D_fsdp, K_tp, G, H]"
    assert shown(query.used) == "query[D, K_tp, G, H]"
    assert query.pending == ("fsdp",)


def test_a_product_that_sums_a_split_dim_leaves_a_sum_to_be_taken():
    (move,) = (work for work in works(nodes(LLAMA, "tp"), Move) if work.name == "mlp output")
    assert shown(move.before) == "mlp_added[B, S, D]{U_tp}"
    assert shown(move.after) == "mlp_added[B, S_tp, D]"


def test_the_stream_is_gathered_once_for_all_products_that_read_it():
    names = [work.name for work in works(nodes(LLAMA, "tp"), Move)]
    assert names == ["attention input", "attention output", "mlp input", "mlp output"]


def test_without_sequence_parallelism_the_stream_is_only_summed():
    moves = works(nodes(LLAMA, "tp", tp_stream="whole"), Move)
    kinds = [move.kind for work in moves for move in moves_between(work.before, work.after)]
    assert kinds == ["all-reduce", "all-reduce"]


def test_parallel_blocks_are_summed_together():
    model = replace(PRESETS["palm-540b"], num_kv_heads=2)
    names = [work.name for work in works(nodes(model, "tp"), Move)]
    assert names == ["block input", "block input", "block output"]


def test_keys_and_values_are_gathered_to_the_queries_of_a_split_sequence():
    (core,) = works(nodes(LLAMA, "sp"), Core)
    assert shown(core.query) == "query[B, S_sp, K, G, H]"
    assert shown(core.key) == "key[B, S, K, H]"


def test_a_router_multiplies_the_stream_as_it_is_split_over_tp():
    (router,) = (work for work in works(nodes(PRESETS["mixtral-8x7b"], "tp"), Product) if work.name == "layers.router")
    assert [dim.axes for dim in router.rows] == [(), ("tp",)]


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-xl", "mixtral-8x7b", "deepseek-v3", "palm-540b", "gemma2-9b"])
@pytest.mark.parametrize("axes", [("fsdp",), ("tp",), ("dp", "fsdp", "tp"), ("fsdp", "sp", "tp"), ("fsdp", "ep", "tp")])
@pytest.mark.parametrize("stream", ["split", "whole"])
def test_every_collective_of_the_shard_pass_is_one_that_the_notation_lists(name, axes, stream):
    """For the same operands: `infer` lists every way to a product or a move, the pass takes one of them."""
    found = nodes(PRESETS[name], *axes, tp_stream=stream)
    for move in works(found, Move):
        gradient = replace(move.after, unreduced=move.pending), replace(move.before, unreduced=())
        for before, after in ((move.before, move.after), gradient):
            if before.dims != after.dims or before.unreduced != after.unreduced:
                chain = Chain(before.notation, (Stage(None, (), after.notation),))
                assert moved(before, after) in ways(chain, axes)
    for product in works(found, Product):
        weight, rows = product.weight, product.rows
        if product.experts:
            # The rows of an expert are counted on one device: there are others on all that share its weight.
            rows = (rows[0]._replace(axes=weight.pending),)
        X = Array("X", (*product.experts, *rows, *product.inner))
        unreduced = tuple(axis for dim in product.inner for axis in dim.axes)
        Y = Array("Y", (*product.experts, *rows, *product.columns), unreduced)
        forward = Einsum((X.notation, weight.stored.notation), Y.notation)
        assert moved(weight.stored, weight.used) in ways(forward, axes)
        dY, dW = replace(Y, name="dY", unreduced=()), replace(weight.stored, name="dW")
        backward = Einsum((X.notation, dY.notation), dW.notation)
        assert moved(replace(weight.used, unreduced=weight.pending), weight.stored) in ways(backward, axes)


def ways(expression, axes):
    """The collectives of every way that the notation lists."""
    operands = (expression.start,) if isinstance(expression, Chain) else expression.operands
    dims = {dim: 1 << 10 for operand in operands for dim in operand.dims}
    found = infer(expression, Sizes(degrees=dict.fromkeys(axes, 2), dims=dims)).implementations
    return [[(step.kind, step.axes) for step in way.steps if isinstance(step, Communicate)] for way in found]


def moved(before, after):
    """The collectives from one layout to another."""
    return [(move.kind, move.axes) for move in moves_between(before, after)]


# Differentiate.


def test_the_gradient_of_a_gather_is_a_reduce_scatter_and_of_a_sum_a_gather():
    by_name = {work.name: node for node in nodes(LLAMA, "tp") for work in node.work if isinstance(work, Move)}
    assert [op.kind for op in backward_ops(by_name["mlp input"])] == ["reduce-scatter"]
    assert [op.kind for op in backward_ops(by_name["mlp output"])] == ["all-gather"]


def test_a_product_has_two_gradients_each_as_large():
    node = next(node for node in nodes(LLAMA) if node.writes == "up")
    roles = [op.role for op in backward_ops(node) if isinstance(op, Matmul)]
    assert roles == ["input_gradient", "weight_gradient"]


def test_the_gradient_of_a_weight_is_scattered_over_fsdp_and_summed_over_dp():
    up = next(work for work in works(nodes(LLAMA, "dp", "fsdp"), Weight) if work.name == "layers.up")
    assert [(op.kind, op.axes) for op in gathers(up, REGION, "forward")] == [("all-gather", ("fsdp",))]
    assert [(op.kind, op.axes) for op in scatters(up, REGION)] == [
        ("reduce-scatter", ("fsdp",)),
        ("all-reduce", ("dp",)),
    ]
    assert {op.array.width for op in scatters(up, REGION)} == {"gradient"}


@pytest.mark.parametrize(
    ("name", "width"), [("up_bias", "compute"), ("mlp_norm", "float32"), ("mlp_norm_bias", "float32")]
)
def test_the_gradient_of_a_vector_is_summed_along_the_sequence_and_over_the_batch(name, width):
    """Norms make theirs in float32; a bias has the dtype of what it is added to."""
    vector = next(
        work for work in works(nodes(PRESETS["gpt2-xl"], "dp", "sp"), Vector) if work.name == f"layers.{name}"
    )
    assert [(op.kind, op.axes, op.array.width) for op in sums(vector, REGION)] == [
        ("all-reduce", ("sp",), width),
        ("all-reduce", ("dp",), width),
    ]


def test_the_gradient_of_a_latent_is_summed_over_tp_and_the_stream_not_scattered():
    """Each device of tp has what its heads add to a latent that all make whole."""
    found = {
        op.name: (op.kind, op.axes)
        for node in nodes(PRESETS["deepseek-v3"], "tp")
        for op in backward_ops(node)
        if not isinstance(op, Matmul) and hasattr(op, "kind") and hasattr(op, "axes")
    }
    assert found["latent gradient"] == found["query_latent gradient"] == ("all-reduce", ("tp",))
    assert "attention input gradient" not in found
    assert found["mlp input gradient"] == ("reduce-scatter", ("tp",))


# Rematerialize.


def again(model, remat, **how):
    """The names of the products of a layer that backward runs again."""
    found = nodes(model)
    at = recomputed(found, remat, **how)
    return {work.name.removeprefix("layers.") for i in at for work in found[i].work if isinstance(work, Product)}


def test_the_last_product_of_a_layer_is_not_made_again():
    assert again(LLAMA, "block") == {"query", "key", "value", "output", "gate", "up"}
    assert again(LLAMA, "block", is_whole=True) == again(LLAMA, "block") | {"down"}


def test_parallel_blocks_make_neither_of_their_last_products_again():
    assert again(PRESETS["palm-540b"], "block") == {"query", "key", "value", "gate", "up"}


def test_a_post_norm_reads_the_last_product_so_that_it_is_made_again():
    assert "down" in again(PRESETS["gemma2-9b"], "block")


def test_policies_that_keep_products_make_none_again():
    for remat in ("none", "attention", "matmuls"):
        assert again(LLAMA, remat) == set()


def test_every_second_product_is_made_again_but_attention():
    assert again(LLAMA, "alternate") == {"key", "output", "up"}


# Microbatch.


def test_a_microbatch_has_its_share_of_the_sequences():
    sizes = extents_of(Workload(model=LLAMA, batch=64, seq_len=2048), MeshShape(fsdp=4), Strategy(num_microbatches=4))
    assert (sizes.sizes["B"], sizes.sizes["S"]) == (16, 2048)
    assert sizes.local(Array("X", (Dim("B", None, ("fsdp",)), Dim("S", None), Dim("D", 8)))) == 4 * 2048 * 8


def test_experts_in_balance_have_as_many_rows_each():
    """Half of 4 x 128 tokens to each of 2 of 8 experts: 128 rows an expert, over 2 devices of ep."""
    model = replace(PRESETS["tiny"], experts=Experts(count=8, num_active=2, mlp=64))
    extents = extents_of(Workload(model=model, batch=4, seq_len=128), MeshShape(ep=2), Strategy())
    rows = Array("rows", (Dim("E", 8, ("ep",)), Dim("R", None)))
    assert extents.local(rows) == 4 * 128 * 2 / 2


def test_gradients_of_several_microbatches_are_added_up():
    def accumulated(parts):
        step = train_step(Workload(model=LLAMA, batch=64, seq_len=2048), MeshShape(), Strategy(num_microbatches=parts))
        return [op for op in step.ops.elementwise if op.kind == "accumulate"]

    assert accumulated(1) == []
    # Seven weights of a layer, and that of the logits.
    assert len(accumulated(2)) == len(accumulated(8)) == 8


# Pipeline.


def test_stages_of_their_own_programs_run_their_layers_once_a_microbatch():
    found = repeats(program(LLAMA), MeshShape(pp=4), Strategy(num_microbatches=8, profile=STAGES_APART.profile))
    assert (found["layers"].useful, found["layers"].executed, found["layers"].mean) == (64, 64, 64)
    assert found[LOGITS].mean == 2


def test_the_mean_of_stages_is_under_the_most_where_layers_do_not_divide():
    model = replace(LLAMA, num_layers=31)
    found = repeats(program(model), MeshShape(pp=4), Strategy(num_microbatches=4, profile=STAGES_APART.profile))[
        "layers"
    ]
    assert (found.useful, found.mean) == (32, 31)


def test_stages_in_lockstep_run_their_layers_in_every_tick():
    """8 microbatches through 4 stages are 11 ticks."""
    found = repeats(program(LLAMA), MeshShape(pp=4), Strategy(num_microbatches=8))
    assert (found["layers"].useful, found["layers"].executed) == (8 * 8, 11 * 8)
    assert (found[EMBEDDING].executed, found[LOGITS].executed) == (11, 8)


def test_stages_in_lockstep_run_whole_cycles_and_keep_the_inputs_of_each_kind_of_layer():
    """5 cycles of 2 layers on 2 stages: 3 slots of each kind, which 4 microbatches pass in 5 ticks."""
    experts = replace(PRESETS["tiny-moe"].experts, layers=(False, True))
    model, strategy = replace(PRESETS["tiny-moe"], num_layers=10, experts=experts), Strategy(num_microbatches=4)
    found = repeats(program(model), MeshShape(pp=2), strategy)
    assert [(found[name].once, found[name].executed) for name in ("layers_0", "layers_1")] == [(3, 5 * 3)] * 2
    moves = list(stage_moves(program(model), STAGED, strategy, layout("pp")))
    assert [op.array.dims[0].size for op in moves if op.name == KEPT_INPUTS] == [3, 3]
    assert [op.array.dims[0].size for op in moves if op.name == "load of experts"] == [6]


def test_branches_of_virtual_stages_stand_in_the_text_as_if_taken_in_every_tick():
    """4 microbatches through 2 chunks on each of 2 stages are 9 ticks; in 4 of them one enters."""
    found = repeats(program(LLAMA), MeshShape(pp=2), Strategy(num_microbatches=4, virtual_stages=2))
    assert (found[EMBEDDING].executed, found[EMBEDDING].static) == (4, 9)


def test_dense_layers_and_those_of_experts_are_counted_together():
    """3 and 58 layers over 2 stages: 31 at most, of which the first stage has all 3."""
    found = repeats(program(PRESETS["deepseek-v3"]), MeshShape(pp=2), Strategy(profile=STAGES_APART.profile))
    assert found["dense_layers"].once + found["layers"].once == 31


def test_the_stream_is_handed_on_and_its_gradient_back():
    strategy = Strategy(num_microbatches=4, schedule="gpipe")
    found = list(stage_moves(program(LLAMA), STAGED, strategy, layout("pp")))
    assert [(op.name, op.kind, op.phase) for op in found] == [
        ("stream", "collective-permute", "forward"),
        ("stream", "collective-permute", "backward"),
    ]


# Optimizer.


def test_the_norm_of_gradients_is_summed_over_what_splits_each_dim():
    dims = (Dim("N", 512, ("fsdp",)), Dim("N", 64), Dim("N", 256, ("tp",)))
    found = list(update_moves("up", dims, is_adafactor=False))
    assert [(op.kind, op.axes, op.phase, op.array.dims) for op in found] == [
        ("all-reduce", ("fsdp",), "update", ()),
        ("all-reduce", ("tp",), "update", ()),
    ]


def test_adafactor_takes_means_over_the_two_largest_dims():
    dims = (Dim("N", 512, ("fsdp",)), Dim("N", 64), Dim("N", 256, ("tp",)))
    found = {
        op.name: (op.axes, [dim.size for dim in op.array.dims]) for op in update_moves("up", dims, is_adafactor=True)
    }
    assert found["means of rows of up"] == (("fsdp",), [64, 256])
    assert found["means of columns of up"] == (("tp",), [512, 64])


# All of them.


@pytest.mark.parametrize("remat", REMATS)
def test_what_is_recomputed_has_run_forward(remat):
    step = train_step(Workload(model=LLAMA, batch=64, seq_len=2048, remat=remat), MeshShape(fsdp=2, tp=2))
    ran = {op.name for op in step.ops.matmuls if op.phase == "forward"}
    assert {op.name for op in step.ops.matmuls if op.phase == "recompute"} <= ran


def test_the_ops_of_a_step_do_not_depend_on_degrees_or_the_batch():
    small = train_step(Workload(model=LLAMA, batch=64, seq_len=2048), MeshShape(fsdp=2, tp=2))
    large = train_step(Workload(model=LLAMA, batch=1024, seq_len=2048), MeshShape(fsdp=16, tp=8))
    assert small.ops is large.ops


def test_all_layers_of_a_loop_have_a_backward_pass_where_one_of_them_is_trained():
    """Adapters of attention alone, beside linear attention: two cycles of four layers, of which the last has them."""
    model = with_adapters(replace(PRESETS["tiny-qwen3-next"], num_layers=8), rank=4, targets=("o_proj",))
    step = train_step(Workload(model=model, batch=8, seq_len=32), MeshShape(fsdp=2))
    backward = {op.region.name for op in step.ops.matmuls if op.phase == "backward"}
    assert {f"layers_{place}" for place in range(4)} < backward


def test_one_layer_is_no_loop_so_that_nothing_leads_to_what_is_frozen_before_it():
    """Adapters of a dense layer before those of experts: XLA inlines it and leaves out the gradient of the embedding's.

    With a second dense layer they are a loop, which carries that gradient. tests/runtime holds both to the compiler.
    """

    def of_dense(num_layers):
        experts = replace(PRESETS["tiny-moe"].experts, num_dense_layers=num_layers)
        model = with_adapters(replace(PRESETS["tiny-moe"], experts=experts, num_layers=4), rank=4)
        step = train_step(Workload(model=model, batch=8, seq_len=32), MeshShape(fsdp=2, tp=2))
        ops = [op for op in step.ops.ops if op.region.name == "dense_layers" and op.phase == "backward"]
        products = {op.name.rpartition(".")[2] for op in ops if isinstance(op, Matmul) and op.role == "input_gradient"}
        moves = {op.name for op in ops if isinstance(op, ir.Communicate) and not op.of_weight}
        return products, moves

    (one, moves_of_one), (two, moves_of_two) = of_dense(1), of_dense(2)
    before = {"query", "key", "value"}
    assert two - one == before | {f"{name}_lora_a" for name in before}
    assert moves_of_two - moves_of_one == {"attention input gradient"}
    assert one >= {"output", "gate", "query_lora_b"}


@pytest.mark.parametrize(
    ("targets", "gradients", "is_recomputed"),
    [
        (("q_proj",), {"query"}, True),
        (("q_proj", "v_proj"), {"query", "value"}, True),
        (("v_proj",), {"value"}, True),
        (("o_proj",), set(), True),
        (("gate_proj",), set(), False),
    ],
)
def test_attention_of_one_layer_makes_the_gradients_of_what_is_trained_alone(targets, gradients, is_recomputed):
    """Of a frozen product that nothing trained leads to no gradient is made, nor what only that would read."""
    model = with_adapters(replace(LLAMA, num_layers=1), rank=4, targets=targets)
    workload = Workload(model=model, batch=8, seq_len=32, remat="matmuls")
    step = train_step(workload, MeshShape(fsdp=2, tp=2))
    backward = [op for op in step.ops.attention if op.phase == "backward"]
    recompute = [op for op in step.ops.attention if op.phase == "recompute"]
    assert [op.gradients for op in backward] == ([gradients] if gradients else [])
    # The gradient of the values needs scores, and not what attention makes of them.
    assert [op.is_scores_alone for op in recompute] == ([gradients == {"value"}] if is_recomputed else [])
    # Nor does what a branch alone is trained for gather the gradient of the product beside it.
    gathers = {op.name for op in step.ops.communication if op.phase == "backward" and op.axes == ("tp",)}
    assert ("attention output gradient" in gathers) is bool(gradients)
