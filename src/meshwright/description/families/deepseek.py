"""DeepSeek-V2 and V3: latent attention, shared and routed experts after a few dense layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    Features,
    Published,
    PublishedFamily,
    names_of,
)
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import read_rope
from meshwright.description.step.attention import LatentAttention
from meshwright.description.step.frequencies import Frequencies, YarnRopeScaling
from meshwright.description.step.layer import Routing
from meshwright.description.step.model import (
    AttentionConfig,
    Experts,
    Family,
    ModelConfig,
    Norms,
    RotaryPositions,
    Scales,
    rotary,
)
from meshwright.errors import MeshwrightError

DEEPSEEK = Family("deepseek")


def read_v2(fields: Fields) -> Features:
    """Read DeepSeek-V2: a softmax over all experts, with or without groups; routing weights are not normalised."""
    fields.only("scoring_func", "softmax")
    fields.only("topk_method", "greedy", "group_limited_greedy")
    # transformers never normalises this family's routing weights, whatever the field's value.
    fields.only("norm_topk_prob", False)
    fields.only("rope_interleave", True)
    has_groups = fields.value("topk_method", "greedy") == "group_limited_greedy"
    num_groups, num_active = fields.whole("n_group", 1), fields.whole("topk_group", 1)
    routing = Routing(
        is_normed=False,
        num_groups=num_groups if has_groups else 1,
        num_active_groups=num_active if has_groups else 1,
        scale=fields.positive("routed_scaling_factor", 1.0),
    )
    return read_latent(fields, routing)


def read_v3(fields: Fields) -> Features:
    """Read DeepSeek-V3: sigmoid routing within the best groups of experts.

    A bias is added to the scores that choose experts, but not to the routing weights.
    """
    fields.only("mlp_bias", False)
    # If a file has `head_dim`, transformers rotates that many dims of a head.
    if fields.whole("head_dim", rotated := fields.whole("qk_rope_head_dim")) != rotated:
        raise fields.refusal("head_dim", f"it takes qk_rope_head_dim={rotated}")
    return read_latent(fields, sigmoid_routing(fields))


def sigmoid_routing(fields: Fields) -> Routing:
    """Read the routing of DeepSeek-V3, which other families share."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    return Routing(
        scores="sigmoid",
        has_choice_bias=True,
        num_groups=fields.whole("n_group"),
        num_active_groups=fields.whole("topk_group"),
        group_score=2,
        is_normed=fields.flag("norm_topk_prob", True),
        scale=fields.positive("routed_scaling_factor"),
    )


def read_experts(fields: Fields, routing: Routing) -> Experts:
    """Read the experts of all layers after the first, dense ones, and the shared MLP beside them."""
    width = fields.whole("moe_intermediate_size")
    layers, num_dense = fields.whole("num_hidden_layers"), fields.whole("first_k_dense_replace", 0, least=0)
    if num_dense >= layers:
        raise fields.refusal("first_k_dense_replace", f"it leaves none of num_hidden_layers={layers} to experts")
    count, num_chosen = fields.whole("n_routed_experts"), fields.whole("num_experts_per_tok")
    try:
        return Experts(
            count=count,
            num_active=num_chosen,
            mlp=width,
            shared_mlp=width * fields.whole("n_shared_experts"),
            num_dense_layers=num_dense,
            routing=routing,
        )
    except MeshwrightError as error:
        raise MeshwrightError(
            f"the config.json of {fields.name} has n_routed_experts={count}, num_experts_per_tok={num_chosen},"
            f" n_group={routing.num_groups} and topk_group={routing.num_active_groups}: {error}"
        ) from None


def read_latent(fields: Fields, routing: Routing, frequencies: Frequencies | None = None) -> Features:
    """Read the fields that V2, V3 and Mistral 4 share. frequencies: those of the rotary embedding, if already read."""
    heads = fields.whole("num_attention_heads")
    latent = LatentAttention(
        query_rank=fields.whole("q_lora_rank", None),
        kv_rank=fields.whole("kv_lora_rank"),
        nope_head_dim=fields.whole("qk_nope_head_dim"),
        rope_head_dim=fields.whole("qk_rope_head_dim"),
        value_head_dim=fields.whole("v_head_dim"),
    )
    experts = read_experts(fields, routing)
    if fields.whole("num_key_value_heads", heads) != heads:
        raise fields.refusal("num_key_value_heads", f"latent attention has as many as num_attention_heads={heads}")
    fields.only("moe_layer_freq", 1)
    fields.only("sliding_window")
    fields.only("layer_types")
    # transformers derives the first two from other fields. The rest affect training only. Multi-token prediction is
    # left out, as in inference.
    fields.unused_options("head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux")
    fields.unused_options("num_nextn_predict_layers", "num_mtp_layers")
    frequencies = frequencies or read_rope(fields).frequencies
    is_interleaved = fields.flag("rope_interleave", True)
    return llama.read(fields, has_rope=False) | {
        "num_kv_heads": heads,
        "experts": experts,
        **attention_of(latent, RotaryPositions(frequencies=(frequencies,), is_interleaved=is_interleaved)),
    }


def attention_of(latent: LatentAttention, positions: RotaryPositions) -> Features:
    """Return the features of latent attention. YaRN's `mscale_all_dim` becomes a factor of the scores."""
    scale, scaling = None, positions.frequencies[0].scaling
    if isinstance(scaling, YarnRopeScaling) and scaling.mscale_all_dim is not None:
        dims = latent.nope_head_dim + latent.rope_head_dim
        scale = scaling.magnitude(scaling.mscale_all_dim) ** 2 / math.sqrt(dims)
    return {
        "head_dim": latent.value_head_dim,
        "attention": AttentionConfig(latent=latent),
        "positions": positions,
        "scales": Scales(attention=scale),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a DeepSeek-V3, or of a V2 if router scores are a softmax."""
    assert model.experts is not None
    routing = model.experts.routing
    if routing.scores == "sigmoid":
        return write_latent(model, "deepseek_v3", "DeepseekV3ForCausalLM") | {"num_nextn_predict_layers": 0}
    method = "group_limited_greedy" if routing.num_groups > 1 else "greedy"
    fields = write_latent(model, "deepseek_v2", "DeepseekV2ForCausalLM")
    return fields | {"topk_method": method, "mlp_bias": model.biases.mlp}


def write_latent(model: ModelConfig, kind: str, architecture: str) -> dict[str, Any]:
    """Return the fields that `read_latent` reads. kind, architecture: as in `llama.write_shared`."""
    experts, latent = model.experts, model.attention.latent
    assert experts is not None
    assert latent is not None
    assert isinstance(model.positions, RotaryPositions)
    return llama.write_shared(model, kind, architecture, "attention_bias") | {
        "head_dim": latent.rope_head_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_head_dim,
        "qk_rope_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "rope_interleave": model.positions.is_interleaved,
        **write_experts(experts),
    }


def write_experts(experts: Experts) -> dict[str, Any]:
    """Return the config.json fields of experts and their routing."""
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.num_active,
        "moe_intermediate_size": experts.mlp,
        "n_shared_experts": experts.shared_mlp // experts.mlp,
        "first_k_dense_replace": experts.num_dense_layers,
        "n_group": experts.routing.num_groups,
        "topk_group": experts.routing.num_active_groups,
        "routed_scaling_factor": experts.routing.scale,
        "norm_topk_prob": experts.routing.is_normed,
    }


_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_LAYER}.self_attn"
_SHARED = f"{_LAYER}.mlp.shared_experts"

SHARED_EXPERT_NAMES = {
    **EXPERT_NAMES,
    "layers.choice_bias": f"{_LAYER}.mlp.gate.e_score_correction_bias",
    "layers.shared_gate": f"{_SHARED}.gate_proj.weight",
    "layers.shared_up": f"{_SHARED}.up_proj.weight",
    "layers.shared_down": f"{_SHARED}.down_proj.weight",
}
"""Weight names of DeepSeek-V3's experts, their router and the shared MLP."""


def _yarn(mscale: float) -> YarnRopeScaling:
    """Return YaRN as in the models on Hugging Face, for 40 times 4,096 tokens. mscale: for both fields of that name."""
    return YarnRopeScaling(factor=40.0, original_max_seq_len=4096, mscale=mscale, mscale_all_dim=mscale)


def _preset(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    experts: Experts,
    scaling: YarnRopeScaling,
    latent: LatentAttention,
) -> ModelConfig:
    return llama.preset(
        name,
        sizes,
        DEEPSEEK,
        norms=Norms(epsilon=1e-6),
        experts=experts,
        **attention_of(latent, replace(rotary(10_000.0, scaling), is_interleaved=True)),
    )


_LATENT = LatentAttention(query_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128)
_V2 = Routing(num_groups=8, num_active_groups=3, is_normed=False, scale=16.0)
_V3 = Routing(scores="sigmoid", has_choice_bias=True, num_groups=8, num_active_groups=4, group_score=2, scale=2.5)

FAMILY = PublishedFamily(
    family=DEEPSEEK,
    readers={"deepseek_v2": read_v2, "deepseek_v3": read_v3},
    names=names_of(
        {
            **LLAMA_NAMES,
            **SHARED_EXPERT_NAMES,
            "layers.latent": f"{_ATTENTION}.kv_a_proj_with_mqa.weight",
            "layers.latent_bias": f"{_ATTENTION}.kv_a_proj_with_mqa.bias",
            "layers.latent_norm": f"{_ATTENTION}.kv_a_layernorm.weight",
            "layers.query_latent": f"{_ATTENTION}.q_a_proj.weight",
            "layers.query_latent_bias": f"{_ATTENTION}.q_a_proj.bias",
            "layers.query_latent_norm": f"{_ATTENTION}.q_a_layernorm.weight",
            "layers.latent_query": f"{_ATTENTION}.q_b_proj.weight",
            "layers.shared_gate_bias": f"{_SHARED}.gate_proj.bias",
            "layers.shared_up_bias": f"{_SHARED}.up_proj.bias",
            "layers.shared_down_bias": f"{_SHARED}.down_proj.bias",
        }
    )
    | {
        "layers.key": Published(f"{_ATTENTION}.kv_b_proj.weight", is_transposed=True, part=(0, 2), by_head=1),
        "layers.value": Published(f"{_ATTENTION}.kv_b_proj.weight", is_transposed=True, part=(1, 2), by_head=1),
    },
    write=write,
    buffers=(r"^model\.layers\.61\.",),  # The multi-token prediction module.
    presets=(
        _preset(
            "tiny-deepseek",
            (3, 128, 384, 8, 8, 256),
            Experts(
                count=8,
                num_active=2,
                mlp=96,
                shared_mlp=96,
                num_dense_layers=1,
                routing=Routing(
                    scores="sigmoid",
                    has_choice_bias=True,
                    num_groups=4,
                    num_active_groups=2,
                    group_score=2,
                    scale=2.5,
                ),
            ),
            YarnRopeScaling(factor=4.0, original_max_seq_len=64, mscale=1.0, mscale_all_dim=1.0),
            LatentAttention(query_rank=48, kv_rank=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16),
        ),
        # DeepSeek-V2: arXiv:2405.04434, section 3.1.2, and the config.json of deepseek-ai/DeepSeek-V2.
        _preset(
            "deepseek-v2",
            (60, 5120, 12288, 128, 128, 102_400),
            Experts(count=160, num_active=6, mlp=1536, shared_mlp=3072, num_dense_layers=1, routing=_V2),
            _yarn(0.707),
            _LATENT,
        ),
        # DeepSeek-V3: arXiv:2412.19437, section 4.2, and the config.json of deepseek-ai/DeepSeek-V3, without the
        # multi-token prediction module.
        _preset(
            "deepseek-v3",
            (61, 7168, 18432, 128, 128, 129_280),
            Experts(count=256, num_active=8, mlp=2048, shared_mlp=2048, num_dense_layers=3, routing=_V3),
            _yarn(1.0),
            _LATENT,
        ),
    ),
)
