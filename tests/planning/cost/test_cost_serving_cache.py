"""The cache of a server: what a token, a sequence and a device hold."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.description.step.serve import kept_tokens, paged_tokens, serve_step
from meshwright.description.step.serving import Serving, ServingLayout, cache_lanes
from meshwright.mesh import MeshShape
from meshwright.planning.cost.kv_cache import (
    cache_bytes,
    mean_cache_bytes,
    paged_cache_bytes,
    sequence_cache_bytes,
    token_cache_bytes,
    wasted_share,
)
from meshwright.planning.cost.serving_bytes import most_sequences, serving_memory, weight_bytes

LLAMA = Serving(model=PRESETS["llama3-70b"], prompt_len=8000, output_len=192, weight_dtype="int8", kv_dtype="int8")
V5E = parse_system("v5e:2x4")


def device_cache_bytes(serving, layout, batch):
    return paged_cache_bytes(serve_step(serving, layout, batch), serving)


def read_cache_bytes(serving, layout, batch):
    """What the fullest device reads of its cache in a step that makes one token of every sequence."""
    step = serve_step(serving, layout, batch)
    return sum(step.repeats[op.region.name].mean * cache_bytes(op, step.extents, serving) for op in step.ops.attention)


@pytest.mark.parametrize(
    ("model", "published"), [("deepseek-v3", 70_272), ("llama3-405b", 516_096), ("llama3-70b", 327_680)]
)
def test_a_token_keeps_what_is_published_in_bf16(model, published):
    """Insights into DeepSeek-V3 (arXiv:2505.09343), table 1; the last as the scaling book has it."""
    assert token_cache_bytes(replace(LLAMA, model=PRESETS[model], kv_dtype="bf16")) == published


def test_a_sequence_of_8192_tokens_keeps_what_the_closed_form_says():
    closed = 2 * 8192 * 80 * 8 * 128
    assert sequence_cache_bytes(LLAMA) == closed == 8192 * 163_840


def test_a_sliding_window_keeps_its_tokens_alone():
    """Mistral's window of 4,096 (arXiv:2310.06825), however long the sequence gets."""
    mistral = replace(LLAMA, model=PRESETS["mistral-7b"])
    assert kept_tokens(mistral) == 4096
    assert sequence_cache_bytes(mistral) == sequence_cache_bytes(replace(mistral, prompt_len=100_000))
    assert kept_tokens(replace(mistral, prompt_len=1000)) == 1192


def test_the_last_page_is_wasted_in_part():
    odd = replace(LLAMA, prompt_len=8001)
    assert (kept_tokens(odd), paged_tokens(odd)) == (8193, 8208)
    assert wasted_share(odd) == pytest.approx(15 / 8208)
    assert wasted_share(LLAMA) == 0
    assert wasted_share(replace(odd, page_size=1)) == 0


@pytest.mark.parametrize(
    ("mesh", "cache", "batch", "shares"),
    [
        (MeshShape(tp=8), "heads", 32, 8),
        (MeshShape(tp=8, sp=4), "heads", 32, 8),  # copies over sp
        (MeshShape(tp=8, sp=4), "batch", 32, 32),
        (MeshShape(tp=8, sp=4), "sequence", 32, 32),
        (MeshShape(fsdp=2, tp=8, sp=2), "batch", 32, 32),
        (MeshShape(dp=2, tp=8), "heads", 32, 16),
    ],
)
def test_a_device_holds_its_share_of_the_cache(mesh, cache, batch, shares):
    layout = ServingLayout(mesh, cache)
    assert device_cache_bytes(LLAMA, layout, batch) * shares == batch * sequence_cache_bytes(LLAMA)
    assert read_cache_bytes(LLAMA, layout, batch) == device_cache_bytes(LLAMA, layout, batch)
    own = batch // layout.num_groups
    assert own * mean_cache_bytes(LLAMA, layout) == read_cache_bytes(LLAMA, layout, batch)


@pytest.mark.parametrize(
    ("model", "mesh", "width", "padded"),
    [
        ("gpt-oss-20b", MeshShape(tp=8), 128, 128),
        ("phi3-mini", MeshShape(tp=32), 192, 256),
        ("phi3-mini", MeshShape(tp=8), 768, 768),
        ("deepseek-v2", MeshShape(tp=8), 576, 640),
    ],
)
def test_on_tpus_the_keys_and_values_of_a_token_fill_whole_tiles(model, mesh, width, padded):
    plain = replace(LLAMA, model=PRESETS[model], kv_dtype="bf16")
    lanes = replace(plain, cache_lanes=cache_lanes("tpu"))
    layout = ServingLayout(mesh)
    held, wide = (device_cache_bytes(each, layout, 8) for each in (plain, lanes))
    assert wide * width == held * padded
    assert read_cache_bytes(lanes, layout, 8) * width == read_cache_bytes(plain, layout, 8) * padded
    assert token_cache_bytes(lanes) == token_cache_bytes(plain)


def test_a_batch_that_does_not_divide_fills_one_device_more():
    """33 sequences over 4 devices: one of them has 9."""
    layout = ServingLayout(MeshShape(tp=8, sp=4), "batch")
    assert device_cache_bytes(LLAMA, layout, 33) * 8 == 9 * sequence_cache_bytes(LLAMA)


def test_a_latent_is_copied_over_tp_but_where_it_is_split_by_batch():
    serving = replace(LLAMA, model=PRESETS["deepseek-v3"])
    whole = sequence_cache_bytes(serving)
    assert device_cache_bytes(serving, ServingLayout(MeshShape(tp=8)), 8) == 8 * whole
    assert device_cache_bytes(serving, ServingLayout(MeshShape(tp=8), "batch"), 8) == whole
    assert device_cache_bytes(serving, ServingLayout(MeshShape(tp=8), "sequence"), 8) == whole


@pytest.mark.parametrize(("mesh", "key_value_copies"), [(MeshShape(tp=8), 1), (MeshShape(tp=8, sp=4), 4)])
def test_a_byte_a_parameter_is_shared_out(mesh, key_value_copies):
    """Norms are whole on each device, and of two bytes as the table and the head; keys' and values' weights are copied
    beyond 8 devices. Columns have scales of four bytes, on each device those of products that sum over devices.
    """
    norms, ends, pairs = 161 * 8192, 2 * 128_256 * 8192, 2 * 80 * 8192 * 1024
    columns = 80 * (8192 + 2 * 28_672 + 2 * 1024 * key_value_copies + 2 * 8192 * mesh.num_devices)
    elements = num_parameters(LLAMA.model) + ends + (2 * mesh.num_devices - 1) * norms
    expected = elements + (key_value_copies - 1) * pairs + 4 * columns
    assert weight_bytes(LLAMA, ServingLayout(mesh)) * mesh.num_devices == expected


def test_four_bits_and_a_scale_for_each_group_of_128():
    """Of Llama 3 70B on 8 devices, which split every contraction in whole groups."""
    ends, norms = 2 * 128_256 * 8192, 161 * 8192
    layers = num_parameters(LLAMA.model) - ends - norms
    expected = layers * (0.5 + 2 / 128) + 2 * ends + 2 * 8 * norms
    assert weight_bytes(replace(LLAMA, weight_dtype="int4"), ServingLayout(MeshShape(tp=8))) * 8 == expected


def test_the_terms_of_memory_sum_to_the_peak():
    for phase in ("prefill", "decode"):
        memory = serving_memory(replace(LLAMA, phase=phase), ServingLayout(MeshShape(tp=8)), 4)
        assert memory["peak"] == memory["weights"] + memory["cache"] + memory["activations"]


def test_the_largest_batch_is_the_last_that_fits():
    """The scaling book has 43 caches of 8k tokens beside 70e9 bytes on 8 chips of 16e9.

    With 72.74e9 bytes of weights, the table and the head in bf16 among them, and activations it is two fewer; of the
    memory that is really usable there are 46.
    """
    layout = ServingLayout(MeshShape(tp=8))
    assert most_sequences(LLAMA, layout, V5E.hbm_bytes, 1000) == 41
    most = most_sequences(LLAMA, layout, V5E.usable_bytes, 1000)
    assert most == 46
    fits = [serving_memory(LLAMA, layout, batch)["peak"] <= V5E.usable_bytes for batch in (most, most + 1)]
    assert fits == [True, False]
    assert most_sequences(LLAMA, layout, V5E.usable_bytes, 5) == 5
    assert most_sequences(replace(LLAMA, weight_dtype="bf16"), layout, V5E.usable_bytes, 1000) == 0


COMPILED_PREFILL = [
    ("llama3-8b", "v5e:4x4", MeshShape(fsdp=16), "batch", 0.910),
    ("llama3-8b", "v5e:4x4", MeshShape(dp=2, tp=8), "heads", 1.284),
    ("llama3-8b", "v5e:4x4", MeshShape(fsdp=8, tp=2), "sequence", 4.199),
    ("llama3-8b", "v5e:4x4", MeshShape(fsdp=4, sp=4), "sequence", 2.360),
    ("palm-540b", "v4:4x4x4", MeshShape(fsdp=64), "batch", 19.339),
]
"""The peak in GB of two layers, compiled by libtpu 0.0.42.1 for prompts of 2,048 tokens; 8B with 16,384 words.

In the last the embedding table is gathered by an all-reduce of shards in zeros, and so there twice.
"""


@pytest.mark.parametrize(("name", "hardware", "mesh", "cache", "gigabytes"), COMPILED_PREFILL)
def test_prefill_holds_what_its_compiled_step_holds(name, hardware, mesh, cache, gigabytes):
    vocab = 16_384 if name == "llama3-8b" else PRESETS[name].vocab
    model, batch = replace(PRESETS[name], num_layers=2, vocab=vocab), 512 if name == "palm-540b" else 64
    serving = Serving(model=model, phase="prefill", prompt_len=2048, output_len=1)
    laid = lay_mesh(parse_system(hardware), mesh.layout)
    memory = serving_memory(serving, ServingLayout(mesh, cache), batch, laid)
    assert memory["peak"] / 1e9 == pytest.approx(gigabytes, rel=0.08)
