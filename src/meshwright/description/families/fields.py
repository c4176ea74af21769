"""The fields of a Hugging Face `config.json`: each is used, refused with an error, or known to have no effect.

A family uses a field by reading it from `Fields`. An unread field is refused by name, unless it is in `WITHOUT_EFFECT`,
the family declares it unused (`unused_options`), or its value is null or false.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from typing import Any, Literal

from meshwright.description.step.layer import Activation, ClampedSwiglu, shortest_cycle
from meshwright.errors import MeshwrightError

Config = Mapping[str, Any]

WITHOUT_EFFECT: frozenset[str] = frozenset(
    (
        # Who made the file, and with what.
        *("_name_or_path", "architectures", "auto_map", "model_type", "tokenizer_class", "torch_dtype", "dtype"),
        *("transformers_version", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
        # Special tokens and sampling.
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
        *("forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size"),
        *("num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "prefix", "remove_invalid_values"),
        *("repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p"),
        *("typical_p", "cache_implementation", "use_cache"),
        # Return values of a call, and classification heads.
        *("id2label", "label2id", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("problem_type", "return_dict", "finetuning_task", "task_specific_params", "classifier_dropout"),
        # How matmuls are split, which changes no result.
        *("chunk_size_feed_forward", "pretraining_tp", "tf_legacy_loss", "use_bfloat16", "torchscript"),
        # Training: initialisation, dropout (`--dropout`), recomputation (`--remat`), the load balancing loss.
        *("initializer_range", "attention_dropout", "hidden_dropout", "gradient_checkpointing"),
        *("router_aux_loss_coef", "router_jitter_noise"),
        # The longest sequence a model was trained on: unless learned, positions extend beyond it.
        *("max_position_embeddings", "pruned_heads"),
    )
)
"""Fields that do not change the forward pass of any family; they are ignored."""

LATENT_DEFAULTS: Config = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

SCALED_QUERIES: Config = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}

GEMMA4_DEFAULTS: Config = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}

LINEAR_DEFAULTS: Config = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

DEFAULTS: Mapping[str, Config] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            **SCALED_QUERIES,
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
        },
    },
    "mistral4": {
        "num_key_value_heads": 32,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 4,
        "rope_parameters": {
            **SCALED_QUERIES,
            "rope_theta": 10_000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama4_text": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
    },
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2": {"num_key_value_heads": 32, "max_window_layers": 28},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28},
    "qwen3_moe": {"num_key_value_heads": 4},
    "qwen3_next": {
        **LINEAR_DEFAULTS,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "num_experts": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "qwen3_5_text": {**LINEAR_DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12288},
    "qwen3_5_moe_text": {
        **LINEAR_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    "gemma4_text": {**GEMMA4_DEFAULTS, "sliding_window": 512, "hidden_size_per_layer_input": 256},
    "gemma4_unified_text": {**GEMMA4_DEFAULTS, "sliding_window": 1024},
    "gemma3n_text": {"num_key_value_heads": 2, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 512},
    "gpt_oss": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "rope_theta": 150_000.0,
    },
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    "ernie4_5": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "glm4": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 0.00000015625,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "hunyuan_v1_dense": {"rms_norm_eps": 1e-5},
    "exaone4": {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    "starcoder2": {
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096, "tie_word_embeddings": True},
    "phi": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "olmoe": {"rms_norm_eps": 1e-5, "num_experts": 64},
    "glm4_moe": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "dots1": {
        "num_key_value_heads": 32,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
    },
    "minimax_m2": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5_000_000.0,
        "num_local_experts": 256,
    },
    "phimoe": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_local_experts": 16, "num_experts_per_tok": 2},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "gpt2": {"n_positions": 1024},
    "deepseek_v2": {**LATENT_DEFAULTS, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    "deepseek_v3": {
        "num_key_value_heads": 128,
        **LATENT_DEFAULTS,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
}
"""Defaults of transformers 5 for missing fields, by model_type, if they differ from Llama's."""

_BIASES, _WINDOWS = ("attention_bias", "mlp_bias", "qkv_bias"), ("sliding_window", "layer_types")

LACKING: Mapping[str, tuple[str, ...]] = {
    "llama": ("qkv_bias", *_WINDOWS),
    "llama4_text": ("mlp_bias", "qkv_bias", "sliding_window"),
    "mistral": (*_BIASES, "layer_types"),
    "ministral3": (*_BIASES, "layer_types"),
    "mistral4": ("mlp_bias", "qkv_bias"),
    "mixtral": (*_BIASES, "layer_types"),
    "qwen2": ("attention_bias", "mlp_bias"),
    "qwen2_moe": ("attention_bias", "mlp_bias"),
    "qwen3": ("mlp_bias", "qkv_bias"),
    "qwen3_moe": ("mlp_bias", "qkv_bias", "layer_types"),
    "qwen3_next": ("mlp_bias", "qkv_bias", "sliding_window"),
    "qwen3_5_text": ("mlp_bias", "qkv_bias", "sliding_window"),
    "qwen3_5_moe_text": ("mlp_bias", "qkv_bias", "sliding_window"),
    "gemma": ("mlp_bias", "qkv_bias", *_WINDOWS),
    "gemma2": ("mlp_bias", "qkv_bias"),
    "gemma3_text": ("mlp_bias", "qkv_bias", "attn_logit_softcapping"),
    "gemma4_text": ("mlp_bias", "qkv_bias", "attn_logit_softcapping"),
    "gemma4_unified_text": ("mlp_bias", "qkv_bias", "attn_logit_softcapping", "enable_moe_block"),
    "gemma3n_text": ("mlp_bias", "qkv_bias", "attn_logit_softcapping", "enable_moe_block"),
    "phi3": (*_BIASES, "layer_types"),
    "olmo2": ("mlp_bias", "qkv_bias", *_WINDOWS),
    "olmo3": ("mlp_bias", "qkv_bias"),
    "smollm3": ("qkv_bias",),
    "phi": (*_BIASES, *_WINDOWS),
    "olmoe": (*_BIASES[1:], *_WINDOWS),
    "glm4_moe": ("mlp_bias", "qkv_bias", *_WINDOWS),
    "dots1": ("mlp_bias", "qkv_bias"),
    "minimax_m2": (*_BIASES, *_WINDOWS),
    "phimoe": ("mlp_bias", "qkv_bias", "layer_types"),
    "granitemoe": ("mlp_bias", "qkv_bias", *_WINDOWS),
    "granite": ("qkv_bias", *_WINDOWS),
    "seed_oss": ("qkv_bias", *_WINDOWS),
    "ernie4_5": (*_BIASES, *_WINDOWS),
    "glm4": ("mlp_bias", "qkv_bias", *_WINDOWS),
    "hunyuan_v1_dense": ("mlp_bias", "qkv_bias", *_WINDOWS),
    "exaone4": _BIASES,
    "starcoder2": (*_BIASES, "layer_types"),
    "cohere2": ("mlp_bias", "qkv_bias"),
    "nemotron": ("qkv_bias", *_WINDOWS),
}
"""By model_type, fields that other families have but this one lacks in transformers; refused unless null or false."""

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

MOST = {"num_hidden_layers": 10_000, "n_layer": 10_000}
"""Largest value of these fields; it is 10^9 for all others. A search over larger models would take too long."""

LARGEST_NUMBER = 1e300
"""Upper limit of numbers; NaN and infinity exceed it."""

_MISSING = object()


class Fields:
    """The fields of one config.json. Each method returns a field with a type check; it raises for another type."""

    def __init__(self, data: Config, *, name: str, family: str) -> None:
        """Take a file's fields, and transformers' defaults for missing ones (`DEFAULTS`).

        Raises for a field in `LACKING`.

        Args:
            data: the fields of the file.
            name: the model's name, for messages.
            family: the file's model_type.
        """
        data = {**DEFAULTS.get(family, {}), **data}
        self._data, self.name, self.family = data, name, family
        self._known: set[str] = set(WITHOUT_EFFECT)
        for field in LACKING.get(family, ()):
            if self.value(field, False) is not False:
                raise self.refusal(field, f"a {family} model has no such field")

    def value(self, field: str, default: Any = _MISSING) -> Any:
        """Return a field; the default if it is absent or null. Raises if there is no default."""
        self._known.add(field)
        found = self._data.get(field)
        if found is None and default is _MISSING:
            raise MeshwrightError(f"the config.json of {self.name} has no {field!r}, which a {self.family} model needs")
        return default if found is None else found

    def whole(self, field: str, default: Any = _MISSING, *, least: int = 1) -> Any:
        """Return a whole number of at least `least`, or the default."""
        found = self.value(field, default)
        if found is default:
            return found
        if isinstance(found, int) and not isinstance(found, bool) and least <= found <= MOST.get(field, 10**9):
            return found
        raise self.refusal(field, f"it takes a whole number from {least} to {MOST.get(field, 10**9):,}")

    def with_one_width(self, field: str, num_layers: int) -> Fields:
        """Return the fields with one number in place of a list with the same number for each layer."""
        found = self.value(field)
        if not isinstance(found, list):
            return self
        if len(found) != num_layers or len({*map(str, found)}) > 1:
            raise self.refusal(field, f"a list has a number for each of num_hidden_layers={num_layers}, all the same")
        other = copy(self)
        other._data = {**self._data, field: found[0]}
        return other

    def positive(self, field: str, default: Any = _MISSING) -> Any:
        """Return a finite number above 0 as a float, or the default."""
        if field.endswith("_eps"):
            self.check_not_null(field)
        found = self.value(field, default)
        return found if found is default else self.above_zero(field, found)

    def flag(self, field: str, default: bool) -> bool:
        """Return a boolean field, or the default."""
        found = self.value(field, default)
        if isinstance(found, bool):
            return found
        raise self.refusal(field, "it takes true or false")

    def head_dim(self, embed: int, heads: int, *, has_field: bool = True) -> int:
        """Return the size of a head: the field `head_dim`, or else embed / heads. Raises if that is no whole number.

        has_field: whether the family has the field.
        """
        if has_field and (found := self.whole("head_dim", None)) is not None:
            return found
        if embed % heads:
            raise MeshwrightError(
                f"the config.json of {self.name} has {heads} heads in a width of {embed}, which they do not divide;"
                f" give head_dim, or a width that is a multiple of {heads}"
            )
        return embed // heads

    def kv_heads(self, heads: int) -> int:
        """Return the number of key-value heads; as many as query heads by default."""
        found = self.whole("num_key_value_heads", None) or heads
        if heads % found:
            raise self.refusal("num_key_value_heads", f"the num_attention_heads={heads} are shared evenly among them")
        return found

    def layers(self, field: str, num_layers: int) -> list[int]:
        """Return a field that lists layer numbers, counted from 0; [] if it is absent."""
        found = self.value(field, [])
        if isinstance(found, list) and all(type(one) is int and 0 <= one < num_layers for one in found):
            return found
        raise self.refusal(
            field, f"it takes a list of layers, from 0 to {num_layers - 1} of num_hidden_layers={num_layers}"
        )

    def activation(self, field: str, default: str) -> Activation:
        """Return the activation function that a field names. Raises if it is unknown."""
        self.check_not_null(field)
        found = self.value(field, default)
        if not isinstance(found, str) or found not in ACTIVATIONS:
            raise self.refusal(field, f"the activations read are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[found]

    def check_not_null(self, field: str) -> None:
        """Raise if a field is null: transformers has a default for it, and cannot compute with null."""
        if field in self._data and self._data[field] is None:
            raise self.refusal(field, "it takes a value, or is left out for the default")

    def only(self, field: str, *allowed: Any) -> None:
        """Raise unless a field is absent, null, or one of these values."""
        found = self.value(field, None)
        if found is not None and found not in allowed:
            known = " or ".join(repr(value) for value in allowed) or "null"
            raise self.refusal(field, f"a {self.family} model is known with {known}")

    def unused_options(self, *fields: str) -> None:
        """Accept these fields of a family with any value, because they do not change the forward pass."""
        self._known.update(fields)

    def windows(
        self,
        num_layers: int,
        *,
        every: int = 0,
        full: Collection[int] = (),
        is_on: bool = True,
        kind: Literal["sliding", "chunked"] = "sliding",
    ) -> tuple[int | None, ...]:
        """Return the window of each layer in tokens, None for a layer without one, as the shortest repeating cycle.

        The field `layer_types`, if present, decides which layers have the window.

        Args:
            num_layers: the number of layers.
            every: without `layer_types`, every n-th layer has no window.
            full: without `layer_types`, the layers that have no window.
            is_on: whether any layer has a window.
            kind: whether a window slides, or is a chunk of the sequence.
        """
        if kind == "chunked":
            window = self.whole("attention_chunk_size")
        else:
            window = (self.whole("sliding_window", None, least=0) or None) if is_on else None
        types = self.value("layer_types", None)
        if types is not None and not (isinstance(types, list) and all(isinstance(own, str) for own in types)):
            raise self.refusal("layer_types", "it takes a list of names, one a layer")
        if types is None:
            layers = range(num_layers)
            return shortest_cycle(
                None if layer in full or (every and (layer + 1) % every == 0) else window for layer in layers
            )
        if len(types) != num_layers:
            raise self.refusal("layer_types", f"num_hidden_layers={num_layers} layers have one name each")
        if window is None and "sliding_attention" in types:
            raise self.refusal("layer_types", "sliding_attention has no sliding_window, or use_sliding_window is off")
        if set(types) - {"full_attention", f"{kind}_attention"}:
            raise self.refusal("layer_types", f"a layer is full_attention or {kind}_attention")
        return shortest_cycle(None if own == "full_attention" else window for own in types)

    def check_all_known(self) -> None:
        """Raise for a field that no method has read and that may have an effect (see the top of this file)."""
        unknown = [field for field in self._data if field not in self._known and self._data[field] not in (None, False)]
        if unknown:
            raise self.refusal(
                unknown[0], f"a {self.family} model is not known to have it; take it out if it changes nothing"
            )

    def refusal(self, field: str, reason: str) -> MeshwrightError:
        """Return the error for a field whose value is not supported."""
        return MeshwrightError(f"the config.json of {self.name} has {field}={self._data.get(field)!r}; {reason}")

    def mapping(self, field: str) -> dict[str, Any]:
        """Return a field that is a JSON object; {} if the field is absent or null."""
        found = self.value(field, {})
        if not isinstance(found, Mapping):
            raise self.refusal(field, "it takes an object or null")
        return dict(found)

    def above_zero(self, field: str, found: Any) -> float:
        """Return `found`, the value of a field, as a float. Raises unless it is a finite number above 0."""
        if isinstance(found, int | float) and not isinstance(found, bool) and 0 < found <= LARGEST_NUMBER:
            return float(found)
        raise MeshwrightError(f"the config.json of {self.name} has {field}={found!r}; it takes a number above 0")


def activation_name(activation: Activation | ClampedSwiglu) -> str:
    """Return the name of an activation function as config.json files have it."""
    if isinstance(activation, ClampedSwiglu):
        return "silu"
    return {"gelu_tanh": "gelu_pytorch_tanh"}.get(activation, activation)


def listed(names: Iterable[str]) -> str:
    """Return names as `a, b and c`."""
    *first, last = names or ("",)
    return f"{', '.join(first)} and {last}" if first else last
