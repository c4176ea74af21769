"""DeepSeek-V2 and V3: latent attention, shared and routed experts behind a few dense layers. To be planned."""

from __future__ import annotations

from meshwright.families import llama
from meshwright.families.family import EXPERT_NAMES, LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.families.fields import Fields
from meshwright.step.model import Experts, Family, LatentAttention

DEEPSEEK = Family("deepseek")

_ROUTING = ("n_group", "topk_group", "topk_method", "scoring_func", "routed_scaling_factor", "norm_topk_prob")


def read(fields: Fields) -> Features:
    """DeepSeek. How its router scores, and its rotary scaling (yarn), change nothing that a plan counts."""
    latent = LatentAttention(
        query_rank=fields.whole("q_lora_rank", None),
        kv_rank=fields.whole("kv_lora_rank"),
        nope_head_dim=fields.whole("qk_nope_head_dim"),
        rope_head_dim=fields.whole("qk_rope_head_dim"),
        value_head_dim=fields.whole("v_head_dim"),
    )
    width = fields.whole("moe_intermediate_size")
    experts = Experts(
        count=fields.whole("n_routed_experts"),
        num_active=fields.whole("num_experts_per_tok"),
        mlp=width,
        shared_mlp=width * fields.whole("n_shared_experts", 0, least=0),
        num_dense_layers=fields.whole("first_k_dense_replace", 0, least=0),
    )
    fields.only("moe_layer_freq", 1)
    fields.unused_options(*_ROUTING, "rope_theta", "rope_scaling", "rope_parameters")
    fields.unused_options("rope_interleave", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux")
    # The module that predicts a second token is left out, as in inference.
    fields.unused_options("num_nextn_predict_layers")
    return llama.read(fields, has_rope=False) | {
        "num_kv_heads": fields.whole("num_attention_heads"),
        "head_dim": latent.value_head_dim,
        "rotary_dims": 0,
        "latent": latent,
        "experts": experts,
        "planned_only": ("its router", "its rotary scaling"),
    }


_LAYER = "model.layers.{layer}"

FAMILY = PublishedFamily(
    family=DEEPSEEK,
    readers={"deepseek_v2": read, "deepseek_v3": read},
    names=names_of(
        {
            **LLAMA_NAMES,
            **EXPERT_NAMES,
            "layers.latent": f"{_LAYER}.self_attn.kv_a_proj_with_mqa.weight",
            "layers.latent_norm": f"{_LAYER}.self_attn.kv_a_layernorm.weight",
            "layers.query_latent": f"{_LAYER}.self_attn.q_a_proj.weight",
            "layers.query_latent_norm": f"{_LAYER}.self_attn.q_a_layernorm.weight",
            "layers.shared_gate": f"{_LAYER}.mlp.shared_experts.gate_proj.weight",
            "layers.shared_up": f"{_LAYER}.mlp.shared_experts.up_proj.weight",
            "layers.shared_down": f"{_LAYER}.mlp.shared_experts.down_proj.weight",
        }
    ),
    buffers=(r"^model\.layers\.61\.",),  # The module that predicts a second token.
    presets=(
        # DeepSeek-V2: arXiv:2405.04434, section 3.1.2, and the config.json of deepseek-ai/DeepSeek-V2.
        llama.preset(
            "deepseek-v2",
            (60, 5120, 12288, 128, 128, 102_400),
            DEEPSEEK,
            experts=Experts(count=160, num_active=6, mlp=1536, shared_mlp=3072, num_dense_layers=1),
            latent=LatentAttention(
                query_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128
            ),
        ),
        # DeepSeek-V3: arXiv:2412.19437, section 4.2, without the module that predicts a second token.
        llama.preset(
            "deepseek-v3",
            (61, 7168, 18432, 128, 128, 129_280),
            DEEPSEEK,
            experts=Experts(count=256, num_active=8, mlp=2048, shared_mlp=2048, num_dense_layers=3),
            latent=LatentAttention(
                query_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128
            ),
        ),
    ),
)
