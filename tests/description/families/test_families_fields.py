"""Every field of a config.json is honoured, refused by name and value, or known to change nothing."""

import json
import math
from dataclasses import asdict, replace

import pytest

from meshwright.description.families.registry import (
    FAMILIES,
    PRESETS,
    PUBLISHED,
    hugging_face_config,
    model_from_data,
    model_from_hugging_face,
)
from meshwright.description.step.blocks import program
from meshwright.description.step.frequencies import (
    DynamicRopeScaling,
    Frequencies,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    YarnRopeScaling,
)
from meshwright.description.step.layer import of_layers
from meshwright.description.step.model import AttentionConfig, RotaryPositions, rotary
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.places import places

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0} | {
    "original_max_position_embeddings": 4096
}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7}
LOCAL, FULL = "sliding_attention", "full_attention"


def read(**changes):
    return model_from_hugging_face(LLAMA | changes, name="m")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logits_scaling": 8.0}, "logits_scaling=8.0; a llama model is not known to have it"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"rope_theta": "x"}, "rope_theta='x'; it takes a number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True; it takes a whole number from 1"),
        ({"attention_bias": "yes"}, "attention_bias='yes'; it takes true or false"),
        ({"hidden_act": "mish"}, "hidden_act='mish'; the activations read are"),
        ({"layer_types": [FULL, LOCAL, FULL, LOCAL]}, "layer_types="),
        ({"sliding_window": 8}, "sliding_window=8; a llama model has no such field"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; its family rotates whole heads"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_scaling of type 'proportional'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "no 'max_position_embeddings'"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "rope scaling's truncate=1; it takes true or false"),
        ({"rope_scaling": YARN | {"beta_fast": "x"}}, "rope scaling's beta_fast='x'; it takes a number above 0"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 1.5}}, "original_max_position_embeddings=1.5"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "theta=1; it takes a number above 1 with yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "no 'max_position_embeddings'"),
        ({"rope_scaling": LONG | {"long_factor": 2.0}}, "rope scaling's long_factor=2.0; it takes a list of numbers"),
        ({"rope_scaling": LONG | {"long_factor": [2.0]}}, "1 numbers in its rope scaling's long_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no field 'factor' in its rope scaling of type 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "a field that is not known 'beta'"),
    ],
)
def test_what_is_not_known_is_refused_by_name_and_value(changes, said):
    with pytest.raises(MeshwrightError) as error:
        read(**changes)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_fields_that_change_nothing_are_taken_and_so_is_null_and_false():
    assert read(torch_dtype="bfloat16", attention_dropout=0.1, some_new_field=None, is_new=False) == read()


def test_rope_parameters_of_transformers_5_are_those_of_before():
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}}
    old = {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    assert read(**new) == read(**old)
    llama3 = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    assert read(**new).positions == rotary(500_000.0, llama3)
    assert read(model_type="phi3", rope_parameters={"partial_rotary_factor": 0.5}).positions.dims == 8


@pytest.mark.parametrize(
    ("fields", "scaling", "magnitude"),
    [
        ({"rope_scaling": YARN}, YarnRopeScaling(factor=4.0, original_max_seq_len=2048), 0.1 * math.log(4) + 1),
        (
            {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 1.0, "beta_fast": 16, "truncate": False}},
            YarnRopeScaling(
                factor=4.0, original_max_seq_len=2048, mscale=2.0, mscale_all_dim=1.0, beta_fast=16.0, truncate=False
            ),
            (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 512},
            DynamicRopeScaling(factor=2.0, original_max_seq_len=512),
            1.0,
        ),
        (
            {"rope_parameters": LONG},
            LongRopeScaling(
                short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, factor=2.0, original_max_seq_len=4096
            ),
            math.sqrt(1 + math.log(2) / math.log(4096)),
        ),
        # The length beside the scaling holds, and the factor follows from the lengths.
        (
            {
                "rope_scaling": {name: value for name, value in LONG.items() if name != "factor"},
                "original_max_position_embeddings": 2048,
                "max_position_embeddings": 8192,
            },
            LongRopeScaling(
                short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, factor=4.0, original_max_seq_len=2048
            ),
            math.sqrt(1 + math.log(4) / math.log(2048)),
        ),
    ],
)  # fmt: skip
def test_rope_scalings_are_read_and_written(fields, scaling, magnitude):
    model = read(**fields)
    assert model.positions == rotary(10_000.0, scaling)
    assert Frequencies(theta=1e4, scaling=scaling).magnitude == pytest.approx(magnitude)
    assert model_from_hugging_face(hugging_face_config(model), name="m") == model
    assert model_from_data(json.loads(json.dumps(asdict(model)))) == model


@pytest.mark.parametrize(
    "fields",
    [
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
        },
        {
            "rope_parameters": {
                LOCAL: {"rope_type": "default", "rope_theta": 1e4},
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
            "layer_types": [LOCAL, LOCAL, FULL, LOCAL, LOCAL, FULL, LOCAL],
        },
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_gemma_3_has_windows_and_a_theta_for_each_kind_of_layer(fields):
    model = model_from_hugging_face(GEMMA3 | fields, name="m")
    assert model.attention == AttentionConfig(windows=(8, 8, None), qk_norm="head")
    local, everywhere = Frequencies(theta=1e4), Frequencies(theta=1e6, scaling=LinearRopeScaling(factor=8.0))
    assert model.positions == RotaryPositions(frequencies=(local, local, everywhere))
    assert (model.norms.place, model.norms.offset, model.scales.embedding) == ("both", 1.0, 8.0)


def test_frequencies_are_those_of_each_layer_where_the_last_cycle_is_cut():
    types = [FULL, LOCAL, FULL, FULL, LOCAL]
    model = model_from_hugging_face(GEMMA3 | {"num_hidden_layers": 5, "layer_types": types}, name="m")
    assert model.attention.windows == (None, 8, None)
    thetas = [frequencies.theta for frequencies in of_layers(model.positions.frequencies, range(5))]
    assert thetas == [1e6 if kind == FULL else 1e4 for kind in types]


@pytest.mark.parametrize(
    ("num_layers", "step", "dense", "first", "cycle", "stacks"),
    [
        (4, 1, [], 0, (True,), {"layers": 4}),
        (4, 1, [1, 0], 2, (True,), {"dense_layers": 2, "layers": 2}),
        (6, 2, [], 0, (False, True), {"layers_0": 3, "layers_1": 3}),
        (5, 2, [], 1, (True, False), {"dense_layers": 1, "layers_0": 2, "layers_1": 2}),
        (3, 1, [1], 0, (True, False), {"layers_0": 1, "layers_1": 1, "layers_2": 1}),
        (8, 4, [], 0, (False, False, False, True), dict.fromkeys(map("layers_{}".format, range(4)), 2)),
    ],
)
def test_layers_with_experts_are_those_of_the_file(num_layers, step, dense, first, cycle, stacks):
    fields = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32} | {
        "num_hidden_layers": num_layers,
        "decoder_sparse_step": step,
        "mlp_only_layers": dense,
    }
    model = model_from_hugging_face(LLAMA | {"model_type": "qwen3_moe", **fields}, name="m")
    assert (model.experts.num_dense_layers, model.experts.layers) == (first, cycle)
    assert {stack.name: stack.num_layers for stack in program(model).stacks} == stacks
    sparse = [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense]
    assert [layer for layer in range(num_layers) if model.experts.are_in(layer)] == sparse
    places_of = {
        layer * p.every + p.first_layer
        for path, p in places(model).items()
        if "expert" in path
        for layer in range(p.parameter.num_layers)
    }
    assert places_of == {*sparse}
    assert model_from_hugging_face(hugging_face_config(model), name="m") == model
    assert model_from_data(json.loads(json.dumps(asdict(model)))) == model


def test_a_preset_survives_json_and_keeps_its_family():
    for model in PRESETS.values():
        assert model_from_data(json.loads(json.dumps(asdict(model)))) == model
        assert model.family.name in {*FAMILIES, "bloom", "palm"}


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.family.name)
def test_every_parameter_of_a_preset_has_a_published_name(published):
    """But for presets that borrow a family."""
    for model in published.presets:
        if model.family == published.family and not model.name.startswith("tiny"):
            split = (path.rpartition(".") for path, _ in leaves(parameters(model)))
            paths = {f"layers.{name}" if stack else name for stack, _, name in split}
            assert paths <= set(published.names)


@pytest.mark.parametrize("model", PRESETS.values(), ids=PRESETS)
def test_a_model_is_read_from_the_config_that_is_written_of_it(model):
    if model.name in ("tiny-moe-shared", "bloom-176b", "palm-540b"):
        with pytest.raises(MeshwrightError, match=f"no config.json of Hugging Face describes {model.name}"):
            hugging_face_config(model)
        return
    read = model_from_hugging_face(hugging_face_config(model), name=model.name)
    assert replace(read, mlp=model.mlp) == model
