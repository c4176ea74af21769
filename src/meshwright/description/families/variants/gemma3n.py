"""Gemma 3n: several residual streams (AltUp), a low-rank branch beside attention, and first layers with sparse MLPs.

Each layer has an input of its own, and the last layers attend to keys and values of earlier ones, as in Gemma 4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import gemma, gemma2, llama
from meshwright.description.families.family import Features, Published, PublishedFamily, names_of
from meshwright.description.families.fields import Fields, activation_name
from meshwright.description.families.rope_fields import longest_sequence, read_rotary_by_window, rope_by_layer
from meshwright.description.families.variants.gemma4 import LAYER_INPUT_NAMES, NORMS, UNUSED_KEYS, check_sharing_layers
from meshwright.description.step.attention import KeySharing
from meshwright.description.step.frequencies import Frequencies
from meshwright.description.step.layer_inputs import AltUp, LayerInputs
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig, RotaryPositions, Scales

GEMMA3N = Family("gemma3n")

MOST_STREAMS = 16
"""The most streams whose weights have names here."""

_LOCAL = Frequencies(theta=10_000.0)
_GLOBAL = Frequencies(theta=1_000_000.0)


def read(fields: Fields) -> Features:
    """Read the text model. Scores are not scaled: queries and keys have norms."""
    for field in ("rope_parameters", "altup_coef_clip", "activation_sparsity_pattern"):
        fields.check_not_null(field)
    fields.only("rope_scaling")
    # The first stream is the one that layers compute.
    fields.only("altup_active_idx", 0)
    fields.only("altup_correct_scale", True)
    # The clip keeps weights of AltUp from growing while transformers trains; here, they are not clipped.
    fields.positive("altup_coef_clip", 120.0)
    layers = fields.whole("num_hidden_layers")
    features = llama.read(fields.with_one_width("intermediate_size", layers), norms=NORMS, has_rope=False)
    windows = fields.windows(layers, every=5)
    count = fields.whole("num_kv_shared_layers", 15)
    check_sharing_layers(fields, windows, layers, count)
    features["attention"] = AttentionConfig(
        windows=windows,
        qk_norm="head",
        has_value_norm=True,
        sharing=KeySharing(num_layers=count, mlp=features["mlp"]),
    )
    return features | {
        "activation": fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        "tied_embeddings": fields.flag("tie_word_embeddings", True),
        "positions": read_rotary_by_window(fields, features, theta=_GLOBAL.theta, local_theta=_LOCAL.theta),
        "scales": Scales(
            embedding=features["embed"] ** 0.5,
            attention=1.0,
            logits_softcap=fields.positive("final_logit_softcapping", 30.0),
        ),
        "layer_inputs": LayerInputs(
            vocab=fields.whole("vocab_size_per_layer_input", 262_144),
            width=fields.whole("hidden_size_per_layer_input", 256),
        ),
        "altup": _read_altup(fields, layers, layers - count),
    }


def _read_altup(fields: Fields, layers: int, with_keys: int) -> AltUp:
    """Return the streams, and the first layers whose MLPs are sparse. with_keys: the layers with keys of their own."""
    sparse = min(10, layers) if layers > 10 else 0
    pattern = fields.value("activation_sparsity_pattern", [0.95] * sparse + [0.0] * (layers - sparse))
    is_list = isinstance(pattern, list) and all(isinstance(own, int | float) for own in pattern)
    count = sum(map(bool, pattern)) if is_list else 0
    if not is_list or pattern != [pattern[0]] * count + [0] * (layers - count) or not all(0 <= s < 1 for s in pattern):
        raise fields.refusal(
            "activation_sparsity_pattern",
            f"it is a list with a number of each of num_hidden_layers={layers}: first one below 1, then 0",
        )
    if count > with_keys:
        raise fields.refusal(
            "activation_sparsity_pattern", f"it is 0 of the last num_kv_shared_layers={layers - with_keys}"
        )
    return AltUp(
        num_streams=fields.whole("altup_num_inputs", 4, least=2),
        laurel_rank=fields.whole("laurel_rank", 64),
        num_sparse_layers=count,
        sparsity=float(pattern[0]) if count else 0.0,
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of the text model."""
    inputs, sharing, altup = model.layer_inputs, model.attention.sharing, model.altup
    assert inputs is not None
    assert sharing is not None
    assert altup is not None
    others = ("attention_bias", "sliding_window", "layer_types", "pad_token_id")
    fields = llama.write_shared(model, "gemma3n_text", "Gemma3nForCausalLM", *others)
    del fields["rope_theta"]
    sparse = altup.num_sparse_layers
    return fields | {
        "intermediate_size": [model.mlp] * model.num_layers,
        "hidden_activation": activation_name(fields.pop("hidden_act")),
        "final_logit_softcapping": model.scales.logits_softcap,
        "hidden_size_per_layer_input": inputs.width,
        "vocab_size_per_layer_input": inputs.vocab,
        "num_kv_shared_layers": sharing.num_layers,
        "altup_num_inputs": altup.num_streams,
        "laurel_rank": altup.laurel_rank,
        "activation_sparsity_pattern": [altup.sparsity] * sparse + [0.0] * (model.num_layers - sparse),
        **rope_by_layer(model),
        **longest_sequence(model),
    }


def _names() -> dict[str, Published]:
    """Return Gemma 2's weight names, those of the layers' own inputs, and those of the streams."""
    layer = "model.layers.{layer}"
    names = {
        "layers.altup_norm": f"{layer}.altup.router_norm.weight",
        "layers.altup_router": f"{layer}.altup.modality_router.weight",
        "layers.laurel_left": f"{layer}.laurel.linear_left.weight",
        "layers.laurel_right": f"{layer}.laurel.linear_right.weight",
        "layers.laurel_norm": f"{layer}.laurel.post_laurel_norm.weight",
    }
    found = gemma2.NAMES | LAYER_INPUT_NAMES | names_of(names)
    found["layers.altup_predict"] = Published(f"{layer}.altup.prediction_coefs.weight")
    found["layers.altup_correct"] = Published(f"{layer}.altup.correction_coefs.weight")
    found["layers.altup_scale"] = Published(f"{layer}.altup.correct_output_scale")
    for number in range(1, MOST_STREAMS):
        for ours, theirs in (("projection", "projections"), ("unembedding", "unembed_projections")):
            name = f"model.altup_{theirs}.{number - 1}.weight"
            found[f"altup_{ours}_{number}"] = Published(name, is_transposed=True)
    return found


def _preset(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    shared: int,
    *,
    window: int = 512,
    cycle: int = 5,
    **more: Any,
) -> ModelConfig:
    """Return a preset with a window in all layers but every `cycle`-th. shared: layers without keys and values."""
    return gemma.preset(
        name,
        sizes,
        GEMMA3N,
        norms=NORMS,
        attention=AttentionConfig(
            windows=(window,) * (cycle - 1) + (None,),
            qk_norm="head",
            has_value_norm=True,
            sharing=KeySharing(num_layers=shared, mlp=sizes[2]),
        ),
        positions=RotaryPositions(frequencies=(_LOCAL,) * (cycle - 1) + (_GLOBAL,)),
        scales=Scales(attention=1.0, logits_softcap=30.0),
        **more,
    )


_ALTUP = AltUp(num_streams=4, laurel_rank=64, num_sparse_layers=10, sparsity=0.95)
_INPUTS = LayerInputs(vocab=262_144, width=256)

FAMILY = PublishedFamily(
    family=GEMMA3N,
    readers={"gemma3n_text": read},
    names=_names(),
    write=write,
    buffers=UNUSED_KEYS,
    presets=(
        _preset(
            "tiny-gemma3n",
            (8, 128, 384, 8, 2, 256),
            4,
            window=32,
            cycle=2,
            head_dim=16,
            layer_inputs=LayerInputs(vocab=256, width=16),
            altup=replace(_ALTUP, laurel_rank=16, num_sparse_layers=2),
        ),
        # The text parts of google/gemma-3n-E2B and E4B, from their config.json.
        _preset("gemma3n-e2b", (30, 2048, 8192, 8, 2, 262_400), 10, layer_inputs=_INPUTS, altup=_ALTUP),
        _preset("gemma3n-e4b", (35, 2048, 16_384, 8, 2, 262_400), 15, layer_inputs=_INPUTS, altup=_ALTUP),
    ),
)
