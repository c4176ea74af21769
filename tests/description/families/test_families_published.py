"""Configs as they are published on Hugging Face, cut to the fields that say the shape, against published counts."""

import json
from pathlib import Path

import pytest

from meshwright.description.families.registry import PRESETS, model_from_hugging_face
from meshwright.description.step.model import Biases
from meshwright.description.step.parameter_tree import num_active_parameters, num_parameters
from meshwright.errors import MeshwrightError

FILE = Path(__file__).parents[2] / "data" / "published_models.json"
"""Models by their repository on huggingface.co: the fields of config.json that say a shape, and the parameters that the
metadata of its safetensors count (the "Model size" of its page); where a tensor is stored twice (tied tables), once.

For each, `AutoModelForCausalLM.from_config` of transformers 5.23.0 on PyTorch's meta device has as many, but for the
biases of routers, which are buffers there (14,848 of DeepSeek-V3, 14,240 of GLM-4.5, 15,872 of MiniMax-M2), and the
factors of Gemma 4's layers, one each. Without the
modules that predict a second token. From SmolLM3 on, the counts are those of transformers alone.
"""

CONFIGS = {name: (row["config"], row["parameters"]) for name, row in json.loads(FILE.read_text()).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_is_read_to_the_last_parameter(name):
    config, count = CONFIGS[name]
    assert num_parameters(model_from_hugging_face(config, name=name)) == count


def test_a_token_meets_the_active_experts_alone():
    """Qwen3-30B-A3B is named after its 3.3B (arXiv:2505.09388, table 2)."""
    model = model_from_hugging_face(CONFIGS["Qwen/Qwen3-30B-A3B"][0], name="qwen")
    assert 3.2e9 < num_active_parameters(model) < 3.4e9
    # Llama 4's are named after their 17B.
    for name in ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "meta-llama/Llama-4-Maverick-17B-128E-Instruct"):
        assert 17.1e9 < num_active_parameters(model_from_hugging_face(CONFIGS[name][0], name="llama")) < 17.2e9


def test_what_llama_says_of_biases_and_activations_is_kept():
    config, _ = CONFIGS["meta-llama/Llama-2-7b-hf"]
    changes = {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
    model = model_from_hugging_face(config | changes, name="biased")
    assert (model.biases, model.activation) == (Biases(qkv=True, output=True, mlp=True), "gelu")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_without_a_size_names_it_whatever_the_family(name):
    config, _ = CONFIGS[name]
    with pytest.raises(MeshwrightError, match="no 'vocab_size', which a"):
        model_from_hugging_face({key: value for key, value in config.items() if key != "vocab_size"}, name=name)


def test_an_unknown_kind_is_answered_with_the_nearest_name():
    with pytest.raises(MeshwrightError, match="model_type 'llama5_text'; the nearest name is 'llama'; those read are"):
        model_from_hugging_face({"model_type": "llama5_text"}, name="later")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx=1; .* 0"),
        ({"intermediate_size": [64] * 7 + [48]}, "a number for each of num_hidden_layers=8, all the same"),
        ({"activation_sparsity_pattern": [0.0, 0.8] + [0.0] * 6}, "first one below 1, then 0"),
        ({"activation_sparsity_pattern": [0.8] * 5 + [0.0] * 3}, "it is 0 of the last num_kv_shared_layers=4"),
        ({"num_kv_shared_layers": 0}, "num_kv_shared_layers=0; it takes a whole number from 1"),
    ],
)
def test_streams_that_are_not_known_are_refused(changes, said):
    config = json.loads((Path(__file__).parents[2] / "references/gemma3n_text/config.json").read_text())
    with pytest.raises(MeshwrightError, match=said):
        model_from_hugging_face(config | changes, name="streams")


def test_ten_layers_are_sparse_where_more_are_there_and_none_are_named():
    config, _ = CONFIGS["google/gemma-3n-E2B"]
    pattern = config["activation_sparsity_pattern"]
    assert pattern == [0.95] * 10 + [0.0] * 20
    without = {name: value for name, value in config.items() if name != "activation_sparsity_pattern"}
    model = model_from_hugging_face(config, name="sparse")
    assert model_from_hugging_face(without, name="sparse") == model
    assert model.altup == PRESETS["gemma3n-e2b"].altup
    short = without | {"num_hidden_layers": 10, "num_kv_shared_layers": 2, "intermediate_size": 8192}
    assert model_from_hugging_face(short, name="short").altup.num_sparse_layers == 0


def test_experts_that_are_more_than_there_are_are_refused():
    config, _ = CONFIGS["mistralai/Mixtral-8x7B-v0.1"]
    with pytest.raises(MeshwrightError, match="9 active of 8 experts"):
        model_from_hugging_face(config | {"num_experts_per_tok": 9}, name="greedy")
