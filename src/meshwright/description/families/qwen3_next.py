"""Qwen3-Next: of every four layers, three have the gated delta rule and one has attention with a gated output.

Gated DeltaNet is arXiv:2412.06464; the model's own description is the code in transformers and qwen.ai/blog (2025).
"""

from __future__ import annotations

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
from meshwright.description.families.qwen2 import SHARED_EXPERT_NAMES, read_experts, write_experts
from meshwright.description.step.attention import LinearAttention
from meshwright.description.step.layer import of_layers, shortest_cycle
from meshwright.description.step.model import (
    AttentionConfig,
    Experts,
    Family,
    ModelConfig,
    Norms,
    RotaryPositions,
    rotary,
)

QWEN3_NEXT = Family("qwen3_next")

NORMS = Norms(epsilon=1e-6, offset=1.0)


def read(fields: Fields) -> Features:
    """Read Llama's fields, linear attention and its layers, and the experts, always with a gated shared MLP."""
    features = read_dense(fields)
    return features | {"experts": with_shared(fields, read_experts(fields, features)["experts"])}


def with_shared(fields: Fields, experts: Experts) -> Experts:
    """Return the experts with the shared MLP of the file, which has a gate."""
    return replace(experts, shared_mlp=fields.whole("shared_expert_intermediate_size"), has_shared_gate=True)


def read_dense(fields: Fields, *, mlp_field: str = "intermediate_size") -> Features:
    """Read Llama's fields, linear attention and its layers. mlp_field: as in `llama.read`."""
    partial = "partial_rotary_factor"
    features = llama.read(fields, norms=NORMS, has_windows=False, partial_field=partial, mlp_field=mlp_field)
    # The convolutions use the same activation, and are only supported with SiLU.
    fields.only("hidden_act", "silu", "swish")
    heads, value_heads = fields.whole("linear_num_key_heads"), fields.whole("linear_num_value_heads")
    if value_heads % heads:
        raise fields.refusal("linear_num_key_heads", f"linear_num_value_heads={value_heads} are shared among them")
    # `layer_types` decides, or else every `full_attention_interval`-th layer has attention instead.
    num_layers = features["num_layers"]
    types, every = fields.value("layer_types", None), fields.whole("full_attention_interval")
    if types is None:
        types = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.refusal("layer_types", f"num_hidden_layers={num_layers} layers have one name each")
    known = ("linear_attention", "full_attention")
    if {*map(str, types)} != {*known}:
        raise fields.refusal("layer_types", f"a layer is {' or '.join(known)}, and a model has both")
    linear = LinearAttention(
        num_heads=heads,
        num_value_heads=value_heads,
        key_dim=fields.whole("linear_key_head_dim"),
        value_dim=fields.whole("linear_value_head_dim"),
        taps=fields.whole("linear_conv_kernel_dim"),
        layers=shortest_cycle(kind == "linear_attention" for kind in types),
    )
    return features | {"attention": AttentionConfig(qk_norm="head", has_output_gate=True, linear=linear)}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Qwen3-Next."""
    if (experts := model.experts) is None:
        return {}
    shared = {"shared_expert_intermediate_size": experts.shared_mlp}
    return write_dense(model, "qwen3_next", "Qwen3NextForCausalLM") | shared | write_experts(model, experts)


def write_dense(model: ModelConfig, kind: str, architecture: str) -> dict[str, Any]:
    """Return the config.json fields of all but the experts. kind, architecture: as in `llama.write_shared`."""
    if (linear := model.attention.linear) is None:
        return {}
    layers = of_layers(linear.layers, range(model.num_layers))
    others = ("attention_bias", "partial_rotary_factor")
    return llama.write_shared(model, kind, architecture, *others) | {
        "layer_types": ["linear_attention" if own else "full_attention" for own in layers],
        "linear_num_key_heads": linear.num_heads,
        "linear_num_value_heads": linear.num_value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.taps,
    }


def names_with(*projections: tuple[str, tuple[str, ...]], by_head: int) -> dict[str, Published]:
    """Return the names of the weights.

    Args:
        projections: tensors of linear attention, each with the names of the projections in it.
        by_head: as in `Published`, for these tensors.
    """
    linear = "model.layers.{layer}.linear_attn"
    names = names_of({**LLAMA_NAMES, **EXPERT_NAMES, **SHARED_EXPERT_NAMES}) | {
        "layers.linear_norm": Published(f"{linear}.norm.weight"),
        "layers.linear_output": Published(f"{linear}.out_proj.weight", is_transposed=True),
        "layers.decay_log": Published(f"{linear}.A_log"),
        "layers.decay_bias": Published(f"{linear}.dt_bias"),
    }
    together = [(f"{linear}.{name}", by_head, parts) for name, parts in projections]
    together.append(("model.layers.{layer}.self_attn.q_proj", 2, ("query", "query_gate")))
    for module, heads, parts in together:
        for index, ours in enumerate(parts):
            own = Published(f"{module}.weight", is_transposed=True, part=(index, len(parts)), by_head=heads)
            names |= {f"layers.{ours}": own}
            names |= {f"layers.{ours}_bias": replace(own, name=f"{module}.bias", is_transposed=False)}
    convolved = ("conv_query", "conv_key", "conv_value")
    for index, ours in enumerate(convolved):
        part = (index, len(convolved))
        names[f"layers.{ours}"] = Published(
            f"{linear}.conv1d.weight", is_transposed=True, part=part, is_convolution=True
        )
    return names


FAMILY = PublishedFamily(
    family=QWEN3_NEXT,
    readers={"qwen3_next": read},
    names=names_with(
        ("in_proj_qkvz", ("linear_query", "linear_key", "linear_value", "linear_gate")),
        ("in_proj_ba", ("linear_rate", "linear_decay")),
        by_head=1,
    ),
    write=write,
    buffers=(r"^mtp\.",),  # The multi-token prediction module.
    presets=(
        llama.preset(
            "tiny-qwen3-next",
            (4, 128, 384, 8, 8, 256),
            QWEN3_NEXT,
            head_dim=16,
            norms=NORMS,
            attention=AttentionConfig(
                qk_norm="head",
                has_output_gate=True,
                linear=LinearAttention(num_heads=8, num_value_heads=16, key_dim=16, value_dim=16),
            ),
            positions=replace(rotary(10_000.0), dims=4),
            experts=Experts(count=8, num_active=2, mlp=96, shared_mlp=96, has_shared_gate=True),
        ),
        # The config.json of Qwen/Qwen3-Next-80B-A3B-Instruct.
        llama.preset(
            "qwen3-next-80b-a3b",
            (48, 2048, 5120, 16, 2, 151_936),
            QWEN3_NEXT,
            head_dim=256,
            norms=NORMS,
            attention=AttentionConfig(
                qk_norm="head",
                has_output_gate=True,
                linear=LinearAttention(num_heads=16, num_value_heads=32, key_dim=128, value_dim=128),
            ),
            positions=RotaryPositions(frequencies=rotary(10_000_000.0).frequencies, dims=64),
            experts=Experts(count=512, num_active=10, mlp=512, shared_mlp=512, has_shared_gate=True),
        ),
    ),
)
