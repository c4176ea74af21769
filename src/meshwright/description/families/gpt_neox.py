"""GPT-NeoX and Pythia: rotary positions of a part of each head, LayerNorm, attention and MLP in parallel, untied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families.family import Features, Published, PublishedFamily
from meshwright.description.families.fields import Fields, activation_name
from meshwright.description.families.gpt2 import BIASED
from meshwright.description.families.llama import preset
from meshwright.description.families.rope_fields import (
    frequencies_of,
    longest_sequence,
    read_rope,
    read_rotary_dims,
    rope_parameters,
    rotary_share,
)
from meshwright.description.step.model import Biases, Family, ModelConfig, Norms, RotaryPositions

GPT_NEOX = Family("gpt_neox")


def read(fields: Fields) -> Features:
    """Read GPT-NeoX. Before transformers 5 the rotated part of a head is `rotary_pct`, and theta `rotary_emb_base`."""
    heads, embed = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    bias = fields.flag("attention_bias", True)
    rope = read_rope(fields, theta_field="rotary_emb_base", partial=0.25, partial_field="rotary_pct")
    # transformers does not read other families' names of these fields in a GPT-NeoX: refuse another value.
    fields.only("rope_theta", rope.frequencies.theta)
    fields.only("partial_rotary_factor", rope.partial)
    fields.only("is_decoder", False, True)
    head_dim = fields.head_dim(embed, heads, has_field=False)
    return BIASED | {
        "num_layers": fields.whole("num_hidden_layers"),
        "embed": embed,
        "mlp": fields.whole("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "vocab": fields.whole("vocab_size"),
        "activation": fields.activation("hidden_act", "gelu"),
        "tied_embeddings": fields.flag("tie_word_embeddings", False),
        "biases": Biases(qkv=bias, output=bias, mlp=True),
        "parallel_blocks": "own norms" if fields.flag("use_parallel_residual", True) else None,
        "positions": RotaryPositions(frequencies=(rope.frequencies,), dims=read_rotary_dims(fields, rope, head_dim)),
        "norms": replace(BIASED["norms"], epsilon=fields.positive("layer_norm_eps", 1e-5)),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a GPT-NeoX."""
    share = rotary_share(model)
    rope = rope_parameters(frequencies_of(model)) | share
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.embed,
        "intermediate_size": model.mlp,
        "num_attention_heads": model.num_heads,
        "vocab_size": model.vocab,
        "hidden_act": activation_name(model.activation),
        "tie_word_embeddings": model.tied_embeddings,
        "attention_bias": model.biases.qkv,
        "use_parallel_residual": model.parallel_blocks is not None,
        "rotary_pct": share["partial_rotary_factor"],
        "rope_parameters": rope,
        **longest_sequence(model),
        "layer_norm_eps": model.norms.epsilon,
    }


def _names() -> dict[str, Published]:
    """Return GPT-NeoX's weight names. One Linear holds queries, keys and values, which alternate head by head."""
    modules = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "output": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }
    found = {
        "embedding": Published("gpt_neox.embed_in.weight"),
        "final_norm": Published("gpt_neox.final_layer_norm.weight"),
        "final_norm_bias": Published("gpt_neox.final_layer_norm.bias"),
        "unembedding": Published("embed_out.weight", is_transposed=True),
    }
    for ours, theirs in modules.items():
        path = f"gpt_neox.layers.{{layer}}.{theirs}"
        found[f"layers.{ours}"] = Published(f"{path}.weight", is_transposed="norm" not in ours)
        found[f"layers.{ours}_bias"] = Published(f"{path}.bias")
    for index, ours in enumerate(("query", "key", "value")):
        path = "gpt_neox.layers.{layer}.attention.query_key_value"
        part = (index, 3)
        found[f"layers.{ours}"] = Published(f"{path}.weight", is_transposed=True, part=part, by_head=1)
        found[f"layers.{ours}_bias"] = Published(f"{path}.bias", part=part, by_head=1)
    return found


FAMILY = PublishedFamily(
    family=GPT_NEOX,
    readers={"gpt_neox": read},
    names=_names(),
    write=write,
    buffers=(r"\.attention\.(masked_)?bias$",),
    presets=(
        # GPT-NeoX-20B: arXiv:2204.06745, section 3, and the config.json of EleutherAI/gpt-neox-20b.
        preset(
            "gpt-neox-20b",
            (44, 6144, 24576, 64, 64, 50_432),
            GPT_NEOX,
            **BIASED | {"activation": "gelu"},
            head_dim=96,
            parallel_blocks="own norms",
            positions=RotaryPositions(dims=24),
        ),
        # PaLM: arXiv:2204.02311, table 1 and section 2: multi-query, SwiGLU, parallel blocks, tied, no biases.
        preset(
            "palm-540b",
            (118, 18432, 73728, 48, 1, 256_000),
            Family("palm"),
            head_dim=256,
            tied_embeddings=True,
            norms=Norms(kind="layer"),
            parallel_blocks="own norms",
        ),
    ),
)
