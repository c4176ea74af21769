"""Llama 4's text model: a cycle of dense and MoE layers, and a cycle of layers with and without rotary embedding.

Layers with rotary embedding attend within chunks of the sequence and normalise queries and keys. Layers without it
attend to all tokens, with queries scaled by their position (https://ai.meta.com/blog/llama-4-multimodal-intelligence,
and the code in transformers). Each token has one expert; its input is multiplied by the sigmoid of its router logit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, Published, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.qwen2 import layers_with_experts
from meshwright.description.families.rope_fields import rotated_layers, rotated_where
from meshwright.description.step.frequencies import Llama3RopeScaling, QueryScaling
from meshwright.description.step.layer import Routing, of_layers
from meshwright.description.step.model import (
    AttentionConfig,
    Experts,
    Family,
    ModelConfig,
    RotaryPositions,
    rotary,
)

LLAMA4 = Family("llama4")

ROUTING = Routing(scores="sigmoid", is_normed=False, scales_input=True)


def read(fields: Fields) -> Features:
    """Read Llama's fields, experts, chunked attention, and which layers have experts, chunks and rotary embedding."""
    features = llama.read(fields, has_windows=False)
    layers = features["num_layers"]
    rotates = rotated_layers(fields, layers, is_empty_default=True)
    full = [layer for layer in range(layers) if not rotates[layer]]
    windows = fields.windows(layers, full=full, kind="chunked")
    has_norm = fields.flag("use_qk_norm", True)
    attention = AttentionConfig(
        windows=windows,
        is_chunked=any(window is not None for window in windows),
        qk_norm="rotated head, unscaled" if has_norm else None,
    )
    scaling = QueryScaling(beta=fields.positive("attn_scale", 0.1), length=fields.whole("floor_scale", 8192), offset=1)
    # Files of 2025 have the number 4 for true.
    is_scaled = fields.value("attn_temperature_tuning", True) == 4 or fields.flag("attn_temperature_tuning", True)
    positions = replace(features["positions"], is_interleaved=True)
    positions = rotated_where(positions, rotates, of_queries=scaling if is_scaled else None)
    experts = _read_experts(fields, layers)
    mlp = fields.whole("intermediate_size_mlp")
    return features | {"attention": attention, "positions": positions, "experts": experts, "mlp": mlp}


def _read_experts(fields: Fields, num_layers: int) -> Experts:
    """Read the experts and the shared MLP beside them, in the layers of `moe_layers`, or else in every n-th layer."""
    step, width = fields.whole("interleave_moe_layer_step", 1), fields.whole("intermediate_size")
    listed = fields.value("moe_layers", None) is not None
    own = fields.layers("moe_layers", num_layers) if listed else range(step - 1, num_layers, step)
    if not own:
        field = "moe_layers" if listed else "interleave_moe_layer_step"
        raise fields.refusal(field, f"it leaves none of {num_layers} layers to experts")
    return Experts(
        count=fields.whole("num_local_experts"),
        num_active=fields.whole("num_experts_per_tok"),
        mlp=width,
        shared_mlp=width,
        routing=ROUTING,
        **layers_with_experts([layer in own for layer in range(num_layers)]),
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Llama 4 text model."""
    experts, positions, layers = model.experts, model.positions, range(model.num_layers)
    if experts is None or not isinstance(positions, RotaryPositions):
        return {}
    by_layer = of_layers(positions.frequencies, layers)
    scaling = next((frequencies.of_queries for frequencies in by_layer if frequencies.of_queries), None)
    window = model.attention.window
    fields = llama.write_shared(model, "llama4_text", "Llama4ForCausalLM", "attention_bias", "pad_token_id") | {
        "intermediate_size": experts.mlp,
        "intermediate_size_mlp": model.mlp,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.num_active,
        "moe_layers": [layer for layer in layers if experts.are_in(layer)],
        "use_qk_norm": model.attention.qk_norm is not None,
        "no_rope_layers": [int(not frequencies.is_identity) for frequencies in by_layer],
        "layer_types": llama.layer_types(model, "chunked_attention"),
        "attn_temperature_tuning": scaling is not None,
    }
    fields |= {} if window is None else {"attention_chunk_size": window}
    return fields | ({} if scaling is None else {"attn_scale": scaling.beta, "floor_scale": scaling.length})


def _names() -> dict[str, Published]:
    """Return weight names. All experts of a layer are in one tensor [experts, in, out], gate before up."""
    mlp = "model.layers.{layer}.feed_forward"
    moved = {
        ours: theirs.replace("model.layers.{layer}.mlp", mlp)
        for ours, theirs in LLAMA_NAMES.items()
        if not ours.endswith(("query_norm", "key_norm"))
    }
    shared = {f"layers.shared_{kind}": f"{mlp}.shared_expert.{kind}_proj.weight" for kind in ("gate", "up", "down")}
    found = names_of({**moved, **shared, "layers.router": f"{mlp}.router.weight"})
    for index, ours in enumerate(("gate", "up")):
        found[f"layers.expert_{ours}"] = Published(f"{mlp}.experts.gate_up_proj", part=(index, 2))
    return found | {"layers.expert_down": Published(f"{mlp}.experts.down_proj")}


def _positions(scaling: Llama3RopeScaling | None) -> RotaryPositions:
    """Return the positions of the released models: every fourth layer has no rotary embedding."""
    of_queries = QueryScaling(beta=0.1, length=8192, offset=1)
    positions = replace(rotary(500_000.0, scaling), is_interleaved=True)
    return rotated_where(positions, (True, True, True, False), of_queries=of_queries)


def _attention(chunk: int, *, has_norm: bool) -> AttentionConfig:
    """Return the attention of the released models: every fourth layer attends to all tokens, the others in chunks.

    Args:
        chunk: tokens of a chunk.
        has_norm: whether queries and keys are normalised.
    """
    norm = "rotated head, unscaled" if has_norm else None
    return AttentionConfig(windows=(chunk, chunk, chunk, None), is_chunked=True, qk_norm=norm)


_SCOUT = Llama3RopeScaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_seq_len=8192)
_RELEASED = (48, 5120, 16384, 40, 8, 202_048)

FAMILY = PublishedFamily(
    family=LLAMA4,
    readers={"llama4_text": read},
    names=_names(),
    write=write,
    presets=(
        llama.preset(
            "tiny-llama4",
            (4, 128, 384, 8, 8, 256),
            LLAMA4,
            head_dim=16,
            attention=_attention(32, has_norm=True),
            positions=_positions(None),
            experts=Experts(count=8, num_active=1, mlp=96, shared_mlp=96, layers=(False, True), routing=ROUTING),
        ),
        # The text_config of the config.json of meta-llama/Llama-4-Scout-17B-16E-Instruct.
        llama.preset(
            "llama4-scout-17b-16e",
            _RELEASED,
            LLAMA4,
            attention=_attention(8192, has_norm=True),
            positions=_positions(_SCOUT),
            experts=Experts(count=16, num_active=1, mlp=8192, shared_mlp=8192, routing=ROUTING),
        ),
        # The text_config of the config.json of meta-llama/Llama-4-Maverick-17B-128E-Instruct.
        llama.preset(
            "llama4-maverick-17b-128e",
            _RELEASED,
            LLAMA4,
            attention=_attention(8192, has_norm=False),
            positions=_positions(None),
            experts=Experts(count=128, num_active=1, mlp=8192, shared_mlp=8192, layers=(False, True), routing=ROUTING),
        ),
    ),
)
