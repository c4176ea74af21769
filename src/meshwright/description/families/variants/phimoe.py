"""Phi-3.5-MoE: Mixtral with LayerNorms and biases, whose two experts are weighted one after the other."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.mixtral import EXPERT_NAMES
from meshwright.description.families.rope_fields import MSCALES, check_longrope, frequencies_of
from meshwright.description.step.frequencies import LongRopeScaling
from meshwright.description.step.layer import Routing
from meshwright.description.step.model import Biases, Experts, Family, ModelConfig, Norms

PHIMOE = Family("phimoe")

NUM_ACTIVE = 2
"""Experts of a token in transformers, whatever `num_experts_per_tok` says."""


def read(fields: Fields) -> Features:
    """Read Llama's fields, biases and the experts. Noise of training is ignored."""
    features = llama.read(fields, norms=Norms(kind="layer", has_bias=True))
    fields.only("tie_word_embeddings", False)
    fields.only("num_experts_per_tok", NUM_ACTIVE)
    fields.unused_options("input_jitter_noise", "original_max_position_embeddings")
    noise, bias = fields.positive("router_jitter_noise", 0.01), features["biases"].qkv
    (frequencies,) = features["positions"].frequencies
    check_longrope(fields, frequencies)
    experts = Experts(
        count=fields.whole("num_local_experts"),
        num_active=NUM_ACTIVE,
        mlp=features["mlp"],
        routing=Routing(scores="sparsemixer", is_normed=False, tolerance=2 * noise),
    )
    return features | {
        "biases": Biases(qkv=bias, output=bias, unembedding=fields.flag("lm_head_bias", False)),
        "experts": experts,
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Phi-3.5-MoE."""
    assert model.experts is not None
    fields = llama.write_shared(model, "phimoe", "PhimoeForCausalLM", "attention_bias", "sliding_window")
    frequencies = frequencies_of(model)
    if isinstance(frequencies.scaling, LongRopeScaling):
        rope = {key: value for key, value in fields["rope_parameters"].items() if key != "attention_factor"}
        fields["rope_parameters"] = rope | dict.fromkeys(MSCALES, frequencies.magnitude)
    return fields | {
        "intermediate_size": model.experts.mlp,
        "num_local_experts": model.experts.count,
        "num_experts_per_tok": model.experts.num_active,
        "router_jitter_noise": model.experts.routing.tolerance / 2,
        "lm_head_bias": model.biases.unembedding,
    }


FAMILY = PublishedFamily(
    family=PHIMOE,
    readers={"phimoe": read},
    names=names_of({**LLAMA_NAMES, **EXPERT_NAMES, "unembedding_bias": "lm_head.bias"}),
    write=write,
)
