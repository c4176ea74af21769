"""Mistral 4: DeepSeek's latent attention, with whole queries scaled by their position, and experts chosen by a softmax.

Its released models read images too (`mistral3`); the text model is read here.
"""

from __future__ import annotations

from typing import Any

from meshwright.description.families import deepseek, llama
from meshwright.description.families.family import Features, Published, PublishedFamily
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import check_query_scaling, read_rope
from meshwright.description.step.attention import LatentAttention
from meshwright.description.step.frequencies import YarnRopeScaling
from meshwright.description.step.layer import Routing
from meshwright.description.step.model import Experts, Family, ModelConfig, Norms, RotaryPositions

MISTRAL4 = Family("mistral4")


def read(fields: Fields) -> Features:
    """Read DeepSeek's fields; a group of experts has the sum of its two best scores, and weights are normalised."""
    routing = Routing(
        num_groups=fields.whole("n_group", 1),
        num_active_groups=fields.whole("topk_group", 1),
        group_score=2,
        is_normed=fields.flag("norm_topk_prob", True),
        scale=fields.positive("routed_scaling_factor", 1.0),
    )
    # transformers rotates a fraction of `head_dim`, which is all of a head's dims where a file has no such field.
    rotated = fields.whole("qk_rope_head_dim")
    size = fields.whole("head_dim", rotated + fields.whole("qk_nope_head_dim"))
    rope = read_rope(fields, partial=rotated / size, partial_field="partial_rotary_factor")
    if int(rope.partial * size) != rotated:
        raise fields.refusal(
            "head_dim", f"rope_parameters rotates {rope.partial:g} of it, which is to be qk_rope_head_dim={rotated}"
        )
    check_query_scaling(fields, rope.frequencies)
    return deepseek.read_latent(fields, routing, rope.frequencies)


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of the text model."""
    return deepseek.write_latent(model, "mistral4", "Mistral4ForCausalLM") | {"head_dim": model.query_key_dim}


def _names() -> dict[str, Published]:
    """Return DeepSeek's weight names, but for the experts: a layer's share a tensor [experts, out, in]."""
    experts = "model.layers.{layer}.mlp.experts"
    found = dict(deepseek.FAMILY.names)
    for index, ours in enumerate(("gate", "up")):
        found[f"layers.expert_{ours}"] = Published(f"{experts}.gate_up_proj", is_transposed=True, part=(index, 2))
    return found | {"layers.expert_down": Published(f"{experts}.down_proj", is_transposed=True)}


def _preset(
    name: str, sizes: tuple[int, int, int, int, int, int], latent: LatentAttention, experts: Experts, length: int
) -> ModelConfig:
    """Return a preset. length: the sequence length before YaRN's scaling, from which on queries are scaled."""
    scaling = YarnRopeScaling(factor=128.0, original_max_seq_len=length, mscale=1.0, mscale_all_dim=1.0, query_beta=0.1)
    positions = RotaryPositions(frequencies=llama.rotary(10_000.0, scaling).frequencies, is_interleaved=True)
    features = deepseek.attention_of(latent, positions)
    return llama.preset(name, sizes, MISTRAL4, norms=Norms(epsilon=1e-6), experts=experts, **features)


FAMILY = PublishedFamily(
    family=MISTRAL4,
    readers={"mistral4": read},
    names=_names(),
    write=write,
    presets=(
        _preset(
            "tiny-mistral4",
            (2, 128, 384, 8, 8, 256),
            LatentAttention(query_rank=48, kv_rank=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16),
            Experts(count=8, num_active=2, mlp=96, shared_mlp=96, routing=Routing(group_score=2)),
            64,
        ),
        # The text part of mistralai/Mistral-Small-4-119B-2603, whose sizes are the defaults of Mistral4Config.
        _preset(
            "mistral-small-4-119b",
            (36, 4096, 12288, 32, 32, 131_072),
            LatentAttention(query_rank=1024, kv_rank=256, nope_head_dim=64, rope_head_dim=64, value_head_dim=128),
            Experts(count=128, num_active=4, mlp=2048, shared_mlp=2048, routing=Routing(group_score=2)),
            8192,
        ),
    ),
)
