"""Gemma 4: few, wide heads in layers without a window, whose values may be their keys, and a stored factor of layers.

In the model with experts they are beside the dense MLP. In the small models, E2B and E4B, each layer has an input of
its own, and the last layers attend to keys and values of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.description.families import gemma, gemma2, llama
from meshwright.description.families.family import Features, Published, PublishedFamily, names_of
from meshwright.description.families.fields import Fields, activation_name
from meshwright.description.families.rope_fields import longest_sequence, read_rotary_by_window, rope_by_layer
from meshwright.description.step.attention import FullHeads, KeySharing
from meshwright.description.step.frequencies import Frequencies, ProportionalRopeScaling
from meshwright.description.step.layer import Routing, of_layers
from meshwright.description.step.layer_inputs import LayerInputs
from meshwright.description.step.model import (
    AttentionConfig,
    Experts,
    Family,
    ModelConfig,
    Norms,
    RotaryPositions,
    Scales,
)

GEMMA4 = Family("gemma4")

NORMS = Norms(epsilon=1e-6, place="both")

LAYER_INPUT_NAMES = names_of(
    {
        "layers.layer_gate": "model.layers.{layer}.per_layer_input_gate.weight",
        "layers.layer_output": "model.layers.{layer}.per_layer_projection.weight",
        "layers.layer_output_norm": "model.layers.{layer}.post_per_layer_input_norm.weight",
        "layer_projection": "model.per_layer_model_projection.weight",
        "layer_input_norm": "model.per_layer_projection_norm.weight",
    }
) | {"layer_embedding": Published("model.embed_tokens_per_layer.weight")}
"""The weight names of the layers' own inputs."""

UNUSED_KEYS = (r"\.self_attn\.(k_proj|v_proj|k_norm)\.weight$",)
"""Names of weights that released files have of layers that attend to keys and values of earlier ones."""

_ROUTING = Routing(has_expert_scale=True)

_LOCAL = Frequencies(theta=10_000.0)
_GLOBAL = Frequencies(theta=1_000_000.0, scaling=ProportionalRopeScaling(share=0.25))


def read(fields: Fields) -> Features:
    """Read the text model. Scores are not scaled: queries and keys have norms."""
    for field in ("rope_parameters", "per_layer_config"):
        fields.check_not_null(field)
    fields.only("rope_scaling")
    if any(isinstance(own, Mapping) and "rope_theta" not in own for own in fields.mapping("rope_parameters").values()):
        raise fields.refusal("rope_parameters", "each kind of layer has its rope_theta")
    # Images are read in both directions; texts are not.
    fields.only("use_bidirectional_attention", "vision")
    features = llama.read(fields, norms=NORMS, has_rope=False)
    layers = features["num_layers"]
    windows = fields.windows(layers, every=6, full=[layers - 1])
    if of_layers(windows, range(layers))[-1] is not None:
        raise fields.refusal("layer_types", "the last layer is full_attention")
    full = _full_heads(
        fields, features, [layer for layer in range(layers) if of_layers(windows, range(layers))[layer] is None]
    )
    sharing = _read_sharing(fields, features, windows)
    features["attention"] = AttentionConfig(
        windows=windows, qk_norm="head", has_value_norm=True, full_heads=full, sharing=sharing
    )
    inputs = _read_layer_inputs(fields, features["vocab"], has_sharing=sharing is not None)
    experts = _read_experts(fields)
    if experts and (inputs or sharing):
        more = "hidden_size_per_layer_input" if inputs else "num_kv_shared_layers"
        raise fields.refusal("enable_moe_block", f"experts are known of models with {more}=0")
    return features | {
        "activation": fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        "tied_embeddings": fields.flag("tie_word_embeddings", True),
        "positions": read_rotary_by_window(
            fields, features, theta=_GLOBAL.theta, local_theta=_LOCAL.theta, full_dim=full.head_dim
        ),
        "scales": Scales(
            embedding=features["embed"] ** 0.5,
            attention=1.0,
            has_layer=True,
            logits_softcap=fields.positive("final_logit_softcapping", None),
        ),
        "experts": experts,
        "layer_inputs": inputs,
    }


def check_sharing_layers(fields: Fields, windows: tuple[int | None, ...], layers: int, count: int) -> None:
    """Raise unless all kinds of layers are among those with keys and values, as transformers does.

    windows: the windows of layers, as a cycle. layers, count: the number of all layers, and of those without keys.
    """
    every = of_layers(windows, range(layers))
    if count >= layers or {*every} > {*every[: layers - count]}:
        raise fields.refusal(
            "num_kv_shared_layers",
            f"in layer_types the other layers of num_hidden_layers={layers} are of all kinds that the model has",
        )


def _read_sharing(fields: Fields, features: Features, windows: tuple[int | None, ...]) -> KeySharing | None:
    """Return the last layers, which have no keys and values; None if all layers have their own."""
    layers, mlp = features["num_layers"], features["mlp"]
    is_wide = fields.flag("use_double_wide_mlp", False)
    if not (count := fields.whole("num_kv_shared_layers", 0, least=0)):
        return None
    check_sharing_layers(fields, windows, layers, count)
    return KeySharing(num_layers=count, mlp=2 * mlp if is_wide else mlp)


def _read_layer_inputs(fields: Fields, vocab: int, *, has_sharing: bool) -> LayerInputs | None:
    """Return the sizes of the layers' own inputs; None if they have none."""
    if fields.family == "gemma4_unified_text":
        fields.only("hidden_size_per_layer_input", 0)
        return None
    width = fields.whole("hidden_size_per_layer_input", 0, least=0)
    rows = fields.whole("vocab_size_per_layer_input", 262_144)
    if not width and has_sharing:
        raise fields.refusal(
            "hidden_size_per_layer_input",
            "layers without keys and values (num_kv_shared_layers) have inputs of their own",
        )
    if not width:
        return None
    if rows < vocab:
        raise fields.refusal("vocab_size_per_layer_input", f"each token of vocab_size={vocab} has a row")
    return LayerInputs(vocab=rows, width=width)


def _read_experts(fields: Fields) -> Experts | None:
    """Return the experts beside the MLP of every layer; None if there are none."""
    if not fields.flag("enable_moe_block", False):
        fields.unused_options("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    if fields.whole("num_experts", None) is None:
        raise fields.refusal("enable_moe_block", "a model with experts has num_experts, and this file has none")
    return Experts(
        count=fields.whole("num_experts"),
        num_active=fields.whole("top_k_experts"),
        mlp=fields.whole("moe_intermediate_size"),
        are_beside_mlp=True,
        routing=_ROUTING,
    )


def _full_heads(fields: Fields, features: Features, full: list[int]) -> FullHeads:
    """Return the heads of the layers `full`, from the fields of released files or from those transformers writes."""
    are_keys = fields.flag("attention_k_eq_v", False)
    heads, own = features["num_kv_heads"], fields.mapping("per_layer_config")
    head_dim, kv_heads = fields.whole("global_head_dim", 512), fields.whole("num_global_key_value_heads", None)
    kv_heads = kv_heads if kv_heads and are_keys else heads
    if own:
        first = dict(own.get(str(full[0])) or {})
        if own != {str(layer): first for layer in full} or set(first) - {"head_dim", "num_key_value_heads"}:
            where = f"layer_types has full_attention in {full} of num_hidden_layers={features['num_layers']}"
            raise fields.refusal("per_layer_config", f"{where}, and these have one head_dim and num_key_value_heads")
        head_dim, kv_heads = first.get("head_dim", features["head_dim"]), first.get("num_key_value_heads", heads)
    return FullHeads(num_kv_heads=kv_heads, head_dim=head_dim, are_values_keys=are_keys)


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of the text model."""
    full = model.attention.full_heads
    assert full is not None
    others = ("attention_bias", "sliding_window", "layer_types")
    fields = llama.write_shared(model, "gemma4_text", "Gemma4ForCausalLM", *others)
    del fields["rope_theta"]
    return fields | {
        "hidden_activation": activation_name(fields.pop("hidden_act")),
        "final_logit_softcapping": model.scales.logits_softcap,
        "attention_k_eq_v": full.are_values_keys,
        "num_global_key_value_heads": full.num_kv_heads,
        "global_head_dim": full.head_dim,
        **_write_small(model),
        **_write_experts(model),
        **rope_by_layer(model),
        **longest_sequence(model),
    }


def _write_small(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of the small models."""
    inputs, sharing = model.layer_inputs, model.attention.sharing
    found: dict[str, Any] = {"hidden_size_per_layer_input": inputs.width if inputs else 0}
    if inputs:
        found["vocab_size_per_layer_input"] = inputs.vocab
    if sharing:
        found |= {"num_kv_shared_layers": sharing.num_layers, "use_double_wide_mlp": sharing.mlp > model.mlp}
    return found


def _write_experts(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of the experts."""
    if (experts := model.experts) is None:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": experts.count,
        "top_k_experts": experts.num_active,
        "moe_intermediate_size": experts.mlp,
    }


def _names() -> dict[str, Published]:
    """Return Gemma 2's weight names and those of the experts, of which a layer's share a tensor [experts, out, in]."""
    layer = "model.layers.{layer}"
    norms = {"mlp_output": "post_feedforward_layernorm_1", "experts_output": "post_feedforward_layernorm_2"}
    norms |= {"experts": "pre_feedforward_layernorm_2"}
    found = gemma2.NAMES | names_of({f"layers.{ours}_norm": f"{layer}.{name}.weight" for ours, name in norms.items()})
    for index, ours in enumerate(("gate", "up")):
        name = f"{layer}.experts.gate_up_proj"
        found[f"layers.expert_{ours}"] = Published(name, is_transposed=True, part=(index, 2))
    return found | {
        "layers.expert_down": Published(f"{layer}.experts.down_proj", is_transposed=True),
        "layers.router": Published(f"{layer}.router.proj.weight", is_transposed=True),
        "layers.router_norm": Published(f"{layer}.router.scale"),
        "layers.expert_scale": Published(f"{layer}.router.per_expert_scale"),
        "layers.layer_scale": Published(f"{layer}.layer_scalar"),
        **LAYER_INPUT_NAMES,
    }


def _preset(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    full: FullHeads,
    window: int,
    *,
    cycle: int = 6,
    sharing: KeySharing | None = None,
    **more: Any,
) -> ModelConfig:
    """Return a preset with a window in all layers but every `cycle`-th."""
    attention = AttentionConfig(
        windows=(window,) * (cycle - 1) + (None,), qk_norm="head", has_value_norm=True, full_heads=full, sharing=sharing
    )
    return gemma.preset(
        name,
        sizes,
        GEMMA4,
        norms=NORMS,
        attention=attention,
        positions=RotaryPositions(frequencies=(_LOCAL,) * (cycle - 1) + (_GLOBAL,)),
        scales=Scales(attention=1.0, has_layer=True, logits_softcap=30.0),
        **more,
    )


FAMILY = PublishedFamily(
    family=GEMMA4,
    readers={"gemma4_text": read, "gemma4_unified_text": read},
    names=_names(),
    write=write,
    buffers=UNUSED_KEYS,
    presets=(
        _preset(
            "tiny-gemma4",
            (6, 128, 384, 8, 8, 256),
            FullHeads(num_kv_heads=8, head_dim=32, are_values_keys=True),
            32,
            head_dim=16,
        ),
        _preset(
            "tiny-gemma4-moe",
            (6, 128, 192, 8, 8, 256),
            FullHeads(num_kv_heads=8, head_dim=32, are_values_keys=True),
            32,
            head_dim=16,
            experts=Experts(count=8, num_active=2, mlp=96, are_beside_mlp=True, routing=_ROUTING),
        ),
        _preset(
            "tiny-gemma4-e2b",
            (8, 128, 384, 8, 2, 256),
            FullHeads(num_kv_heads=2, head_dim=32),
            32,
            head_dim=16,
            cycle=2,
            sharing=KeySharing(num_layers=4, mlp=768),
            layer_inputs=LayerInputs(vocab=256, width=16),
        ),
        # The text parts of google/gemma-4-E2B, E4B, 26B-A4B and 31B, from their config.json.
        _preset(
            "gemma4-e2b",
            (35, 1536, 6144, 8, 1, 262_144),
            FullHeads(num_kv_heads=1, head_dim=512),
            512,
            cycle=5,
            sharing=KeySharing(num_layers=20, mlp=12_288),
            layer_inputs=LayerInputs(vocab=262_144, width=256),
        ),
        _preset(
            "gemma4-e4b",
            (42, 2560, 10_240, 8, 2, 262_144),
            FullHeads(num_kv_heads=2, head_dim=512),
            512,
            sharing=KeySharing(num_layers=18, mlp=10_240),
            layer_inputs=LayerInputs(vocab=262_144, width=256),
        ),
        _preset(
            "gemma4-26b-a4b",
            (30, 2816, 2112, 16, 8, 262_144),
            FullHeads(num_kv_heads=2, head_dim=512, are_values_keys=True),
            1024,
            experts=Experts(count=128, num_active=8, mlp=704, are_beside_mlp=True, routing=_ROUTING),
        ),
        _preset(
            "gemma4-31b",
            (60, 5376, 21504, 32, 16, 262_144),
            FullHeads(num_kv_heads=4, head_dim=512, are_values_keys=True),
            1024,
        ),
    ),
)
