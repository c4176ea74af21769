"""Mixtral: Mistral with a mixture of experts in every layer; each expert has the size of Mistral's MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Experts, Family, ModelConfig, rotary

MIXTRAL = Family("mixtral")


def read(fields: Fields) -> Features:
    """Read Llama's fields and the experts."""
    experts = Experts(
        count=fields.whole("num_local_experts"),
        num_active=fields.whole("num_experts_per_tok"),
        mlp=fields.whole("intermediate_size"),
    )
    return llama.read(fields) | {"experts": experts}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Mixtral."""
    assert model.experts is not None
    return llama.write_shared(model, "mixtral", "MixtralForCausalLM") | {
        "intermediate_size": model.experts.mlp,
        "num_local_experts": model.experts.count,
        "num_experts_per_tok": model.experts.num_active,
    }


_EXPERTS = "model.layers.{layer}.block_sparse_moe.experts.{expert}"

EXPERT_NAMES: Mapping[str, str] = {
    "layers.router": "model.layers.{layer}.block_sparse_moe.gate.weight",
    "layers.expert_gate": f"{_EXPERTS}.w1.weight",
    "layers.expert_up": f"{_EXPERTS}.w3.weight",
    "layers.expert_down": f"{_EXPERTS}.w2.weight",
}
"""Names of expert weights, which MiniMax-M2 shares."""

FAMILY = PublishedFamily(
    family=MIXTRAL,
    readers={"mixtral": read},
    names=names_of({**LLAMA_NAMES, **EXPERT_NAMES}),
    write=write,
    presets=(
        # 2 of 8 experts for a token; the second model also has a shared MLP for every token and a dense first layer,
        # like DeepSeek-V2.
        llama.preset("tiny-moe", llama.TINY, MIXTRAL, head_dim=16, experts=Experts(count=8, num_active=2, mlp=192)),
        llama.preset(
            "tiny-moe-shared",
            llama.TINY,
            MIXTRAL,
            head_dim=16,
            experts=Experts(count=8, num_active=2, mlp=96, shared_mlp=192, num_dense_layers=1),
        ),
        # Mixtral: arXiv:2401.04088, table 1.
        llama.preset(
            "mixtral-8x7b",
            (32, 4096, 14336, 32, 8, 32_000),
            MIXTRAL,
            positions=rotary(1_000_000.0),
            experts=Experts(count=8, num_active=2, mlp=14336),
        ),
    ),
)
