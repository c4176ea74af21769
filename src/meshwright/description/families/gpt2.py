"""GPT-2, and GPT-3 and BLOOM after it: LayerNorm, biases everywhere, an ungated GELU MLP, no rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families.family import Features, Published, PublishedFamily
from meshwright.description.families.fields import Fields
from meshwright.description.families.llama import TINY, preset
from meshwright.description.step.model import Biases, Family, LearnedPositions, ModelConfig, Norms

GPT2 = Family("gpt2")

BIASED: Features = {
    "gated": False,
    "activation": "gelu_tanh",
    "norms": Norms(kind="layer", has_bias=True),
    "biases": Biases(qkv=True, output=True, mlp=True),
}
"""Features of GPT-2 and the families like it that differ from Llama's."""

_FEATURES: dict[str, Any] = {
    **BIASED,
    "tied_embeddings": True,
    "positions": LearnedPositions(rows=1024),
    "head_dim": 64,
}


def read(fields: Fields) -> Features:
    """Read GPT-2."""
    heads, embed = fields.whole("n_head"), fields.whole("n_embd")
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    # Attention scores are always float32 here; the other fields are dropout and classification heads.
    fields.unused_options("reorder_and_upcast_attn", "resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx")
    fields.unused_options(*(f"summary_{name}" for name in ("type", "use_proj", "activation")))
    fields.unused_options("summary_proj_to_labels", "summary_first_dropout")
    return BIASED | {
        "num_layers": fields.whole("n_layer"),
        "embed": embed,
        "mlp": fields.whole("n_inner", None) or 4 * embed,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": fields.head_dim(embed, heads, has_field=False),
        "vocab": fields.whole("vocab_size"),
        "activation": fields.activation("activation_function", "gelu_new"),
        "tied_embeddings": fields.flag("tie_word_embeddings", True),
        "positions": LearnedPositions(rows=fields.whole("n_positions")),
        "norms": replace(BIASED["norms"], epsilon=fields.positive("layer_norm_epsilon", 1e-5)),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a GPT-2."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": model.num_layers,
        "n_embd": model.embed,
        "n_inner": model.mlp,
        "n_head": model.num_heads,
        "vocab_size": model.vocab,
        "activation_function": "gelu_new" if model.activation == "gelu_tanh" else model.activation,
        "tie_word_embeddings": model.tied_embeddings,
        "n_positions": model.positions.rows if isinstance(model.positions, LearnedPositions) else 0,
        "layer_norm_epsilon": model.norms.epsilon,
    }


def _names() -> dict[str, Published]:
    """Return GPT-2's weight names. Conv1D modules store [in, out]; one holds queries, then keys, then values."""
    modules = {
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        "output": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }
    names = {"embedding": "wte.weight", "positions": "wpe.weight", "final_norm": "ln_f.weight"}
    names["final_norm_bias"] = "ln_f.bias"
    for ours, theirs in modules.items():
        names[f"layers.{ours}"] = f"h.{{layer}}.{theirs}.weight"
        names[f"layers.{ours}_bias"] = f"h.{{layer}}.{theirs}.bias"
    found = {ours: Published(f"transformer.{theirs}") for ours, theirs in names.items()}
    found["unembedding"] = Published("lm_head.weight", is_transposed=True)  # In files with untied embeddings.
    for index, ours in enumerate(("query", "key", "value")):
        for suffix, kind in (("", "weight"), ("_bias", "bias")):
            path = f"transformer.h.{{layer}}.attn.c_attn.{kind}"
            found[f"layers.{ours}{suffix}"] = Published(path, part=(index, 3))
    return found


FAMILY = PublishedFamily(
    family=GPT2,
    readers={"gpt2": read},
    names=_names(),
    write=write,
    buffers=(r"\.attn\.(masked_)?bias$",),
    presets=(
        preset("tiny-gpt2", TINY, GPT2, **_FEATURES | {"head_dim": 16, "positions": LearnedPositions(rows=256)}),
        # GPT-2: the config.json of openai-community/gpt2 and gpt2-xl.
        preset("gpt2", (12, 768, 3072, 12, 12, 50_257), GPT2, **_FEATURES),
        preset("gpt2-xl", (48, 1600, 6400, 25, 25, 50_257), GPT2, **_FEATURES),
        # GPT-3: arXiv:2005.14165, table 2.1; GPT-2's vocabulary, padded so that tp can split it (arXiv:2104.04473).
        preset(
            "gpt3-175b",
            (96, 12288, 49152, 96, 96, 51_200),
            GPT2,
            **_FEATURES | {"head_dim": 128, "positions": LearnedPositions(rows=2048)},
        ),
        # BLOOM: arXiv:2211.05100, table 3, and the config.json of bigscience/bloom.
        preset(
            "bloom-176b",
            (70, 14336, 57344, 112, 112, 250_880),
            Family("bloom"),
            **_FEATURES
            | {"head_dim": 128, "positions": "alibi", "norms": replace(BIASED["norms"], after_embedding=True)},
        ),
    ),
)
