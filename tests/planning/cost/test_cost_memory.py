"""What a device holds in a step: states, activations by policy and pipeline, and what is live beside them."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.description.step.strategy import DEFAULT, FrameworkProfile, Strategy
from meshwright.description.step.workload import REMATS, Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.activations import Activations
from meshwright.planning.cost.arguments import argument_bytes
from meshwright.planning.cost.memory import host_bytes, in_flight, step_memory
from meshwright.planning.cost.model_states import tiled_elements

STATES = ("parameters", "master weights", "optimizer", "reference")
"""Terms that stay in memory from step to step."""

GIB = 2**30
LLAMA = Workload(model=PRESETS["llama3-8b"], batch=16, seq_len=8192)
GPT = Workload(model=PRESETS["gpt3-175b"], batch=128, seq_len=2048)
FSDP = MeshShape(fsdp=16)
XL = ModelConfig(
    name="gpt2-xl widths",
    num_layers=8,
    embed=1600,
    mlp=6400,
    num_heads=25,
    num_kv_heads=25,
    head_dim=64,
    vocab=50_304,
    tied_embeddings=True,
)


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("kind", ["tpu", "gpu", "cpu"])
def test_the_terms_sum_to_the_peak(remat, kind):
    memory = step_memory(replace(LLAMA, remat=remat), MeshShape(fsdp=8, tp=2), kind=kind)
    assert sum(size for name, size in memory.items() if name != "peak") == memory["peak"]
    assert sum(memory.get(name, 0) for name in STATES) == memory["parameters"] + memory["optimizer"]


def test_every_policy_keeps_less_than_the_one_before():
    """At 1,024 tokens, where `none` keeps the scores too."""
    short = replace(LLAMA, seq_len=1024, batch=256)
    kept = [step_memory(replace(short, remat=remat), FSDP)["activations"] for remat in REMATS]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(REMATS)


def test_long_sequences_keep_no_scores():
    """Chunks of queries make theirs again, whatever the policy."""
    none, attention = (step_memory(replace(LLAMA, remat=remat), FSDP) for remat in ("none", "attention"))
    assert none == attention


def test_a_block_keeps_two_bytes_an_element_of_its_input():
    memory = step_memory(LLAMA, FSDP)
    assert memory["activations"] == 32 * 8192 * 4096 * 2


def test_offloaded_inputs_wait_in_the_hosts_memory():
    """What `block` keeps on the device; nowhere else is anything told apart from it."""
    offload = replace(LLAMA, remat="offload")
    assert step_memory(offload, FSDP)["activations"] == 0
    assert host_bytes(offload, FSDP) == step_memory(LLAMA, FSDP)["activations"]
    assert host_bytes(LLAMA, FSDP) == 0


@pytest.mark.parametrize(
    ("fields", "each"),
    [
        ({}, 4 + 8),
        ({"param_dtype": "bf16"}, 2 + 4),
        ({"param_dtype": "bf16", "moment_dtype": "f32", "master_weights": True}, 2 + 8 + 4),
        ({"optimizer": "lion"}, 4 + 4),
        ({"optimizer": "sgd"}, 4),
        ({"optimizer": "adamw-8bit"}, 4 + 2 * (1 + 4 / 256)),
    ],
)
def test_states_have_so_many_bytes_a_parameter(fields, each):
    """ZeRO's 16 (arXiv:1910.02054, section 3.1) are 2 + 8 + 4 and 2 for gradients, which are no state here."""
    workload = replace(LLAMA, param_dtype=fields.pop("param_dtype", "f32"))
    memory = step_memory(workload, FSDP, Strategy(**fields))
    states = sum(memory.get(name, 0) for name in STATES)
    assert states == pytest.approx(num_parameters(LLAMA.model) / 16 * each, rel=1e-3)  # norms are whole


def test_the_last_stage_of_1f1b_holds_one_microbatch_and_gpipe_all():
    mesh = MeshShape(pp=8, dp=8)
    assert in_flight(mesh, Strategy(num_microbatches=16)) == 8
    assert in_flight(mesh, Strategy(num_microbatches=16), last=True) == 1
    gpipe = Strategy(num_microbatches=16, schedule="gpipe")
    assert in_flight(mesh, gpipe) == in_flight(mesh, gpipe, last=True) == 16
    interleaved = Strategy(num_microbatches=16, virtual_stages=2)
    assert in_flight(mesh, interleaved) == 8 + 7 / 2
    assert in_flight(mesh, interleaved, last=True) == (8 + 1) / 2


def test_a_loss_run_op_by_op_holds_the_logits_three_times():
    once, thrice = (
        step_memory(LLAMA, FSDP, Strategy(profile=FrameworkProfile(fused_loss=fuses), attention="flash"))["logits"]
        for fuses in (True, False)
    )
    assert thrice - once == 2 * 4 * 8192 * 128_256


def test_pytorch_without_a_compiler_saves_what_each_matmul_reads():
    """The arithmetic of nanotron's code for 2 of 32 layers: x, norms, q, k, v, output, and four arrays of the MLP."""
    profile = FrameworkProfile(spmd_pipeline=False, saves_results=True, saves_shards=True)
    strategy, mesh = Strategy(attention="flash", profile=profile), MeshShape(tp=2, fsdp=2)
    kept = Activations(replace(LLAMA, batch=2, remat="none"), mesh, strategy).kept
    stream, heads, mlp = 8192 * 4096, 8192 * 8 * 128, 8192 * 14_336
    assert kept == 2 * (4 * stream + 2 * stream + 2 * heads + 4 * mlp) / 2 + 4 * 8192 * 32 / 2


def test_gradients_in_buffers_of_a_framework_are_there_from_the_first_moment_on():
    profile = FrameworkProfile(spmd_pipeline=False, gradient_bytes=6.0)
    strategy = Strategy(zero_stage=1, attention="flash", profile=profile)
    memory = step_memory(LLAMA, FSDP, strategy, kind="gpu")
    assert memory["gradients"] == pytest.approx(6 * num_parameters(LLAMA.model), rel=1e-3)


def test_the_first_stage_has_no_logits():
    profile = FrameworkProfile(spmd_pipeline=False, fused_loss=False, loss_arrays=2.5)
    strategy = Strategy(num_microbatches=2, zero_stage=1, attention="flash", profile=profile)
    mesh = MeshShape(fsdp=4, pp=2)
    fullest, first = (
        step_memory(LLAMA, mesh, strategy, kind="gpu", is_first_stage=is_first) for is_first in (False, True)
    )
    assert fullest["logits"] == 2.5 * 4 * 2 * 8192 * 128_256 + 2 * 2 * 2 * 8192 * 4096
    assert "logits" not in first
    assert first["peak"] < fullest["peak"]


@pytest.mark.parametrize(
    ("shape", "filled"),
    [
        ((50_304, 400), (50_304, 400)),  # along columns, as 400 is no multiple of 128
        ((8, 400, 25, 64), (8, 512, 25, 64)),
        ((4, 448, 4, 128), (4, 448, 4, 128)),  # tiles of 4 rows
        ((4, 448, 3, 128), (4, 448, 3, 128)),  # 448 along the rows
        ((5, 3), (128, 4)),
    ],
)
def test_a_tpu_fills_dims_up_to_tiles_where_that_wastes_least(shape, filled):
    wanted = 1
    for dim in filled:
        wanted *= dim
    assert tiled_elements(shape) == wanted


def test_arguments_are_what_libtpu_allocates_for_them():
    """1.205 GiB by libtpu 0.0.42.1 for gpt2-xl's widths over fsdp=4, padded: `benchmarks/memory.py --json`."""
    workload = Workload(model=XL, batch=16, seq_len=2048)
    mesh = MeshShape(dp=4, fsdp=4)
    assert argument_bytes(workload, mesh, kind="tpu") / GIB == pytest.approx(1.205, abs=1e-3)
    assert argument_bytes(workload, mesh) / GIB == pytest.approx(1.141, abs=1e-3)


def test_the_peak_with_scores_through_memory_is_what_xla_allocates_on_gpus():
    """8.737 GiB for gpt2-xl's widths on 8 H100: `benchmarks/memory.py`."""
    workload = Workload(model=XL, batch=16, seq_len=2048, remat="matmuls")
    assert step_memory(workload, MeshShape(dp=8), kind="gpu")["peak"] / GIB == pytest.approx(8.737, rel=0.01)


@pytest.mark.parametrize(
    ("remat", "attention", "batch", "wanted"),
    [
        ("block", "cudnn", 8, 14.298),
        ("block", "flash", 8, 14.298),
        ("none", "cudnn", 8, 21.553),
        ("none", "cudnn", 64, 23.032),
    ],
)
def test_the_peak_with_a_fused_kernel_is_what_xla_allocates_on_gpus(remat, attention, batch, wanted):
    """GB that jax-cuda13-plugin 0.10.2 allocates for 8 layers of llama3-8b on 8 H100, in microbatches of a sequence."""
    model = replace(PRESETS["llama3-8b"], num_layers=8)
    workload = Workload(model=model, batch=batch, seq_len=8192, remat=remat)
    strategy = Strategy(attention=attention, num_microbatches=batch // 8)
    peak = step_memory(workload, MeshShape(fsdp=8), strategy, kind="gpu")["peak"]
    assert peak / 1e9 == pytest.approx(wanted, rel=0.015)


@pytest.mark.parametrize(
    ("name", "layers", "mesh", "remat", "wanted"),
    [
        ("mixtral-8x7b", 2, MeshShape(fsdp=8), "block", 14.69),
        ("mixtral-8x7b", 2, MeshShape(fsdp=4, ep=2), "block", 16.38),
        ("mixtral-8x7b", 2, MeshShape(fsdp=8), "matmuls", 17.42),
        ("mixtral-8x7b", 2, MeshShape(fsdp=8), "none", 18.57),
        ("qwen3-30b-a3b", 4, MeshShape(fsdp=2, ep=4), "matmuls", 23.01),
        ("qwen3-30b-a3b", 4, MeshShape(fsdp=2, ep=4), "none", 31.03),
        ("qwen3-30b-a3b", 2, MeshShape(dp=2, ep=4), "block", 22.85),
    ],
)
def test_the_peak_of_experts_in_loops_is_what_xla_allocates_on_gpus(name, layers, mesh, remat, wanted):
    """GB that jax-cuda13-plugin 0.10.2 allocates on 8 H100 for 16 sequences of 4,096 tokens, with cuDNN's kernel."""
    workload = Workload(model=replace(PRESETS[name], num_layers=layers), batch=16, seq_len=4096, remat=remat)
    peak = step_memory(workload, mesh, Strategy(attention="cudnn"), kind="gpu")["peak"]
    assert peak / 1e9 == pytest.approx(wanted, rel=0.06)


def test_scores_are_twice_there_in_float32_where_no_products_want_them_narrow():
    """In backward of attention beside weights: the gradient of what the softmax gives; half as much narrow, of both."""
    bf16, f32 = (
        Activations(replace(LLAMA, compute_dtype=dtype), FSDP, DEFAULT).in_attention(on_tpu=False)
        - Activations(replace(LLAMA, compute_dtype=dtype), FSDP, DEFAULT).in_attention(on_tpu=True)
        for dtype in ("bf16", "f32")
    )
    activations = Activations(LLAMA, FSDP, DEFAULT)
    assert bf16 == 6 * activations.scores + 2 * 4 * activations.inputs
    assert f32 == 4 * 4 * activations.inputs


@pytest.mark.parametrize(
    ("name", "remat", "compiled"),
    [
        ("tiny", "block", 6.274),
        ("tiny-llama4", "block", 14.638),
        ("tiny-llama4", "none", 23.011),
        ("tiny-gemma4", "block", 42.872),
        ("tiny-gemma4", "none", 44.651),
        ("tiny-gemma4", "matmuls", 39.720),
        ("tiny-gemma4-e2b", "block", 48.162),
    ],
)
def test_cpus_recompute_a_layer_of_each_kind_at_once(name, remat, compiled):
    """Megabytes of temporaries by jaxlib 0.10.2 for cpu:8, of which a fifth to two thirds were planned before."""
    workload = Workload(model=PRESETS[name], batch=16, seq_len=128, remat=remat, compute_dtype="f32")
    mesh = MeshShape(fsdp=8)
    memory = step_memory(workload, mesh)
    assert memory["peak"] - argument_bytes(workload, mesh) == pytest.approx(1e6 * compiled, rel=0.21)
    assert ("recomputed early" in memory) == (name != "tiny")
