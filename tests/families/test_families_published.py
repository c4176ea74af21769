"""Configs as they are published on Hugging Face, cut to the fields that say the shape, against published counts."""

import pytest

from meshwright.errors import MeshwrightError
from meshwright.families import model_from_hugging_face
from meshwright.step import num_active_parameters, num_parameters

QWEN2 = {"hidden_act": "silu", "vocab_size": 152064, "hidden_size": 3584, "num_attention_heads": 28}

# (config, parameters): the counts are the totals of the index files of the weights, buffers left out.
CONFIGS = {
    "mistralai/Mistral-7B-v0.1": (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "sliding_window": 4096,
        },
        7_241_732_096,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        },
        46_702_792_704,
    ),
    "Qwen/Qwen2-7B": (
        QWEN2
        | {
            "model_type": "qwen2",
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "sliding_window": 131072,
            "use_sliding_window": False,
        },
        7_615_616_512,
    ),
    "Qwen/Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        30_532_122_624,
    ),
    "google/gemma-2b": (
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 256000,
        },
        2_506_172_416,
    ),
    "openai-community/gpt2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
            "activation_function": "gelu_new",
        },
        124_439_808,
    ),
    "EleutherAI/pythia-1b": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "vocab_size": 50304,
            "hidden_act": "gelu",
        },
        1_011_781_632,
    ),
    "google/gemma-3-1b-pt": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 512,
            "rope_scaling": None,
        },
        999_885_952,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 102400,
            "rope_scaling": {"type": "yarn", "factor": 40},
        },
        15_706_484_224,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_is_read_to_the_last_parameter(name):
    config, count = CONFIGS[name]
    assert num_parameters(model_from_hugging_face(config, name=name)) == count


def test_a_token_meets_the_active_experts_alone():
    """Qwen3-30B-A3B is named after its 3.3B (arXiv:2505.09388, table 2)."""
    model = model_from_hugging_face(CONFIGS["Qwen/Qwen3-30B-A3B"][0], name="qwen")
    assert 3.2e9 < num_active_parameters(model) < 3.4e9


def test_what_llama_says_of_biases_windows_and_activations_is_kept():
    config, _ = CONFIGS["mistralai/Mistral-7B-v0.1"]
    changes = {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
    model = model_from_hugging_face(config | changes, name="biased")
    assert (model.qkv_bias, model.output_bias, model.mlp_bias) == (True, True, True)
    assert (model.sliding_window, model.activation) == (4096, "gelu")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_without_a_size_names_it_whatever_the_family(name):
    config, _ = CONFIGS[name]
    with pytest.raises(MeshwrightError, match="no 'vocab_size', which a"):
        model_from_hugging_face({key: value for key, value in config.items() if key != "vocab_size"}, name=name)


def test_experts_that_are_more_than_there_are_are_refused():
    config, _ = CONFIGS["mistralai/Mixtral-8x7B-v0.1"]
    with pytest.raises(MeshwrightError, match="9 active of 8 experts"):
        model_from_hugging_face(config | {"num_experts_per_tok": 9}, name="greedy")
