"""Tiny models of every family made by transformers, with what they compute: `tests/references/NAME/`.

Each folder is a Hugging Face directory (`config.json`, safetensors, `generation_config.json`) and `golden.npz`,
float32: `tokens` [rows, longest] with `lengths`, `logits` [rows, longest, vocab] of each row alone, `continuations`
[rows, 8] taken greedily, and of some families `gradient.NAME` of the mean loss of the longest row. Weights are drawn so
large that every feature of a family changes the logits.

Run where torch 2.13.0 and transformers 5.23 are installed: `make references` does it in a venv of its own. Names as
arguments make those alone.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import text_models  # noqa: F401
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
WINDOWED = SIZES | {"num_hidden_layers": 5, "sliding_window": 6, "query_pre_attn_scalar": 20}
LOCAL, FULL = "sliding_attention", "full_attention"
# As google/gemma-4-31B: layers without a window have few wide heads, whose values are their keys.
GEMMA4 = SIZES | {
    "num_hidden_layers": 3,
    "sliding_window": 6,
    "num_global_key_value_heads": 2,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
    "layer_types": [LOCAL, LOCAL, FULL],
    "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    },
}
# As google/gemma-4-E2B: each layer has an input of its own, and the last ones attend to keys of earlier layers.
GEMMA4_SMALL = GEMMA4 | {
    "num_hidden_layers": 8,
    "layer_types": [LOCAL, FULL] * 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
}
# As google/gemma-3n-E2B: fewer tokens have inputs of layers than are in the vocabulary.
GEMMA3N = SIZES | {
    "num_hidden_layers": 8,
    "layer_types": [LOCAL, FULL] * 4,
    "sliding_window": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 2.0,
    "vocab_size_per_layer_input": 80,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 4,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.8] * 2 + [0.0] * 6,
    "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "default", "rope_theta": 1000.0},
    },
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 0.8, "beta_slow": 0.1}
SCALED_QUERIES = {"rope_type": "yarn", "rope_theta": 1000.0, **YARN, "original_max_position_embeddings": 8}
SCALED_QUERIES |= {"max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.6}
# Norms of latents have 1e-6 whatever the config says, and what multiplies scores is not what multiplies cosines.
DEEPSEEK = {
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, **YARN, "mscale": 1.5, "mscale_all_dim": 0.5},
}
EXPERTS = {
    name: DEEPSEEK[name]
    for name in (
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("first_k_dense_replace", "n_group", "topk_group"),
    )
} | {"routed_scaling_factor": 2.5}
LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1000.0, **LLAMA3}},
    "llama_yarn": SIZES
    | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, **YARN, "mscale": 1.5, "mscale_all_dim": 0.5}},
    # Its original length is the longest sequence.
    "llama_dynamic": SIZES
    | {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}},
    # Greater chunks than 6 would leave the shorter rows whole.
    "llama4_text": SIZES
    | {"intermediate_size": 24, "intermediate_size_mlp": 64, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    | {"attention_chunk_size": 6, "floor_scale": 4, "attn_scale": 0.6}
    | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1000.0, **LLAMA3}},
    "mistral": SIZES | {"sliding_window": 6},
    "ministral3": SIZES | {"rope_parameters": SCALED_QUERIES},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": SIZES | {"head_dim": 4},
    "qwen2_moe": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    | {"head_dim": 4, "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 6},
    "qwen3": SIZES,
    "qwen3_moe": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    # Dense layers between those with experts.
    "qwen2_moe_sparse": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    | {"head_dim": 4, "mlp_only_layers": [1]},
    "qwen3_moe_sparse": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2},
    "qwen3_next": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 16}
    | {"head_dim": 16, "num_hidden_layers": 8},
    "qwen3_5_text": SIZES
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 16}
    | {"head_dim": 16},
    "qwen3_5_moe_text": {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 40}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 16}
    | {"head_dim": 16},
    "gemma": SIZES | {"tie_word_embeddings": True},
    "gemma2": WINDOWED | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "tie_word_embeddings": True},
    "gemma3_text": WINDOWED
    | {
        "tie_word_embeddings": True,
        "layer_types": [LOCAL, LOCAL, FULL, LOCAL, LOCAL],
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        },
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"},
    "gemma4_text_moe": GEMMA4
    | {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "intermediate_size": 40,
    },
    "gemma4_text_e2b": GEMMA4_SMALL,
    "gemma3n_text": GEMMA3N,
    "gpt_oss": SIZES
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 6,
        "swiglu_limit": 0.5,
    }
    | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, **YARN, "truncate": False}},
    "phi3": SIZES | {"head_dim": 8, "partial_rotary_factor": 0.5, "pad_token_id": None, "sliding_window": 6},
    "phi3_longrope": SIZES
    | {"head_dim": 4, "pad_token_id": None, "original_max_position_embeddings": 16}
    | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 1.0, **LONG}},
    "deepseek_v2": DEEPSEEK
    | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0, "mlp_bias": True},
    "deepseek_v3": DEEPSEEK | {"q_lora_rank": 24, "routed_scaling_factor": 2.5, "num_mtp_layers": 0},
    "mistral4": DEEPSEEK | {"q_lora_rank": 24, "routed_scaling_factor": 2.5, "rope_parameters": SCALED_QUERIES},
    "olmo2": {name: size for name, size in SIZES.items() if name != "head_dim"},
    "olmo3": {name: size for name, size in SIZES.items() if name != "head_dim"}
    | {
        "sliding_window": 6,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 1000.0},
            FULL: {"rope_type": "yarn", "rope_theta": 1000.0, **YARN},
        },
    },
    "smollm3": SIZES | {"num_hidden_layers": 5, "use_sliding_window": False, "no_rope_layers": [1, 0, 1, 0, 1]},
    "granite": SIZES
    | {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "seed_oss": SIZES,
    "ernie4_5": SIZES | {"use_bias": True},
    "glm4": SIZES,
    "hunyuan_v1_dense": SIZES | {"attention_bias": True},
    "exaone4": SIZES | {"num_hidden_layers": 5, "sliding_window": 6},
    "starcoder2": SIZES | {"sliding_window": 6},
    "cohere2": {name: size for name, size in SIZES.items() if name not in ("head_dim", "tie_word_embeddings")}
    | {"num_hidden_layers": 5, "sliding_window": 6, "logit_scale": 0.25},
    "nemotron": SIZES,
    "phi": {name: size for name, size in SIZES.items() if name != "head_dim"} | {"qk_layernorm": True},
    "olmoe": {name: size for name, size in SIZES.items() if name != "head_dim"}
    | {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "glm4_moe": SIZES | {**EXPERTS, "attention_bias": True, "use_qk_norm": True},
    "dots1": SIZES | {**EXPERTS, "norm_topk_prob": True, "sliding_window": 6, "max_window_layers": 2},
    "minimax_m2": SIZES
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}},
    "phimoe": {name: size for name, size in SIZES.items() if name != "head_dim"}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "router_jitter_noise": 0.3}
    | {"attention_bias": True, "lm_head_bias": True, "sliding_window": None},
    "granitemoe": SIZES
    | {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 3.0}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "gpt2": {"vocab_size": 96, "n_positions": 48, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "gpt_neox": {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    | {"num_attention_heads": 4, "max_position_embeddings": 64},
}
"""What each model is made with beyond the defaults of its family."""

KINDS = {"gemma4_text_moe": "gemma4_text", "gemma4_text_e2b": "gemma4_text"} | {
    "llama_yarn": "llama",
    "llama_dynamic": "llama",
    "phi3_longrope": "phi3",
    "qwen2_moe_sparse": "qwen2_moe",
    "qwen3_moe_sparse": "qwen3_moe",
}
"""The model_type of those whose name is another."""

FP8, BLOCK = "deepseek_v3_fp8", 8
"""A golden whose weights are in fp8 with a scale for each block of so many rows and columns: `quantised/`."""

MXFP4 = "gpt_oss_mxfp4"
"""A golden whose experts' weights are in MXFP4."""

WITH_GRADIENTS = ("llama", "gemma2", "gpt2", "ministral3")
SHARDED = ("mixtral",)
LENGTHS = (5, 17, 12, 1, 9, 20, 3, 25)
LENGTHS_OF = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), (5, 64, 12, 70, 1, 2, 33, 150))
"""Tokens of each row: the delta rule works in chunks of 64."""

NUM_NEW = 8
FOLDER = Path(__file__).parent


def main() -> None:
    """Write a folder for each model."""
    for name in sys.argv[1:] or (*CONFIGS, FP8, MXFP4):
        if name == FP8:
            quantise("deepseek_v3", FOLDER / "quantised" / FP8)
        elif name == MXFP4:
            pack("gpt_oss", FOLDER / "quantised" / MXFP4)
        else:
            make(name, CONFIGS[name])


def make(name: str, changes: dict[str, Any]) -> None:
    """One model: its directory and what it computes."""
    config = transformers.AutoConfig.for_model(KINDS.get(name, name), **changes)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, None, None
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    draw(model)
    draw_buffers(model)
    model.generation_config.eos_token_id = None
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size="200KB" if name in SHARDED else "1GB")
    golden = computed(model, gradients=name in WITH_GRADIENTS, lengths=LENGTHS_OF.get(name, LENGTHS))
    np.savez_compressed(folder / "golden.npz", **golden)
    spread = float(golden["logits"].max() - golden["logits"].min())
    print(f"{name:<14}{sum(p.numel() for p in model.parameters()):>9,} parameters, logits over {spread:.1f}")


def quantise(name: str, folder: Path) -> None:
    """A golden with its products in fp8, and what it computes once transformers has them dequantised."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FOLDER / name, folder, ignore=shutil.ignore_patterns("*.npz"))
    held, plain = load_file(folder / "model.safetensors"), {}
    for own, weight in list(held.items()):
        if "proj" in own and own.endswith(".weight"):
            rows, columns = (size // BLOCK for size in weight.shape)
            blocks = weight.reshape(rows, BLOCK, columns, BLOCK)
            scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            rounded = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(weight.shape)
            held[own], held[f"{own}_scale_inv"] = rounded, scale
            plain[own] = Fp8Dequantize(None)._dequantize_one(rounded, scale, torch.float32)
        else:
            plain[own] = weight
    with tempfile.TemporaryDirectory() as whole:
        shutil.copytree(FOLDER / name, whole, dirs_exist_ok=True)
        save_file(plain, Path(whole) / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(whole, attn_implementation="eager")
        np.savez_compressed(folder / "golden.npz", **computed(model.eval(), gradients=False))
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}, indent=2) + "\n")


def pack(name: str, folder: Path) -> None:
    """A golden with its experts' weights drawn in MXFP4, and what it computes as transformers dequantises them."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FOLDER / name, folder, ignore=shutil.ignore_patterns("*.npz", "mutations.json"))
    held, plain = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for own, weight in list(held.items()):
        plain[own] = weight
        if own.endswith("_proj") and "experts" in own:
            experts, width, length = weight.shape
            shape = (experts, length, width // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
            del held[own]
            held[f"{own}_blocks"], held[f"{own}_scales"] = blocks, scales
            plain[own] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    with tempfile.TemporaryDirectory() as whole:
        shutil.copytree(FOLDER / name, whole, dirs_exist_ok=True)
        save_file(plain, Path(whole) / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(whole, attn_implementation="eager")
        np.savez_compressed(folder / "golden.npz", **computed(model.eval(), gradients=False))
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}, indent=2) + "\n")


def draw(model: torch.nn.Module) -> None:
    """Draw every parameter: matrices as large as keeps a product's size, vectors around their mean."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            if name.endswith("A_log"):
                # Some heads forget at once, others keep their state over several chunks.
                parameter.copy_(2 * noise - 3)
            elif parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def draw_buffers(model: torch.nn.Module) -> None:
    """Draw what chooses experts and what multiplies layers, which are no parameters."""
    with torch.no_grad():
        for number, (name, buffer) in enumerate(sorted(model.named_buffers())):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1000 + number)))
            elif name.endswith("layer_scalar"):
                buffer.add_(0.3 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1000 + number)))


def computed(model: Any, *, gradients: bool, lengths: tuple[int, ...] = LENGTHS) -> dict[str, np.ndarray]:
    """Logits of each row alone, what follows it greedily, and the gradients of the longest row's mean loss."""
    vocab = model.config.vocab_size
    # Frequencies that grow with the text are kept for what a cache holds.
    has_cache = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type") == "dynamic"
    tokens = np.random.default_rng(0).integers(0, vocab, (len(lengths), max(lengths)))
    logits = np.zeros((*tokens.shape, vocab), np.float32)
    continuations = np.zeros((len(lengths), NUM_NEW), np.int64)
    for row, length in enumerate(lengths):
        own = torch.tensor(tokens[row : row + 1, :length])
        with torch.no_grad():
            # A short text first: transformers keeps frequencies that grew with the row before.
            model(own[:, :1])
            logits[row, :length] = model(own).logits[0].numpy()
            given, cache = own, None
            for step in range(NUM_NEW):
                result = model(given, use_cache=has_cache, past_key_values=cache)
                chosen, cache = result.logits[:, -1:].argmax(-1), result.past_key_values
                continuations[row, step] = int(chosen)
                given = chosen if has_cache else torch.cat([given, chosen], dim=1)
    found = {"tokens": tokens, "lengths": np.array(lengths), "logits": logits, "continuations": continuations}
    if gradients:
        own = torch.tensor(tokens[-1:])
        scores = model(own).logits[0, :-1]
        torch.nn.functional.cross_entropy(scores, own[0, 1:]).backward()
        for name, parameter in model.named_parameters():
            found[f"gradient.{name}"] = parameter.grad.numpy()
    return found


if __name__ == "__main__":
    main()
