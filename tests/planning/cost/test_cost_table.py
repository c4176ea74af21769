"""The table of ops: its rows add up to the flops and collectives of the step, and each says what its op is."""

from collections import Counter
from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.legality import check_mesh
from meshwright.description.step.model import Experts
from meshwright.description.step.strategy import STAGES_APART, Strategy
from meshwright.description.step.workload import REMATS, Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import step_collectives
from meshwright.planning.cost.flops import step_flops
from meshwright.planning.cost.table import op_table

MESHES = [
    MeshShape(),
    MeshShape(dp=4),
    MeshShape(sp=4),
    MeshShape(tp=2),
    MeshShape(dp=2, fsdp=2, sp=2, pp=2),
    MeshShape(dp=2, fsdp=2, ep=2, sp=2),
    MeshShape(fsdp=4, ep=4),
    MeshShape(fsdp=2, ep=2, tp=2),
    MeshShape(fsdp=2, tp=2, pp=2),
    MeshShape(dp=2, fsdp=2, tp=2),
    MeshShape(fsdp=2, tp=2, sp=2),
]

THOROUGH = ("gpt2-xl", "palm-540b", "llama3-8b", "mixtral-8x7b", "deepseek-v3")

STRATEGIES = [
    Strategy(num_microbatches=4),
    Strategy(num_microbatches=2, profile=STAGES_APART.profile, virtual_stages=2),
    Strategy(num_microbatches=4, schedule="gpipe"),
    Strategy(zero_stage=0),
    Strategy(zero_stage=1, num_microbatches=2),
    Strategy(zero_stage=2, num_microbatches=2),
    Strategy(attention="flash"),
    Strategy(attention="flash", sp_method="ring"),
    Strategy(collective_matmul=True),
    Strategy(tp_stream="whole"),
    Strategy(optimizer="adafactor"),
    Strategy(gradient_dtype="f32"),
]


def workload_of(name, **more):
    """A step of a preset, in a batch that all meshes here divide."""
    return Workload(model=PRESETS[name], batch=64, seq_len=2048, **more)


def cases():
    """Every preset on the meshes that can split it; a few of them on all meshes."""
    for name in PRESETS:
        for mesh in MESHES if name in THOROUGH else MESHES[-4:]:
            try:
                check_mesh(workload_of(name), mesh)
            except MeshwrightError:
                continue
            yield pytest.param(workload_of(name), mesh, id=f"{name}-{mesh}")


def table_of(workload, mesh, strategy):
    return op_table(workload, mesh, parse_system(f"cpu:{mesh.num_devices}"), strategy)


def by_kind(moves):
    """Bytes and runs of collectives by kind, axes and phase."""
    nbytes, runs = Counter(), Counter()
    for move in moves:
        nbytes[move.kind, move.axes, move.phase] += move.bytes
        runs[move.kind, move.axes, move.phase] += move.count
    return {key: (nbytes[key], runs[key]) for key in nbytes}


def assert_adds_up(workload, mesh, strategy):
    """The flops of each phase, and the bytes and runs of every collective."""
    rows, flops = table_of(workload, mesh, strategy), Counter()
    for row in rows:
        flops[row.phase] += row.times * row.flops
        flops["recompute"] += row.times_recomputed * row.flops
    expected = step_flops(workload, mesh, strategy)
    for phase in ("forward", "recompute", "backward"):
        assert flops[phase] == pytest.approx(getattr(expected, phase), rel=1e-12)
    moves = step_collectives(workload, mesh, strategy, counted="executed")
    assert by_kind(move for row in rows for move in row.collectives) == by_kind(moves)


@pytest.mark.parametrize(("workload", "mesh"), list(cases()))
def test_rows_add_up_to_the_flops_and_collectives_of_the_step(workload, mesh):
    assert_adds_up(workload, mesh, Strategy())


@pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=lambda s: str({k: v for k, v in vars(s).items() if v != vars(Strategy())[k]})
)
def test_rows_add_up_whatever_the_strategy(strategy):
    for name, mesh in (
        ("llama3-8b", MeshShape(fsdp=2, tp=2, sp=2)),
        ("llama3-8b", MeshShape(fsdp=2, tp=2, pp=2)),
        ("gpt2-xl", MeshShape(dp=2, fsdp=2, pp=2)),
        ("mixtral-8x7b", MeshShape(fsdp=2, ep=2, tp=2)),
    ):
        assert_adds_up(workload_of(name), mesh, strategy)


@pytest.mark.parametrize("remat", [*REMATS, "alternate"])
@pytest.mark.parametrize("seq_len", [1024, 2048])
def test_rows_add_up_whatever_is_kept_for_backward(remat, seq_len):
    workload = replace(workload_of("llama3-8b", remat=remat), seq_len=seq_len)
    assert_adds_up(workload, MeshShape(fsdp=2, tp=2, sp=2), Strategy())
    assert_adds_up(replace(workload, model=PRESETS["mixtral-8x7b"]), MeshShape(fsdp=2, ep=4), Strategy())


@pytest.mark.parametrize("mesh", [MeshShape(fsdp=2, ep=2, tp=2), MeshShape(ep=4, tp=2, sp=2), MeshShape(tp=4)], ids=str)
@pytest.mark.parametrize("factor", [None, 1.25])
def test_rows_add_up_with_shared_experts_and_a_capacity(mesh, factor):
    experts = Experts(count=8, num_active=2, mlp=1024, shared_mlp=512, num_dense_layers=2, capacity_factor=factor)
    model = replace(PRESETS["llama3-8b"], experts=experts)
    assert_adds_up(Workload(model=model, batch=64, seq_len=2048), mesh, Strategy())


def rows_named(name, workload, mesh, strategy=None):
    """The rows of one name."""
    return [row for row in table_of(workload, mesh, strategy or Strategy()) if row.name == name]


def test_a_product_is_followed_by_both_of_its_gradients():
    rows = rows_named("layers.query", workload_of("llama3-8b"), MeshShape(fsdp=4, tp=2))
    assert [(row.phase, row.notation) for row in rows] == [
        ("forward", "X[B_fsdp, S, D] @ Wquery[D_fsdp, K_tp, G, H] -> query[B_fsdp, S, K_tp, G, H]"),
        ("backward", "dquery[B_fsdp, S, K_tp, G, H] @ Wquery[D, K_tp, G, H] -> dX[B_fsdp, S, D]{U_tp}"),
        ("backward", "X[B_fsdp, S, D] @ dquery[B_fsdp, S, K_tp, G, H] -> dWquery[D_fsdp, K_tp, G, H]"),
    ]
    assert [(row.times, row.times_recomputed) for row in rows] == [(32, 32), (32, 0), (32, 0)]
    assert [[move.kind for move in row.single_collectives] for row in rows] == [["all-gather"], [], ["reduce-scatter"]]
    # 16 sequences of 2048 tokens, a stream of 4096, and half of 32 heads of 128.
    assert tuple(rows[0].product) == (1, 16 * 2048, 4096, 2048)
    assert [(move.bytes, move.count) for move in rows[0].single_collectives] == [(2 * 4096 * 2048, 64)]


def test_a_weight_that_is_not_gathered_again_is_written_as_it_is_used():
    """Below ZeRO-3 a step gathers each weight once, at its start."""
    forward, again, to_input, to_weight = rows_named(
        "layers.up", workload_of("llama3-8b"), MeshShape(fsdp=4), Strategy(zero_stage=2, num_microbatches=2)
    )
    assert "Wup[D_fsdp, F]" in forward.notation
    assert again.phase == "recompute"
    assert "Wup[D, F]" in again.notation
    assert "Wup[D, F]" in to_input.notation
    assert "dWup[D_fsdp, F]" in to_weight.notation
    assert [move.count for move in forward.collectives] == [32]
    assert forward.times == 2 * 32


def test_attention_is_two_products_and_four_gradients():
    rows = [
        row for row in table_of(workload_of("llama3-8b", remat="none"), MeshShape(), Strategy()) if row.is_attention
    ]
    assert [row.notation for row in rows] == [
        "query[B, S, K, G, H] @ key[B, T, K, H] -> scores[B, S, K, G, T]",
        "weights[B, S, K, G, T] @ value[B, T, K, H] -> attention_heads[B, S, K, G, H]",
        "dattention_heads[B, S, K, G, H] @ value[B, T, K, H] -> dweights[B, S, K, G, T]",
        "weights[B, S, K, G, T] @ dattention_heads[B, S, K, G, H] -> dvalue[B, T, K, H]",
        "dscores[B, S, K, G, T] @ key[B, T, K, H] -> dquery[B, S, K, G, H]",
        "dscores[B, S, K, G, T] @ query[B, S, K, G, H] -> dkey[B, T, K, H]",
    ]
    # 64 sequences x 8 kv heads; 4 query heads each.
    assert tuple(rows[0].product) == (64 * 8, 2048 * 4, 128, 2048)
    # Chunks of queries make their scores once more.
    assert [row.times_recomputed for row in rows] == [32, 0, 0, 0, 0, 0]


def test_a_fused_kernel_makes_its_scores_again_and_keeps_them_on_the_chip():
    workload, mesh = workload_of("llama3-8b", remat="none"), MeshShape()
    scores, fused = (
        [row for row in table_of(workload, mesh, Strategy(attention=name)) if row.is_attention]
        for name in ("scores", "flash")
    )
    assert len(fused) == len(scores) + 1
    assert fused[0].memory > 5 * scores[0].memory


def test_a_sequence_in_halves_makes_three_products_of_four():
    """Of 1024 tokens: half with half, three times, as the first queries see no key of the second half."""
    scores = rows_named("layers.scores", replace(workload_of("llama3-8b"), seq_len=1024, remat="none"), MeshShape())[0]
    assert scores.times == 3 * 32
    assert tuple(scores.product) == (64 * 8, 512 * 4, 128, 512)


def test_scores_of_latents_are_more_than_half_of_attention():
    """Chunks of queries make the scores once more, of 192 dims, and not their product with values, of 128."""
    scores, values, *_ = (
        row
        for row in table_of(workload_of("deepseek-v3"), MeshShape(fsdp=4), Strategy())
        if row.is_attention and row.name.startswith("layers")
    )
    assert scores.flops * 128 == values.flops * 192
    # Once because the block is made again, once by the chunks.
    assert (scores.times_recomputed, values.times_recomputed) == (2 * 58, 58)


def test_a_tied_table_is_gathered_and_scattered_by_the_lookup():
    rows = rows_named("embedding", workload_of("gpt2-xl"), MeshShape(fsdp=4))
    assert [row.notation for row in rows] == [
        "Wembedding[V, D_fsdp] -> Wembedding[V, D]",
        "dWembedding[V, D]{U_fsdp} -> dWembedding[V, D_fsdp]",
        "X[B_fsdp, S, D] @ Wembedding[V, D] -> logits[B_fsdp, S, V]",
        "dlogits[B_fsdp, S, V] @ Wembedding[V, D] -> dX[B_fsdp, S, D]",
        "X[B_fsdp, S, D] @ dlogits[B_fsdp, S, V] -> dWembedding[V, D]{U_fsdp}",
    ]


def test_a_model_of_parallel_blocks_gathers_its_stream_for_each_of_its_two_norms():
    """PaLM with a second kv head, so that tp can split it: two norms, so two inputs."""
    workload = Workload(model=replace(PRESETS["palm-540b"], num_kv_heads=2), batch=8, seq_len=1024)
    rows = rows_named("layers.block input", workload, MeshShape(fsdp=2, tp=2))
    assert [row.times for row in rows if row.phase == "forward"] == [118, 118]


def test_every_model_has_the_products_of_its_kind():
    names = {row.name.rpartition(".")[2] for row in table_of(workload_of("deepseek-v3"), MeshShape(fsdp=4), Strategy())}
    latent = {"latent", "query_latent", "latent_query", "key", "value", "scores", "values", "output"}
    experts = {"router", "expert_gate", "expert_up", "expert_down", "shared_gate", "shared_up", "shared_down"}
    assert latent | experts | {"gate", "up", "down", "unembedding"} <= names
    plain = {row.name for row in table_of(workload_of("gpt2-xl"), MeshShape(), Strategy())}
    assert plain == {
        f"layers.{name}" for name in ("query", "key", "value", "scores", "values", "output", "up", "down")
    } | {"embedding"}


def test_latents_split_over_tp_sum_their_gradients():
    """Each device of tp has what its heads add to the gradient of a latent, which every one of them makes whole."""
    workload = workload_of("deepseek-v3")
    sums = [
        move
        for row in table_of(workload, MeshShape(fsdp=2, tp=2), Strategy())
        for move in row.collectives
        if move.array in ("latent gradient", "query_latent gradient")
    ]
    assert {(move.kind, move.axes) for move in sums} == {("all-reduce", ("tp",))}
    # The gradient of the rotary part of the keys, which all heads share, is summed apart.
    assert sum(move.bytes for move in sums) == 61 * 2 * workload.tokens // 2 * (512 + 1536)


def test_what_binds_a_product_is_what_takes_longest():
    """On one host of H100s few tokens leave a gathered weight no time to hide."""
    few = Workload(model=PRESETS["llama3-8b"], batch=8, seq_len=128)
    many = replace(few, batch=512, seq_len=2048)
    system, mesh = parse_system("h100:8"), MeshShape(fsdp=8)
    bounds = [
        next(row.bound for row in op_table(workload, mesh, system, Strategy()) if row.name == "layers.up")
        for workload in (few, many)
    ]
    assert bounds == ["communication", "compute"]
