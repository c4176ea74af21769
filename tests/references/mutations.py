"""What is changed in the config.json of a golden to see whether each of its fields is honoured.

Each mutation is a field's name, and the fields of config.json with other values; `ABSENT` for a field left out. A field
of a config.json for which nothing here has a value is an error: a new field has to be thought of.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ABSENT = "<absent>"
LOCAL, FULL = "sliding_attention", "full_attention"


class Mutation(NamedTuple):
    """A change to a config.json, and the field whose effect it shows: with a dot where it is within another."""

    field: str
    changes: dict[str, Any]


ACTIVATIONS = (
    *("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "gelu_10", "gelu_accurate", "quick_gelu"),
    *("relu", "relu2", "relu6", "silu", "swish", "sigmoid", "tanh", "mish", "leaky_relu", "linear", "laplace"),
    *("hardswish", "sqrtsoftplus", "gelu_python_tanh"),
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

VALUES: Mapping[str, tuple[Any, ...]] = {
    # Sizes.
    **dict.fromkeys(("vocab_size",), (80,)),
    **dict.fromkeys(("n_embd", "intermediate_size", "moe_intermediate_size", "n_inner"), (48,)),
    "hidden_size": (48, 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (2,)),
    **dict.fromkeys(("n_head",), (2, 16)),
    "num_attention_heads": (2, 16),
    "num_key_value_heads": (8, 2, 1, None),
    "head_dim": (8, 16, None),
    "num_local_experts": (3, 6),
    "num_experts": (3, 6),
    "num_experts_per_tok": (1, 3),
    "n_routed_experts": (4, 12),
    "n_shared_experts": (1, 3, None),
    "first_k_dense_replace": (0, 2),
    "q_lora_rank": (12, None),
    "kv_lora_rank": (12,),
    "qk_nope_head_dim": (4,),
    "qk_rope_head_dim": (4,),
    "v_head_dim": (8,),
    # Linear attention.
    "linear_num_key_heads": (2, 3),
    "linear_num_value_heads": (4, 12),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), (24,)),
    "linear_conv_kernel_dim": (3, 1),
    # Routers.
    "n_group": (1, 2, None),
    "topk_group": (1, 3, None),
    "swiglu_alpha": (1.0,),
    "swiglu_limit": (1.0,),
    "topk_method": ("greedy", "noaux_tc", "another"),
    "scoring_func": ("softmax", "sigmoid"),
    "routed_scaling_factor": (0.5,),
    # Blocks.
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ACTIVATIONS),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"), (0.2,)),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), (0.7, 2)),
    **dict.fromkeys(("logits_scaling", "logit_scale"), (0.7, 2.0)),
    "clip_qkv": (1.0,),
    "no_rope_layers": ([0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0], [1, 0]),
    "no_rope_layer_interval": (2,),
    "sliding_window_pattern": (2,),
    "sliding_window": (3, 12, 64, None),
    "attention_chunk_size": (3, 16, 64, None),
    "floor_scale": (9,),
    "attn_scale": (0.1,),
    "interleave_moe_layer_step": (1, 3),
    "moe_layers": ([0, 2], [3], [], None),
    "intermediate_size_mlp": (48,),
    "query_pre_attn_scalar": (4, 100),
    "hidden_size_per_layer_input": (8, 16, 0),
    "vocab_size_per_layer_input": (32, 128),
    "num_kv_shared_layers": (2, 0, 5, 6, 7),
    "altup_active_idx": (1,),
    "altup_coef_clip": (1.0, None),
    "altup_num_inputs": (2, 3),
    "laurel_rank": (12,),
    "activation_sparsity_pattern": (
        *([share] * count + [0.0] * (8 - count) for share, count in ((0.5, 2), (0.8, 3), (0.8, 0), (0.8, 5), (1.0, 2))),
        [0.8, 0.5] + [0.0] * 6,
        [0.0] * 6 + [0.8] * 2,
        [0.8],
        0.8,
        None,
    ),
    "top_k_experts": (1, 3),
    "per_layer_config": (
        {"2": {"head_dim": 8, "num_key_value_heads": 2}},
        {"2": {"head_dim": 16, "num_key_value_heads": 1}},
        {"0": {"head_dim": 16, "num_key_value_heads": 2}},
        {"2": {"head_dim": 16}},
        None,
    ),
    "attn_logit_softcapping": (1.0, None),
    "final_logit_softcapping": (1.0, None),
    "shared_expert_intermediate_size": (32,),
    "rotary_pct": (0.5, 1.0),
    "partial_rotary_factor": (0.25, 1.0),
    "max_window_layers": (0, 1, 2),
    "_sliding_window_pattern": (2,),
    "use_bidirectional_attention": (True,),
    "decoder_sparse_step": (2,),
    "mlp_only_layers": ([0], [2], [3]),
    "original_max_position_embeddings": (8, 16),
    # Positions: learned ones beyond the tokens are not looked up.
    "max_position_embeddings": (16, 2048),
    "n_positions": (32,),
    # Who made the file, tokens of a meaning, training.
    "architectures": (["Another"], None),
    "dtype": ("bfloat16", None),
    "transformers_version": ("4.0.0",),
    **dict.fromkeys(TOKENS, (1,)),
    "initializer_range": (0.5,),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), (0.9,)),
    **dict.fromkeys(("residual_dropout", "embedding_dropout"), (0.9,)),
    "eod_token_id": (1,),
    **dict.fromkeys(
        ("summary_first_dropout", "router_jitter_noise", "router_aux_loss_coef", "input_jitter_noise"), (0.9,)
    ),
    "classifier_dropout": (0.9,),
    "pretraining_tp": (2,),
    **dict.fromkeys(("qk_head_dim", "num_nextn_predict_layers"), (2,)),
    "summary_activation": ("tanh",),
    "summary_type": ("mean",),
}
"""Other values of each field; a flag has its other one."""

FIXED = ("model_type", "layer_types", "rope_parameters")
"""Fields that are changed below, or make another family."""

STRANGERS: Mapping[str, Any] = {
    "attention_bias": True,
    "mlp_bias": True,
    "qkv_bias": False,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "sliding_window": 3,
    "use_sliding_window": True,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 1.0,
    "query_pre_attn_scalar": 4,
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "norm_topk_prob": False,
    "num_experts": 4,
    "n_group": 2,
    "routed_scaling_factor": 2.5,
    "use_parallel_residual": False,
    "scale_attn_by_inverse_layer_idx": True,
    "clip_qkv": 1.0,
    "qk_layernorm": True,
    "use_qk_norm": True,
    "logit_scale": 2.0,
    "logits_scaling": 2.0,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 2.0,
    "attention_multiplier": 2.0,
    "alibi": True,
    "quantization_config": {"bits": 4, "quant_method": "gptq"},
}
"""Fields of some families, given to those whose config.json has them not."""

MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 0.8,
    "beta_slow": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.6,
}
"""The rotary embedding of the golden of that name, and of mistral4."""

PHIMOE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
    "short_mscale": 1.25,
    "long_mscale": 1.25,
    # transformers 5.23 keeps the short factors in longer texts, other than the model's own code.
    "original_max_position_embeddings": 32,
}
HUNYUAN = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0}
"""Fields of its released models' rotary embedding without effect."""

QWEN3_5 = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [1, 1, 0],
}
"""Its rotary embedding by three positions, which are the same in a text."""

MORE: Mapping[str, tuple[dict[str, Any], ...]] = {
    "gemma3_text": (
        {"sliding_window_pattern": 2},
        {"sliding_window_pattern": 2, "layer_types": ABSENT},
        {"_sliding_window_pattern": 2, "layer_types": ABSENT},
        {"rope_local_base_freq": 50.0},
        {"rope_local_base_freq": 50.0, "rope_parameters": ABSENT},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": ABSENT},
    ),
    "gpt_neox": (
        {"rotary_pct": 0.5},
        {"rotary_pct": 0.5, "rope_parameters": ABSENT},
        {"rotary_pct": 1.0, "rope_parameters": ABSENT},
        {"rotary_emb_base": 50},
        {"rotary_emb_base": 50, "rope_parameters": ABSENT},
    ),
    "deepseek_v2": (
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"topk_method": "greedy", "n_group": ABSENT, "topk_group": ABSENT},
        {"topk_method": ABSENT, "n_group": ABSENT, "topk_group": ABSENT},
        {"scoring_func": "sigmoid"},
        {"moe_layer_freq": 2},
        {"rope_interleave": False},
        {"aux_loss_alpha": 0.5},
        {"seq_aux": False},
    ),
    "deepseek_v3": (
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"qk_rope_head_dim": 4, "head_dim": ABSENT},
        {"topk_method": "greedy"},
        {"topk_method": "noaux_tc"},
        {"scoring_func": "softmax"},
        {"moe_layer_freq": 2},
        {"mlp_bias": True},
        {"num_mtp_layers": 1},
        {"ep_size": 4},
    ),
    "ministral3": (
        *({"rope_parameters": {**MINISTRAL3, "llama_4_scaling_beta": beta}} for beta in (0.1, None)),
        {"rope_parameters": {**MINISTRAL3, "original_max_position_embeddings": 16}},
        {"rope_parameters": {**MINISTRAL3, "rope_type": "default"}},
        {"sliding_window": 6},
    ),
    "mistral4": (
        *({"rope_parameters": {**MINISTRAL3, "llama_4_scaling_beta": beta}} for beta in (0.1, None)),
        {"rope_parameters": {**MINISTRAL3, "original_max_position_embeddings": 16}},
        {"rope_parameters": {**MINISTRAL3, "mscale_all_dim": 0.5}},
        {"rope_parameters": {**MINISTRAL3, "partial_rotary_factor": 0.5}},
        {"rope_interleave": False},
        {"first_k_dense_replace": 0},
        {"norm_topk_prob": False},
        {"num_local_experts": 8},
    ),
    # As google/gemma-4-31B has them.
    "gemma4_text": (
        *({"global_head_dim": 16, "num_global_key_value_heads": n, "per_layer_config": ABSENT} for n in (1, 2, None)),
        {"global_head_dim": 16, "attention_k_eq_v": False, "num_global_key_value_heads": 2, "per_layer_config": ABSENT},
        {"num_global_key_value_heads": 2, "per_layer_config": ABSENT},
        {
            "layer_types": [LOCAL, FULL, FULL],
            "per_layer_config": {str(layer): {"head_dim": 16, "num_key_value_heads": 2} for layer in (1, 2)},
        },
        {
            "layer_types": [LOCAL, FULL, FULL],
            "per_layer_config": {str(layer): {"head_dim": 8 * layer, "num_key_value_heads": 2} for layer in (1, 2)},
        },
        {"use_bidirectional_attention": "vision"},
        {"use_bidirectional_attention": "all"},
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20},
        # As google/gemma-4-E2B and E4B have them.
        {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "layer_types": [LOCAL, FULL] * 4},
        {"num_kv_shared_layers": 3, "layer_types": [LOCAL, LOCAL, FULL, LOCAL, FULL, LOCAL, LOCAL, FULL]},
    ),
    "gemma3n_text": (
        {"intermediate_size": [64] * 4 + [48] * 4},
        {"intermediate_size": [48] * 8},
        {"num_kv_shared_layers": 3, "layer_types": [LOCAL, LOCAL, FULL, LOCAL, FULL, LOCAL, LOCAL, FULL]},
    ),
    # As MiniMaxAI/MiniMax-M2 has them.
    "minimax_m2": (
        *({"rotary_dim": dims} for dims in (4, 12)),
        {"rotary_dim": 8, "rope_parameters": ABSENT},
        {"rotary_dim": 8, "partial_rotary_factor": 0.5, "rope_parameters": ABSENT},
        {"num_experts": 6},
        {"num_experts": 6, "num_local_experts": ABSENT},
        {"scoring_func": "softmax"},
        {"use_routing_bias": False},
        {"qk_norm_type": "per_head"},
        {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1},
        {"attn_type_list": [1, 1, 1, 1], "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192},
    ),
    # As microsoft/Phi-3.5-MoE-instruct has them.
    "phimoe": (
        *({"router_jitter_noise": noise} for noise in (0.01, 0.1, 0.0, ABSENT)),
        *({"rope_parameters": {**PHIMOE_LONG, "long_mscale": scale}} for scale in (1.25, 1.5)),
        {"rope_parameters": {name: value for name, value in PHIMOE_LONG.items() if name != "short_mscale"}},
        {"rope_scaling": PHIMOE_LONG, "rope_theta": 100.0, "rope_parameters": ABSENT},
        *({"num_experts_per_tok": count} for count in (1, 3)),
        {"lm_head_bias": False, "attention_bias": False},
        {"input_jitter_noise": 0.1},
        {"sliding_window": 6},
    ),
    # As Qwen/Qwen3-Next-80B-A3B-Instruct has it, and other layers of each kind.
    "qwen3_next": (
        {"full_attention_interval": 4},
        {"full_attention_interval": 2},
        *({"full_attention_interval": every, "layer_types": ABSENT} for every in (2, 3, 4)),
        {"layer_types": ["linear_attention", "full_attention"] * 4},
        {"layer_types": ["full_attention"] + ["linear_attention"] * 7},
    ),
    # As Qwen/Qwen3.5-27B and Qwen/Qwen3.5-35B-A3B have them.
    "qwen3_5_text": (
        {"full_attention_interval": 2, "layer_types": ABSENT},
        {"layer_types": ["full_attention"] + ["linear_attention"] * 3},
        {"rope_parameters": QWEN3_5},
        {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"},
        {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
    ),
    "qwen3_5_moe_text": (
        {"full_attention_interval": 2, "layer_types": ABSENT},
        {"rope_parameters": QWEN3_5},
        {"intermediate_size": 48},
        {"mlp_only_layers": []},
        {"mlp_only_layers": [1]},
        {"decoder_sparse_step": 2},
    ),
    # As openai/gpt-oss-20b has them.
    "gpt_oss": ({"experts_per_token": 3}, {"initial_context_length": 8}, {"swiglu_limit": 7.0}),
    "smollm3": (
        *({"no_rope_layers": ABSENT, "no_rope_layer_interval": every, "layer_types": ABSENT} for every in (2, 3)),
        *({"no_rope_layers": ABSENT, "sliding_window": 5, "use_sliding_window": on} for on in (True, False)),
    ),
    "olmo3": ({"rope_local_base_freq": 50.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    # As tencent/Hunyuan-7B-Instruct has it.
    "hunyuan_v1_dense": tuple(
        {"rope_scaling": {"type": "dynamic", "alpha": alpha, "factor": 1.0, **HUNYUAN}, "rope_parameters": ABSENT}
        for alpha in (1000.0, 10.0)
    ),
    "exaone4": (
        {"sliding_window": None, "layer_types": [FULL] * 5},
        {"sliding_window_pattern": 2, "layer_types": ABSENT},
        {"sliding_window_pattern": "LLLG"},
    ),
    "glm4": ({"partial_rotary_factor": 0.25, "rope_parameters": ABSENT},),
    "nemotron": ({"partial_rotary_factor": 0.25, "rope_parameters": ABSENT},),
    "starcoder2": ({"mlp_type": "default"}, {"norm_type": "layer_norm"}),
    # As CohereLabs/c4ai-command-r7b-12-2024 has them.
    "cohere2": (
        {"sliding_window_pattern": 2, "layer_types": ABSENT},
        {"layer_switch": 2},
        {"order_of_interleaved_layers": "local_attn_first"},
        {"position_embedding_type": "rope_gptj"},
        {"rotary_pct": 1.0},
        {"use_parallel_block": True, "use_gated_activation": True},
        {"use_parallel_embedding": False, "use_embedding_sharing": False},
    ),
    # As meta-llama/Llama-4-Scout-17B-16E has them.
    "llama4_text": (
        {"moe_layers": ABSENT, "interleave_moe_layer_step": 1},
        {"no_rope_layers": [], "layer_types": ABSENT},
        {"no_rope_layers": [1, 0, 1, 0], "layer_types": ABSENT},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 24,
            }
        },
        {"for_llm_compressor": False},
    ),
    "qwen3_moe": (
        {"decoder_sparse_step": 5},
        {"mlp_only_layers": [0, 1]},
        {"use_sliding_window": True, "max_window_layers": 9, "sliding_window": 5},
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 5},
    ),
}
"""Of single families: fields that transformers reads and does not write, and values that need another."""

SKIPPED = ("llama_dynamic", "llama_yarn", "qwen2_moe_sparse", "qwen3_moe_sparse")
"""Goldens of a family that has one more: what they have otherwise is among its mutations."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 24,
}


def mutations(config: Mapping[str, Any]) -> Iterator[Mutation]:
    """The mutations of a config.json: of every field that it has, and those of its family."""
    for field, value in config.items():
        if field in FIXED:
            continue
        values = VALUES.get(field) or ((not value,) if isinstance(value, bool) else None)
        if values is None:
            raise KeyError(f"no other value of {field}={value!r}: give one in VALUES")
        for other in values:
            if other != value:
                yield Mutation(field, {field: other})
        if field not in TOKENS:  # The defaults are tokens of a larger vocabulary.
            yield Mutation(field, {field: ABSENT})
    if "layer_types" in config:
        yield from _layer_types(config)
    if "rope_parameters" in config:
        yield from _rope(config)
    for field, value in STRANGERS.items():
        if field not in config:
            yield Mutation(field, {field: value})
    if "layer_types" not in config:
        layers = config.get("num_hidden_layers") or config["n_layer"]
        yield Mutation("layer_types", {"layer_types": [LOCAL, FULL] * (layers // 2) + [LOCAL] * (layers % 2)})
    for changes in MORE.get(config["model_type"], ()):
        yield Mutation(next(iter(changes)), changes)


def _layer_types(config: Mapping[str, Any]) -> Iterator[Mutation]:
    layers = config["num_hidden_layers"]
    for types in (
        [FULL] * layers,
        [LOCAL] * layers,
        [FULL if layer % 2 else LOCAL for layer in range(layers)],
        [LOCAL if layer % 2 else FULL for layer in range(layers)],
        [LOCAL] * (layers - 1) + [FULL],
        [FULL] * (layers - 1) + [LOCAL],
    ):
        if types != config["layer_types"]:
            yield Mutation("layer_types", {"layer_types": types})
    yield Mutation("layer_types", {"layer_types": ABSENT})
    yield Mutation("num_hidden_layers", {"num_hidden_layers": 2, "layer_types": ABSENT})
    if "use_sliding_window" in config:
        on = {"use_sliding_window": True, "layer_types": ABSENT, "sliding_window": 5}
        for first in (0, 1, 2, layers, ABSENT):
            yield Mutation("max_window_layers", on | {"max_window_layers": first})
        yield Mutation("use_sliding_window", on | {"max_window_layers": 0, "use_sliding_window": ABSENT})
        yield Mutation("sliding_window", on | {"max_window_layers": 0, "sliding_window": ABSENT})
        for types in ([LOCAL] * layers, [FULL if layer % 2 else LOCAL for layer in range(layers)]):
            yield Mutation("layer_types", on | {"layer_types": types})
            yield Mutation("layer_types", {"layer_types": types, "sliding_window": 5})


def _rope(config: Mapping[str, Any]) -> Iterator[Mutation]:
    """Rotary embedding as `rope_parameters` says it, and the fields of files from before transformers 5."""
    held = config["rope_parameters"]
    parts = {name: own for name, own in held.items() if isinstance(own, dict)}
    for part, own in parts.items() or [("", held)]:

        def changed(new: Any, part: str = part) -> dict[str, Any]:
            return {"rope_parameters": held | {part: new} if part else new}

        name = "rope_parameters." + (f"{part}." if part else "")
        for field, value in own.items():
            if field not in ("rope_type", "type"):
                for other in (ABSENT, *((value * 2,) if not isinstance(value, bool | list) else ())):
                    new = {key: old for key, old in (own | {field: other}).items() if old != ABSENT}
                    yield Mutation(name + field, changed(new))
        theta = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
        dims = _rotary_dims(config, own)
        for field, scaling in _scalings(dims):
            if scaling["rope_type"] == "longrope" and not _has_plain_heads(config):
                continue
            yield Mutation(name + field, changed(theta | scaling))
            if field == "rope_type":
                # The length that a scaling begins at where it says none.
                own_start = {key: value for key, value in scaling.items() if key != "original_max_position_embeddings"}
                yield Mutation("max_position_embeddings", changed(theta | own_start) | {"max_position_embeddings": 16})
        yield Mutation(name + "rope_type", changed(theta | {"type": "linear", "factor": 4.0}))
        yield Mutation(name + "partial_rotary_factor", changed(own | {"partial_rotary_factor": 0.5}))
    yield Mutation("rope_parameters", {"rope_parameters": ABSENT})
    yield Mutation("rope_parameters", {"rope_parameters": None})
    linear, llama3 = {"type": "linear", "factor": 2.0}, LLAMA3
    for old in ({"rope_theta": 70.0}, {"rope_scaling": linear}, {"rope_scaling": llama3}, {"rope_scaling": YARN}):
        for rest in ({}, {"rope_parameters": ABSENT}, {"rope_parameters": ABSENT, "rope_theta": 70.0}):
            yield Mutation(next(iter(old)), rest | old)
    if "partial_rotary_factor" not in config:
        yield Mutation("partial_rotary_factor", {"partial_rotary_factor": 0.5})
        yield Mutation("partial_rotary_factor", {"partial_rotary_factor": 0.5, "rope_parameters": ABSENT})


def _rotary_dims(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    heads = config.get("qk_rope_head_dim") or config.get("head_dim")
    width = heads or config["hidden_size"] // config["num_attention_heads"]
    return int(width * rope.get("partial_rotary_factor", 1.0))


def _has_plain_heads(config: Mapping[str, Any]) -> bool:
    """Whether heads share the stream evenly: Phi-3 checks longrope's factors as if they did."""
    return config["model_type"] != "phi3" or config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]


def _scalings(dims: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind of scaling, and of those with options each option; dims: those of a head that turn."""
    long, short = [2.0 + n for n in range(dims // 2)], [1.0 + n / 2 for n in range(dims // 2)]
    longrope = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 16,
    }
    for scaling in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN, longrope):
        yield "rope_type", scaling
    yield "rope_type", {"rope_type": "dynamic", "factor": 2.0}
    yield "rope_type", {"rope_type": "proportional", "factor": 2.0}
    yield "rope_type", {"rope_type": "nothing", "factor": 2.0}
    yield "beta_fast", YARN | {"beta_fast": 2.0}
    yield "beta_slow", YARN | {"beta_slow": 0.5}
    yield "beta_slow", YARN | {"beta_fast": 2.0, "beta_slow": 0.25}
    yield "attention_factor", YARN | {"attention_factor": 2.0}
    yield "mscale", YARN | {"mscale": 2.0}
    yield "mscale", YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}
    yield "mscale_all_dim", YARN | {"mscale_all_dim": 0.5}
    yield "truncate", YARN | {"truncate": False}
    yield "factor", YARN | {"factor": 16.0}
    yield "original_max_position_embeddings", YARN | {"original_max_position_embeddings": 8}
    yield "factor", longrope | {"factor": 8.0}
    yield "attention_factor", longrope | {"attention_factor": 2.0}
    yield "short_factor", longrope | {"short_factor": [3.0 + n for n in range(dims // 2)]}
    yield "long_factor", longrope | {"long_factor": [3.0 + n for n in range(dims // 2)]}
    yield "long_factor", longrope | {"long_factor": long[1:]}
    yield "original_max_position_embeddings", longrope | {"original_max_position_embeddings": 40}
    yield "low_freq_factor", LLAMA3 | {"low_freq_factor": 0.5}
    yield "high_freq_factor", LLAMA3 | {"high_freq_factor": 8.0}
