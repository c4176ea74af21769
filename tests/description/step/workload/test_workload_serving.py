from dataclasses import asdict, replace

import pytest

from meshwright.description.families.registry import PRESETS, serving_from_data
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.rules import local_parameter_shape
from meshwright.description.step.serving import SERVING_RULES, Serving, ServingLayout, cache_axes, check_serving
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape

LLAMA = Serving(model=PRESETS["llama3-70b"], prompt_len=8192, output_len=512)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"phase": "train"}, "phase is 'train'; it is one of prefill, decode"),
        ({"prompt_len": 0}, "prompt_len is 0; it takes a whole number from 1"),
        ({"output_len": -5}, "output_len is -5; it takes a whole number from 1"),
        ({"page_size": 0.5}, r"page_size is 0\.5; it takes a whole number from 1"),
        ({"batch": 0}, "batch is 0; it takes a whole number from 1"),
        ({"weight_dtype": "int3"}, "dtype 'int3' is not known"),
        ({"kv_dtype": "wide"}, "dtype 'wide' is not known"),
        ({"latency_seconds": 0.0}, r"latency_seconds is 0\.0; it takes a time above 0, as 0\.03"),
    ],
)
def test_a_serving_that_cannot_be_is_refused_in_one_line(wrong, message):
    with pytest.raises(MeshwrightError, match=message) as error:
        replace(LLAMA, **wrong)
    assert "\n" not in str(error.value)


def test_a_sequence_is_as_long_as_it_gets_of_a_prefill_as_its_prompt():
    assert LLAMA.context == 8704
    assert replace(LLAMA, phase="prefill").context == 8192


def test_activations_are_never_narrower_than_two_bytes():
    computed = {"bf16": "bf16", "f32": "f32", "int8": "bf16", "fp8": "bf16"}
    assert {dtype: replace(LLAMA, compute_dtype=dtype).activation_dtype for dtype in computed} == computed


@pytest.mark.parametrize(
    ("model", "mesh", "cache", "batch", "message"),
    [
        ("llama3-70b", MeshShape(pp=2), "heads", None, "pp=2; a server has no pipeline"),
        ("llama3-70b", MeshShape(ep=2), "heads", None, "ep=2, but llama3-70b has no experts"),
        ("llama3-70b", MeshShape(tp=128), "heads", None, "cannot split kv_heads=8 of layers.query"),
        ("llama3-70b", MeshShape(tp=8, sp=16), "heads", None, "cannot split group=8 of layers.query"),
        ("llama3-70b", MeshShape(fsdp=3), "heads", None, "cannot split"),
        ("deepseek-v3", MeshShape(sp=2), "batch", None, "cannot split group"),
        ("llama3-70b", MeshShape(dp=4), "heads", 6, r"batch 6 is not a multiple of dp\*ep = 4\*1 = 4"),
        ("llama3-70b", MeshShape(tp=8), "batch", None, r"fsdp\*sp=1, so that nothing splits the cache by batch"),
    ],
)
def test_a_layout_that_would_split_nothing_is_refused(model, mesh, cache, batch, message):
    serving = replace(LLAMA, model=PRESETS[model], batch=batch)
    with pytest.raises(MeshwrightError, match=message):
        check_serving(serving, ServingLayout(mesh, cache))


def test_more_devices_than_kv_heads_split_query_heads_mlp_and_vocab_alike():
    """32-way tensor parallelism of 8 kv heads: a fourth of the devices has each key and value head."""
    mesh = MeshShape(tp=8, sp=4)
    check_serving(LLAMA, ServingLayout(mesh, "sequence"))
    shapes = {
        path: local_parameter_shape(parameter, mesh=mesh, rules=SERVING_RULES, what=path)
        for path, parameter in leaves(parameters(LLAMA.model))
    }
    assert shapes["layers.query"] == (80, 8192, 1, 2, 128)
    assert shapes["layers.key"] == (80, 8192, 1, 128)
    assert shapes["layers.up"] == (80, 8192, 28672 // 32)
    assert shapes["layers.down"] == (80, 28672 // 32, 8192)
    assert shapes["unembedding"] == (8192, 128256 // 32)


def test_a_second_dim_of_the_weights_is_split_over_fsdp():
    mesh = MeshShape(fsdp=4, tp=8)
    up = parameters(LLAMA.model)["layers"]["up"]
    assert local_parameter_shape(up, mesh=mesh, rules=SERVING_RULES) == (80, 2048, 3584)


def test_a_latent_is_split_by_batch_over_tp_too_as_it_has_no_heads():
    assert cache_axes(PRESETS["llama3-70b"]) == ("fsdp", "sp")
    assert cache_axes(PRESETS["deepseek-v3"]) == ("fsdp", "sp", "tp")


def test_a_serving_survives_plain_data():
    for model in ("llama3-70b", "deepseek-v3"):
        serving = replace(LLAMA, model=PRESETS[model], batch=32, weight_dtype="int8", latency_seconds=0.03)
        assert serving_from_data(asdict(serving)) == serving


def test_a_layout_is_named_as_people_type_it():
    assert str(ServingLayout(MeshShape(tp=8))) == "tp=8"
    assert str(ServingLayout(MeshShape(tp=8, sp=4), "batch")) == "tp=8,sp=4 cache by batch"
