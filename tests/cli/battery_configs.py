"""Fields of a Llama's config.json, one changed at a time: exit code, the fields, and the word that has to be said.

`...` takes a field out.
"""

NAN, INF = float("nan"), float("inf")

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

REFUSED = [
    *({name: ...} for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
    *({name: ...} for name in ("vocab_size", "model_type")),
    *(
        {name: value}
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        for value in (0, -1, 1.5, "x", True, [1], {"a": 1}, 10**12, NAN)
    ),
    *({"num_key_value_heads": value} for value in (-1, 3, 1.5, "x", True, 16)),
    *({"head_dim": value} for value in (0, -16, "abc", 1.5, [16])),
    *({"rope_theta": value} for value in (NAN, INF, -INF, -1, 0, "x", True, [1e4])),
    *({"rms_norm_eps": value} for value in (NAN, INF, -1, 0, "x", True)),
    *({"tie_word_embeddings": value} for value in ("x", 1, [True])),
    *({"attention_bias": value} for value in ("x", 1)),
    *({"hidden_act": value} for value in ("tanh", 1, [], {}, "")),
    *({"model_type": value} for value in ("bert", "", 1, [], None)),
    *({"rope_scaling": value} for value in ("x", 1, [1], {"rope_type": "yarn"}, {"rope_type": "dynamic"})),
    {"rope_scaling": {"rope_type": "llama3"}},
    {"rope_scaling": LLAMA3 | {"factor": NAN}},
    {"rope_scaling": LLAMA3 | {"factor": "8"}},
    {"rope_scaling": LLAMA3 | {"unknown": 1}},
    {"rope_scaling": {"rope_type": ["llama3"]}},
    {"rope_scaling": LLAMA3 | {"low_freq_factor": 5.0}},
    {"hidden_act": None},
    {"rms_norm_eps": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": NAN}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
    {"rope_parameters": {"rope_type": "proportional"}},
    {"rope_parameters": "x"},
    *({"partial_rotary_factor": value} for value in (0, -1, NAN, "x", 0.5)),
    *({"sliding_window": value} for value in (-1, "x", 1.5, 32)),
    *({"layer_types": value} for value in ("x", [1], ["chunked_attention"] * 2, [["full_attention"]])),
    {"quantization_config": {"quant_method": "fp8"}},
    *({name: 30.0} for name in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")),
    *(
        {name: 2.0}
        for name in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    ),
    *({name: 8} for name in ("num_local_experts", "num_experts_per_tok", "n_routed_experts")),
    {"no_rope_layers": [1, 0]},
    {"scale_embeddings": True},
    {"some_new_field": 1},
    {"num_attention_heads": 3, "num_key_value_heads": 3},
    {"num_attention_heads": 12, "num_key_value_heads": 4},
]
"""What is no Llama, or nothing at all: refused, with the name of the field."""

HONOURED = [
    {"rope_theta": 5e5},
    {"rope_scaling": LLAMA3},
    {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_theta": ...},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": ...},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    *({"rope_scaling": {"type": kind, "factor": 4}, "max_position_embeddings": 512} for kind in ("yarn", "dynamic")),
    {"tie_word_embeddings": True},
    {"head_dim": 32},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"hidden_act": "gelu"},
    {"num_key_value_heads": ...},
]
"""What a model is built with."""

WITHOUT_EFFECT = [
    {"rope_scaling": None},
    {"torch_dtype": "bfloat16"},
    {"dtype": "bfloat16"},
    {"attention_dropout": 0.1},
    {"initializer_range": 0.02},
    {"max_position_embeddings": 16},
    {"use_cache": True, "bos_token_id": 1, "eos_token_id": [2, 3], "transformers_version": "5.0.0"},
    {"some_new_field": None},
    {"some_new_field": False},
]
"""What is known to change no forward pass."""


def _row(fields):
    """A refused row: the field's name has to be said; of two, the first."""
    name = next(iter(fields))
    said = {"rope_scaling": "rope", "rope_parameters": "rope", "hidden_act": "activation"}.get(name, name)
    if fields[name] is None:
        said = name
    if fields.get("num_attention_heads") in (3, 12):
        said = "which they do not divide"
    elif fields.get("num_key_value_heads") in (3, 16):
        said = "are shared evenly among them"
    return 2, fields, said


ROWS = [*map(_row, REFUSED), *((0, fields, "train") for fields in (*HONOURED, *WITHOUT_EFFECT))]
