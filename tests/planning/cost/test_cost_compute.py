"""What a device computes in a step, and what it holds, under strategies that can be planned."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.model import AttentionConfig
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.description.step.strategy import DEFAULT, STAGES_APART, XLA, FrameworkProfile, Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import step_collectives
from meshwright.planning.cost.flops import model_flops, step_flops
from meshwright.planning.cost.memory import step_memory
from meshwright.planning.cost.rates.efficiency import gpu_figures
from meshwright.planning.cost.seconds import buffer_seconds, layer_parts, microbatch_seconds, update_seconds
from meshwright.planning.cost.table import op_table

LLAMA = Workload(model=PRESETS["llama3-8b"], batch=64, seq_len=4096, remat="none")
DEEPSEEK = Workload(model=PRESETS["deepseek-v3"], batch=256, seq_len=4096, remat="none")
GPT = Workload(model=PRESETS["gpt3-175b"], batch=1536, seq_len=2048)
H100 = parse_system("h100:64")


@pytest.mark.parametrize(
    ("workload", "mesh"),
    [
        (LLAMA, MeshShape(fsdp=8, tp=8)),
        (LLAMA, MeshShape(fsdp=16, pp=4)),
        (DEEPSEEK, MeshShape(fsdp=8, ep=8)),
        (GPT, MeshShape(dp=8, tp=8)),
    ],
    ids=lambda value: str(value) if isinstance(value, MeshShape) else value.model.name,
)
def test_the_products_of_a_device_are_its_share_of_the_models(workload, mesh):
    """Forward flops of the products with weights, of all devices: those that MFU counts, less the scores."""
    system = parse_system(f"cpu:{mesh.num_devices}")
    rows = op_table(workload, mesh, system, STAGES_APART)
    each = sum(row.times * row.flops for row in rows if row.phase == "forward" and not row.is_attention)
    scores = 2 * workload.model.num_heads * (workload.model.query_key_dim + workload.model.value_dim)
    scores *= workload.tokens * workload.seq_len * workload.model.num_layers
    # Latents are made whole on every device of tp; here only ep and fsdp split such a model.
    assert each * mesh.num_devices == pytest.approx(model_flops(workload) / 3 - scores)
    again = step_flops(workload, mesh, STAGES_APART)
    assert again.forward * mesh.num_devices == pytest.approx(model_flops(workload) / 3)


def eager_or_not(fuses):
    return Strategy(profile=FrameworkProfile(fused_elementwise=fuses))


def test_no_pass_is_faster_than_its_flops_at_the_peak():
    for remat in ("none", "matmuls", "block"):
        workload, mesh = replace(LLAMA, remat=remat), MeshShape(fsdp=64)
        seconds, flops = microbatch_seconds(workload, mesh, H100, DEFAULT), step_flops(workload, mesh)
        assert seconds.forward > flops.forward / H100.peak()
        assert seconds.backward > flops.backward / H100.peak()
    assert microbatch_seconds(LLAMA, MeshShape(fsdp=64), H100, DEFAULT).recompute == 0


def test_a_fused_kernel_takes_less_time_and_no_room_for_scores():
    mesh, flash = MeshShape(fsdp=64), Strategy(attention="flash")
    assert microbatch_seconds(LLAMA, mesh, H100, flash).total < microbatch_seconds(LLAMA, mesh, H100, DEFAULT).total
    short = replace(LLAMA, seq_len=1024)
    assert step_memory(short, mesh, flash)["activations"] < step_memory(short, mesh)["activations"]


def test_ops_one_by_one_pass_over_memory_more_often():
    mesh = MeshShape(fsdp=64)
    eager, fused = (microbatch_seconds(LLAMA, mesh, H100, eager_or_not(fuses)) for fuses in (False, True))
    assert eager.forward > fused.forward
    assert eager.backward > fused.backward
    one_by_one, in_one = (update_seconds(LLAMA, mesh, H100, eager_or_not(fuses)) for fuses in (False, True))
    assert one_by_one > 2 * in_one


def test_dropout_keeps_masks_that_are_written_and_read():
    mesh = MeshShape(dp=8, tp=8)
    without, with_it = (microbatch_seconds(GPT, mesh, H100, Strategy(dropout=rate)) for rate in (0.0, 0.1))
    assert with_it.forward > without.forward
    assert with_it.backward > without.backward


def test_gradients_of_several_microbatches_are_added_up():
    """Each is read with the sum so far, which is written: three passes of each narrow weight on the device."""
    mesh = MeshShape(fsdp=64)
    whole = microbatch_seconds(LLAMA, mesh, H100, Strategy(num_microbatches=1))
    half, quarter = (
        microbatch_seconds(replace(LLAMA, batch=64 * parts), mesh, H100, Strategy(num_microbatches=parts))
        for parts in (2, 4)
    )
    assert half.forward == quarter.forward == whole.forward
    assert half.backward == quarter.backward
    least = 3 * 2 * num_parameters(LLAMA.model) / H100.hbm_bytes_per_second
    assert 0.9 * least < half.backward - whole.backward < 1.3 * least  # A looked-up row is not a product.


def test_every_second_product_made_again_takes_half_the_products():
    """torchtitan's selective recomputation keeps every other product and attention's output."""
    mesh = MeshShape(fsdp=64)

    def again(remat):
        return microbatch_seconds(replace(LLAMA, remat=remat), mesh, H100, Strategy(attention="flash")).recompute

    assert again("matmuls") < again("alternate") < again("block")


def test_flat_buffers_are_filled_and_emptied_by_copies():
    """A copy reads and writes: of gathered weights forward, and backward of gradients besides (all of ZeRO-2)."""
    mesh, how = MeshShape(fsdp=64), Strategy(profile=FrameworkProfile(flat_buffers=True), zero_stage=3)
    seconds = buffer_seconds(LLAMA, mesh, H100, how)
    copied = 2 * 2 * num_parameters(LLAMA.model) / H100.hbm_bytes_per_second
    assert copied < seconds["forward"] < 2 * copied
    wide = buffer_seconds(LLAMA, mesh, H100, replace(how, gradient_dtype="f32"))
    assert wide["backward"] == pytest.approx(1.5 * seconds["backward"])  # Read narrow, written wide.
    assert not any(buffer_seconds(LLAMA, MeshShape(tp=8), H100, how).values())


@pytest.mark.parametrize(
    ("stage", "parameters", "optimizer", "gradients"),
    [(0, 32, 64, 32), (1, 8 + 16, 16, 32), (2, 8 + 16, 16, 8), (3, 8, 16, 8)],
)
def test_zero_shards_states_stage_by_stage(stage, parameters, optimizer, gradients):
    """In 32nds of all parameters' bytes over fsdp=4, all float32 but the gathered copies (arXiv:1910.02054)."""
    workload = replace(LLAMA, batch=8, seq_len=128, remat="block")
    memory = step_memory(workload, MeshShape(fsdp=4), Strategy(zero_stage=stage, num_microbatches=2))
    whole = step_memory(workload, MeshShape(), Strategy(num_microbatches=2))["parameters"] / 32
    norms = 1e-3  # Norm scales are kept whole whatever the stage.
    assert memory["parameters"] / whole == pytest.approx(parameters, rel=norms)
    assert memory["optimizer"] / whole == pytest.approx(optimizer, rel=norms)
    assert memory["gradients"] / whole == pytest.approx(gradients, rel=norms)


@pytest.mark.parametrize(
    ("optimizer", "share"), [("adamw", 2), ("lion", 1), ("adamw-8bit", (1 + 4 / 256) / 2), ("sgd", 0)]
)
def test_an_optimizer_keeps_its_moments(optimizer, share):
    memory = step_memory(LLAMA, MeshShape(fsdp=64), Strategy(optimizer=optimizer))
    assert memory["optimizer"] == pytest.approx(share * memory["parameters"])


def test_a_pipeline_holds_the_microbatches_in_flight():
    """All of them in GPipe, one a stage in 1F1B (arXiv:2104.04473, section 2.2), up to twice that interleaved."""
    mesh, alone = MeshShape(dp=8, pp=8), Strategy(num_microbatches=8 * 2, profile=STAGES_APART.profile)

    def held(**changes):
        return step_memory(replace(GPT, batch=128), mesh, replace(alone, **changes))["activations"]

    assert held(schedule="gpipe") / held() == pytest.approx(2)
    assert held(virtual_stages=2) / held() == pytest.approx(1 + 7 / 16)
    # In lockstep one more on its way between stages that keep for each other, and one that is worked on.
    assert held(profile=XLA) / held() == pytest.approx((8 + 2) / 8)
    # Ticks of the bubble are kept too, and the stream that each microbatch ends as.
    layers, ticks = GPT.model.num_layers // 8, 16 + 8 - 1
    assert held(profile=XLA, schedule="gpipe") / held() == pytest.approx((ticks + 16 / layers) / 8)


def test_a_stream_kept_whole_is_summed_instead_of_split_with_the_same_traffic_forward():
    """An all-reduce is a reduce-scatter and an all-gather (arXiv:2205.05198, section 4.2.2)."""
    mesh = MeshShape(dp=8, tp=8)
    split, whole = (step_collectives(GPT, mesh, Strategy(tp_stream=stream)) for stream in ("split", "whole"))

    def over_tp(moves):
        return sum(
            move.bytes * (2 if move.kind == "all-reduce" else 1)
            for move in moves
            if move.axes == ("tp",) and move.phase == "forward" and move.array != "softmax"
        )

    assert over_tp(whole) == pytest.approx(over_tp(split), rel=0.01)
    assert not any(move.kind == "all-gather" for move in whole)


def test_microbatches_gather_weights_again_only_in_zero_3():
    mesh = MeshShape(fsdp=8)

    def gathered(**how):
        moves = step_collectives(GPT, mesh, Strategy(**how))
        return sum(move.bytes for move in moves if move.kind == "all-gather")

    assert gathered(num_microbatches=4) == 4 * gathered()
    assert gathered(num_microbatches=4, zero_stage=2) == gathered(zero_stage=2) < gathered()


def test_stages_hand_on_the_stream_once_for_every_virtual_stage():
    once, twice = (
        [
            move
            for move in step_collectives(
                GPT, MeshShape(pp=8, dp=8), Strategy(virtual_stages=v, profile=STAGES_APART.profile)
            )
            if move.axes == ("pp",)
        ]
        for v in (1, 2)
    )
    assert {move.phase for move in once} == {"forward", "backward"}
    assert once[0].bytes == GPT.tokens // 8 * 12288 * 2
    assert twice[0].bytes == 2 * once[0].bytes


def test_a_fused_kernel_skips_what_a_window_hides():
    """Of 8192 keys a window of 2048 leaves (2048 x 8192 - 2048^2 / 2) of 8192^2 / 2 pairs: 7 of 16."""
    model = replace(PRESETS["mistral-7b"], attention=AttentionConfig())
    found = [
        layer_parts(
            Workload(model=replace(model, attention=AttentionConfig(windows=(window,))), batch=8, seq_len=8192),
            MeshShape(fsdp=8),
            parse_system("v5p:2x2x2"),
            Strategy(attention="flash"),
        )["attention"].forward
        for window in (None, 8192, 2048)
    ]
    assert found[1] == found[0]
    assert found[2] == pytest.approx(found[0] * 7 / 16)


def test_a_block_that_is_rerun_to_its_end_makes_every_product_of_it_again():
    """Four forward passes in all, as Megatron-LM counts them (arXiv:2104.04473, section 5.1), but for the logits."""
    workload, mesh = replace(GPT, seq_len=1024, remat="block"), MeshShape(dp=64)
    rerun = step_flops(workload, mesh, Strategy(profile=FrameworkProfile(recomputes_whole_blocks=True)))
    stopped = step_flops(workload, mesh)
    tokens, model = workload.tokens / 64, workload.model
    down = 2 * tokens * model.num_layers * model.mlp * model.embed
    logits = 2 * tokens * model.vocab * model.embed
    assert rerun.forward == stopped.forward
    assert rerun.recompute == pytest.approx(rerun.forward - logits, rel=1e-12)
    assert rerun.recompute - stopped.recompute == pytest.approx(down, rel=1e-9)


def test_lists_of_shards_are_copied_one_by_one():
    """Twice as many devices take twice as many copies of as many bytes."""
    workload = replace(GPT, remat="block")
    few, many = (
        sum(
            buffer_seconds(
                workload,
                MeshShape(fsdp=size),
                parse_system(f"a100-80gb:{size}"),
                Strategy(profile=FrameworkProfile(shard_lists=True)),
            ).values()
        )
        for size in (384, 768)
    )
    model = workload.model
    arrays = 4 * model.num_layers * 3  # queries with keys and values, output, up and down; two gathers and a scatter
    tables = 2 * 2  # of tokens and of positions: a gather and a scatter
    assert many - few == pytest.approx((arrays + tables) * 384 * gpu_figures("a100-80gb").launch_seconds)
