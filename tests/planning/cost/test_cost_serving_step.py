"""The step of a server, term by term: against sums by hand, the closed form, its limits, and what was published."""

import math
from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.description.notation.inference import infer
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.parser import parse
from meshwright.description.step.parameter_tree import num_active_parameters, num_parameters
from meshwright.description.step.serve import activated_experts, keys_of_query, serve_step
from meshwright.description.step.serving import CACHE_SPLITS, Serving, ServingLayout
from meshwright.mesh import MeshShape
from meshwright.planning.cost.kv_cache import sequence_cache_bytes
from meshwright.planning.cost.rates.achieved import HBM_SHARE
from meshwright.planning.cost.rates.collective_time import achieved_seconds
from meshwright.planning.cost.roofline import critical_batch, op_seconds
from meshwright.planning.cost.serving_seconds import (
    BOUNDS,
    batch_of_equal_reads,
    compute_bound_batch,
    product_time,
    serving_collectives,
    serving_device_flops,
    serving_flops,
    serving_step,
)

LLAMA = Serving(model=PRESETS["llama3-70b"], prompt_len=8000, output_len=192, weight_dtype="int8", kv_dtype="int8")
V5E = parse_system("v5e:2x4")
TP8 = ServingLayout(MeshShape(tp=8))


def step(serving, layout, batch, system=V5E):
    return serving_step(serving, layout, batch, lay_mesh(system, layout.mesh.layout))


def bytes_by_array(serving, layout, batch):
    """(kind, axes, array) of each collective, and the bytes of one of its runs."""
    moves = serving_collectives(serving, layout, batch)
    return {(move.kind, "*".join(move.axes), move.array): move.bytes // move.count for move in moves}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("mesh", "cache"), [(MeshShape(tp=8), "heads"), (MeshShape(fsdp=2, tp=4), "batch"), (MeshShape(dp=8), "heads")]
)
def test_every_term_has_a_name_and_they_sum_to_the_step(phase, mesh, cache):
    found = step(replace(LLAMA, phase=phase, prompt_len=512), ServingLayout(mesh, cache), 16)
    assert set(found.breakdown_seconds) == set(BOUNDS)
    assert sum(found.breakdown_seconds.values()) == found.seconds
    assert sum(move.exposed_seconds for move in found.collectives) == found.breakdown_seconds["communication"]


def test_one_sequence_reads_the_weights_and_waits_for_nothing_else():
    """Batch 1 of Llama 3 8B in int8 on one v5e: every weight that multiplies, and a vector in and out of each, once.

    A column has a scale of four bytes; the head is in bf16.
    """
    layers = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)]
    moved = sum(k * n + 4 * n + 2 * (k + n) for k, n in layers * 32) + 2 * (4096 * 128_256 + 4096 + 128_256)
    serving = replace(LLAMA, model=PRESETS["llama3-8b"], prompt_len=1, output_len=1)
    found = step(serving, ServingLayout(MeshShape()), 1, parse_system("v5e:1x1"))
    assert found.breakdown_seconds["weights"] == pytest.approx(moved / (HBM_SHARE * 8.2e11))
    assert found.breakdown_seconds["products"] == found.breakdown_seconds["communication"] == 0
    assert found.breakdown_seconds["weights"] / found.seconds > 0.995


def test_the_cache_is_read_at_what_memory_achieves():
    """64 sequences of 8,192 tokens of 163,840 bytes, over 8 chips."""
    found = step(LLAMA, TP8, 64)
    assert found.breakdown_seconds["cache"] == pytest.approx(64 * 8192 * 163_840 / 8 / (HBM_SHARE * 8.2e11))


def test_a_product_of_the_books_is_bound_by_memory():
    """bf16[64, 8192] @ [8192, 28672 / 32] on v5e: 17.9 us to read, 4.8 to compute (scaling book, applied-inference)."""
    time = product_time(64, 8192, 896, system=V5E, serving=replace(LLAMA, weight_dtype="bf16"))
    assert time.bound == "memory"
    moved = 2 * (8192 * 896 + 64 * (8192 + 896))
    assert time.memory_seconds == pytest.approx(moved / 8.2e11 / HBM_SHARE)
    assert time.flops_seconds > 4.76e-6


@pytest.mark.parametrize("cache", CACHE_SPLITS)
@pytest.mark.parametrize("batch", [1, 8, 64, 240])
def test_no_step_is_under_the_closed_form(cache, batch):
    """Weights and caches shared out evenly, at the full rate of chips that need not talk (scaling book: inference)."""
    weights = num_parameters(LLAMA.model) - 128_256 * 8192  # rows of the table are looked up
    products = op_seconds(2 * batch * weights / 8, weights / 8, V5E)
    bound = batch * sequence_cache_bytes(LLAMA) / (8 * V5E.hbm_bytes_per_second) + products.seconds
    assert step(LLAMA, ServingLayout(MeshShape(fsdp=2, tp=4), cache), batch).seconds > bound


def test_a_step_never_shrinks_with_batch_context_or_wider_dtypes():
    for layout in (TP8, ServingLayout(MeshShape(fsdp=2, tp=4), "batch")):
        by_batch = [step(LLAMA, layout, batch).seconds for batch in range(1, 300, 7)]
        assert by_batch == sorted(by_batch)
        by_length = [step(replace(LLAMA, prompt_len=length), layout, 32).seconds for length in (1, 100, 1000, 10_000)]
        assert by_length == sorted(by_length)
        by_dtype = [step(replace(LLAMA, weight_dtype=dtype), layout, 8).seconds for dtype in ("int4", "int8", "bf16")]
        assert by_dtype == sorted(by_dtype)


def test_tensor_parallelism_in_one_dim_sums_the_stream_twice_a_layer():
    moves = serving_collectives(LLAMA, TP8, 64)
    assert [(m.kind, m.axes, m.array, m.bytes // m.count, m.count) for m in moves] == [
        ("all-reduce", ("tp",), "embedding", 64 * 8192 * 2, 1),
        ("all-reduce", ("tp",), "attention output", 64 * 8192 * 2, 80),
        ("all-reduce", ("tp",), "mlp output", 64 * 8192 * 2, 80),
        ("all-gather", ("tp",), "best tokens", 8 * 64 * 8, 1),
    ]


def test_weight_stationary_in_two_dims_sends_a_part_of_each():
    """2 B D / X over Y and 2 B F / Y over X (arXiv:2211.05102, section 3.2.2), and one more for what is gated."""
    found = bytes_by_array(LLAMA, ServingLayout(MeshShape(fsdp=4, tp=8), "heads"), 64)
    assert found["all-reduce", "tp", "mlp output"] == 64 * 2 * 8192 // 4
    assert found["reduce-scatter", "fsdp", "mlp hidden"] == 64 * 2 * 2 * 28672 // 8
    assert found["all-gather", "fsdp", "mlp hidden"] == 64 * 2 * 28672 // 8
    heads = 64 * 128 // 8 + 2 * 8 * 128 // 8
    assert found["all-reduce", "fsdp", "queries, keys and values"] == 64 * 2 * heads


def test_a_cache_split_by_batch_trades_heads_for_sequences_and_back():
    """Two all-to-alls of 64 / 1 sequences x 64 heads / 32 devices x 128 (scaling book, inference)."""
    found = bytes_by_array(LLAMA, ServingLayout(MeshShape(tp=8, sp=4), "batch"), 64)
    assert found["all-to-all", "sp", "queries"] == found["all-to-all", "sp", "heads"] == 64 * 2 * 128 * 2


def test_a_cache_split_by_sequence_gathers_queries_and_merges_parts():
    found = bytes_by_array(LLAMA, ServingLayout(MeshShape(tp=8, sp=4), "sequence"), 64)
    assert found["all-gather", "sp", "queries"] == 64 * 8 * 128 * 2
    assert found["all-reduce", "sp", "maxima"] == 64 * 8 * 4
    assert found["reduce-scatter", "sp", "heads and sums"] == 64 * 8 * (128 * 2 + 4)


def test_replicas_exchange_the_newest_tokens_alone():
    (move,) = serving_collectives(LLAMA, ServingLayout(MeshShape(dp=8)), 64)
    assert (move.kind, move.axes, move.bytes, move.array) == ("all-gather", ("dp",), 4 * 64, "newest tokens")
    alone, beside = step(LLAMA, TP8, 16), step(LLAMA, ServingLayout(MeshShape(dp=2, tp=8)), 32, parse_system("v5e:4x4"))
    for term in ("weights", "cache", "products"):
        assert alone.breakdown_seconds[term] == beside.breakdown_seconds[term]


def test_a_blocks_sum_is_shared_where_attention_and_mlp_are_parallel():
    palm = replace(LLAMA, model=PRESETS["palm-540b"])
    moves = serving_collectives(palm, ServingLayout(MeshShape(sp=8), "heads"), 64)
    assert [(move.array, move.count) for move in moves if move.count > 1] == [("block output", 118)]


def test_few_tokens_read_few_experts_and_many_read_all():
    assert [activated_experts(8, 2, 8, tokens) for tokens in (1, 2)] == pytest.approx([2, 8 * (1 - 0.75**2)])
    assert activated_experts(8, 2, 8, 64) == pytest.approx(8, rel=1e-7)
    assert activated_experts(8, 2, 2, 1) == pytest.approx(0.5)


def test_one_token_reads_the_active_parameters_of_a_mixture_and_many_all():
    """Of Mixtral 12.9e9 of 46.7e9 (arXiv:2401.04088): the rows of its table apart, scales and activations within 1%.

    The head, as large as the table, has two bytes an element, so what it has more is what the table would have had.
    """
    mixtral, system = replace(LLAMA, model=PRESETS["mixtral-8x7b"], prompt_len=1), parse_system("v5p:2x2x1")
    rate = 4 * HBM_SHARE * system.hbm_bytes_per_second
    few, many = (step(mixtral, ServingLayout(MeshShape(tp=4)), batch, system) for batch in (1, 64))
    assert few.breakdown_seconds["weights"] == pytest.approx(num_active_parameters(mixtral.model) / rate, rel=0.01)
    assert many.breakdown_seconds["weights"] == pytest.approx(num_parameters(mixtral.model) / rate, rel=0.02)


def test_a_token_is_sent_once_to_each_device_of_its_experts():
    """Two experts of 8 over 2 devices are on 2 (1 - 1/4) = 1.5 of them."""
    mixtral = replace(LLAMA, model=PRESETS["mixtral-8x7b"])
    found = bytes_by_array(mixtral, ServingLayout(MeshShape(ep=2, tp=4)), 64)
    assert found["all-to-all", "ep", "experts dispatch"] == 1.5 * 32 * 4096 * 2 / 4
    assert found["all-reduce", "tp", "mlp output"] == 32 * 4096 * 2


@pytest.mark.parametrize(
    ("model", "flops_per_byte"),
    [
        ("llama3-70b", 8),  # the query heads that share a kv head
        ("llama2-7b", 1),
        # 128 heads times (576 + 512) flops of a pair, for a latent and its key, 576 elements.
        ("deepseek-v3", 128 * (576 + 512) / 576),
    ],
)
def test_attention_of_a_token_has_the_intensity_of_its_cache(model, flops_per_byte):
    """In bf16 (scaling book, inference: grouped-query attention; DeepSeek-V2, arXiv:2405.04434)."""
    serving = replace(LLAMA, model=PRESETS[model], kv_dtype="bf16")
    found = serve_step(serving, ServingLayout(MeshShape()), 4)
    for op in found.ops.attention:
        flops = 2 * found.extents.local(op.query) * found.extents.sizes["keys"] * (1 + op.value_dim / op.qk_dim)
        assert flops / (2 * sum(map(found.extents.local, op.cache))) == pytest.approx(flops_per_byte)


def test_a_prompt_has_half_its_pairs_and_of_a_window_those_inside_it():
    serving = replace(LLAMA, phase="prefill", prompt_len=16384)
    assert keys_of_query(serving) == 16384 / 2
    mistral = replace(serving, model=PRESETS["mistral-7b"])
    assert 16384 * keys_of_query(mistral) == 16384 * 4096 - 4096**2 / 2
    assert keys_of_query(replace(mistral, prompt_len=4096)) == 4096 / 2


def test_the_flops_of_a_step_are_two_for_each_weight_and_token():
    """Logits of the last token alone; attention 4 flops a pair and dim of the heads."""
    model, table = LLAMA.model, 128_256 * 8192
    norms = 161 * 8192
    inside = num_parameters(model) - 2 * table - norms
    pairs = 4 * 80 * 64 * 128
    assert serving_flops(LLAMA, 3) == 3 * (2 * (inside + table) + pairs * 8192)
    prefill = replace(LLAMA, phase="prefill")
    assert serving_flops(prefill, 1) == 2 * (8000 * inside + table) + pairs * 8000**2 / 2


def test_the_flops_of_experts_are_whole():
    """64 rows of 7.9992 experts, as many as are chosen on average: three layers were 2e-5 less than whole."""
    serving = Serving(model=replace(PRESETS["mixtral-8x7b"], num_layers=3), prompt_len=1984, output_len=64)
    of_layer = 2 * 32 * 4096 * (2 * 4096 + 2 * 1024 + 8) + 2 * 64 * 3 * 4096 * 14336 + 4 * 32 * 32 * 128 * 2048
    found = serving_device_flops(serving, ServingLayout(MeshShape()), 32)
    assert found == 3 * of_layer + 2 * 32 * 4096 * 32000


def test_products_are_compute_bound_from_the_critical_batch_of_each_group():
    """120 sequences for int8 weights and bf16 arithmetic on v5e (scaling book, inference), times E / k of experts."""
    rows = critical_batch(V5E, weight_dtype="int8")
    assert compute_bound_batch(LLAMA, TP8, V5E) == rows == pytest.approx(120.12, abs=0.01)
    assert compute_bound_batch(LLAMA, ServingLayout(MeshShape(dp=4, tp=2)), V5E) == 4 * rows
    mixtral = replace(LLAMA, model=PRESETS["mixtral-8x7b"])
    assert compute_bound_batch(mixtral, TP8, V5E) == 4 * rows
    assert compute_bound_batch(mixtral, ServingLayout(MeshShape(ep=8)), V5E) == 8 * rows


def test_products_of_a_batch_wait_for_arithmetic_from_about_the_critical_batch_on():
    below, above = (step(LLAMA, TP8, batch).breakdown_seconds for batch in (60, 200))
    assert below["weights"] > 0 == below["products"]
    # The narrow products of keys and values still wait for their activations.
    assert above["products"] > 10 * above["weights"]


def test_as_much_cache_as_weights_is_read_from_some_batch_on():
    """72.74e9 bytes of weights, norms and scales on each device, against 8,192 x 163,840 a sequence: 54.2."""
    assert batch_of_equal_reads(LLAMA, TP8) == pytest.approx(54.19, abs=0.01)
    # Each replica has weights of its own to read; what splits a cache further leaves its sum.
    assert batch_of_equal_reads(LLAMA, ServingLayout(MeshShape(dp=2, tp=4))) == pytest.approx(2 * 54.17, abs=0.01)
    by_sequence = ServingLayout(MeshShape(fsdp=2, tp=4), "sequence")
    assert batch_of_equal_reads(LLAMA, by_sequence) == pytest.approx(54.19, abs=0.01)


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4 + 16 / 128)])
def test_a_step_of_one_sequence_takes_as_long_as_reading_what_weights_are_stored_in(dtype, bits):
    """On one device, a product of 4,096 inputs: fewer bits are read faster, and scales are read too."""
    serving = replace(LLAMA, weight_dtype=dtype)
    found = product_time(1, 4096, 14_336, system=V5E, serving=serving)
    scales = 0 if dtype == "int4" else 4 * 14_336
    moved = 4096 * 14_336 * bits / 8 + scales + 2 * (4096 + 14_336)
    assert found.memory_seconds == pytest.approx(moved / (HBM_SHARE * V5E.hbm_bytes_per_second))


@pytest.mark.parametrize(
    ("phase", "batch", "dtype", "measured_seconds", "error"),
    [
        ("decode", 64, "int8", 1.82 / 64, -0.41),
        ("decode", 512, "bf16", 6.0 / 64, -0.15),
        ("prefill", 1, "int8", 0.29, -0.02),
    ],
)
def test_palm_540b_on_64_chips_of_tpu_v4_is_within_its_stated_error(phase, batch, dtype, measured_seconds, error):
    """Efficiently Scaling Transformer Inference (arXiv:2211.05102, tables 2 and 3), nothing fitted to it.

    Steps of few sequences are predicted too short: what 118 layers of short ops take to start on a TPU is not known
    here, and the paper pads 48 heads to 64. Where arithmetic decides, the error is a few per cent: the preset has two
    norms in a block, whose outputs are gathered each by itself, where PaLM has one.
    """
    serving = Serving(
        model=PRESETS["palm-540b"], phase=phase, prompt_len=2048 - 64 * (phase == "decode"), output_len=64,
        weight_dtype=dtype,
    )  # fmt: skip
    layout = ServingLayout(MeshShape(fsdp=4, sp=16), "batch" if phase == "decode" else "sequence")
    found = step(serving, layout, batch, parse_system("v4:4x4x4"))
    assert found.seconds / measured_seconds - 1 == pytest.approx(error, abs=0.01)


def test_a_prefill_of_the_books_takes_about_as_long():
    """LLaMA 3 70B, 8,192 tokens on v5e:4x4: 0.91 s at the 40% that the book takes for granted (applied-inference).

    So it is with sums onto shards. The compiler makes all-reduces of those over the whole slice: 1.19 s.
    """
    serving = replace(LLAMA, phase="prefill", prompt_len=8192)
    system, mesh = parse_system("v5e:4x4"), MeshShape(tp=8, sp=2)
    found = step(serving, ServingLayout(mesh, "sequence"), 1, system)
    laid = lay_mesh(system, mesh.layout)
    onto_shards = sum(
        move.count * achieved_seconds(move.kind, move.bytes / move.count, laid, move.axes) for move, *_ in found.moves
    )
    seconds = found.seconds - found.breakdown_seconds["communication"] + onto_shards
    assert seconds == pytest.approx(0.91, rel=0.06)
    utilisation = serving_flops(serving, 1) / (seconds * 16 * system.peak("bf16"))
    assert math.isclose(utilisation, 0.40, abs_tol=0.015)
    assert found.seconds == pytest.approx(1.19, rel=0.01)


def test_the_notation_infers_the_same_collectives_of_an_mlp_in_two_dims():
    """The stream over X, hidden activations over Y then X, the result whole over Y: the first of all ways there are."""
    degrees, dims = {"X": 4, "Y": 8}, {"B": 64, "D": 8192, "F": 28672}
    texts = ("In[B, D_X] @ Win[D_X, F_Y] -> H[B, F_YX]", "H[B, F_YX] @ Wout[F_Y, D_X] -> Out[B, D_X]")
    ways = [infer(parse(text, axes=degrees), Sizes(degrees=degrees, dims=dims)).implementations[0] for text in texts]
    first, second = ([(move.kind, move.axes, move.bytes) for move in way.communications] for way in ways)
    found = bytes_by_array(LLAMA, ServingLayout(MeshShape(fsdp=4, tp=8)), 64)
    assert first == [("reduce-scatter", ("X",), found["reduce-scatter", "fsdp", "mlp hidden"] // 2)]  # of one, not two
    assert second == [
        ("all-gather", ("X",), found["all-gather", "fsdp", "mlp hidden"]),
        ("all-reduce", ("Y",), found["all-reduce", "tp", "mlp output"]),
    ]
