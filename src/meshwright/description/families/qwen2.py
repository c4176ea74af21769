"""Qwen2 and Qwen2-MoE: Llama with biases of queries, keys and values, and an optional window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import EXPERT_NAMES, LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.layer import Routing, shortest_cycle
from meshwright.description.step.model import AttentionConfig, Biases, Experts, Family, ModelConfig, Norms, rotary

QWEN2 = Family("qwen2")


def read(fields: Fields) -> Features:
    """Read Llama's fields, the window if enabled, and biases of queries, keys and values only."""
    features = llama.read(fields)
    attention = AttentionConfig(windows=windows_of(fields, features["num_layers"]))
    fields.only("qkv_bias", True)
    return features | {"attention": attention, "biases": Biases(qkv=True)}


def windows_of(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window, as `Fields.windows` does: if enabled, layers from `max_window_layers` on have it."""
    is_on = fields.flag("use_sliding_window", False)
    first = fields.whole("max_window_layers", 0, least=0)
    # If a file names the kind of each layer, transformers ignores max_window_layers.
    if fields.value("layer_types", None) is not None:
        return fields.windows(num_layers, is_on=is_on)
    return fields.windows(num_layers, full=range(first), is_on=is_on)


def read_experts(fields: Fields, features: Features) -> Features:
    """Read experts in every `decoder_sparse_step`-th layer except `mlp_only_layers`."""
    layers = features["num_layers"]
    step, dense = fields.whole("decoder_sparse_step", 1), fields.layers("mlp_only_layers", layers)
    sparse = [(layer + 1) % step == 0 and layer not in dense for layer in range(layers)]
    if not any(sparse):
        raise fields.refusal(
            "decoder_sparse_step", f"with mlp_only_layers it leaves none of {layers} layers to experts"
        )
    # transformers reads the two names as one field.
    count = fields.whole("num_local_experts", None) or fields.whole("num_experts")
    fields.only("num_experts", count)
    experts = Experts(
        count=count,
        num_active=fields.whole("num_experts_per_tok"),
        mlp=fields.whole("moe_intermediate_size"),
        **layers_with_experts(sparse),
        routing=Routing(is_normed=fields.flag("norm_topk_prob", False)),
    )
    return {"experts": experts}


def layers_with_experts(sparse: Sequence[bool]) -> Features:
    """Return the fields `num_dense_layers` and `layers` (a repeating cycle) of `Experts`.

    `num_dense_layers` is chosen so that the cycle is shortest. A cycle that the last layer cuts short counts as long as
    all layers after the dense ones.

    sparse: whether each layer has experts.
    """

    def cycle(num_dense: int) -> tuple[bool, ...]:
        return shortest_cycle(sparse[num_dense:])

    def num_kinds(num_dense: int) -> int:
        after, size = len(sparse) - num_dense, len(cycle(num_dense))
        return after if after % size else size

    num_dense = min(range(sparse.index(True) + 1), key=num_kinds)
    return {"num_dense_layers": num_dense, "layers": cycle(num_dense)}


def read_moe(fields: Fields) -> Features:
    """Read Qwen2-MoE. If windows are enabled, layers 0, 2, 4 … below `max_window_layers` have one."""
    features = llama.read(fields)
    layers, is_on = features["num_layers"], fields.flag("use_sliding_window", False)
    last = fields.whole("max_window_layers", 28, least=0)
    if fields.value("layer_types", None) is not None:
        last = layers
    found = read_experts(fields, features)
    shared = fields.whole("shared_expert_intermediate_size", 5632)
    experts = replace(found["experts"], shared_mlp=shared, has_shared_gate=True)
    full = [layer for layer in range(layers) if layer % 2 or layer >= last]
    attention = AttentionConfig(windows=fields.windows(layers, full=full, is_on=is_on))
    biases = Biases(qkv=fields.flag("qkv_bias", True))
    return features | found | {"attention": attention, "biases": biases, "experts": experts}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Qwen2, with experts or without."""
    if (experts := model.experts) is None:
        return llama.write_shared(model, "qwen2", "Qwen2ForCausalLM") | write_windows(model)
    has_window = model.attention.window is not None
    others = ("sliding_window", "layer_types") if has_window else ()
    return llama.write_shared(model, "qwen2_moe", "Qwen2MoeForCausalLM", *others) | {
        "qkv_bias": model.biases.qkv,
        "shared_expert_intermediate_size": experts.shared_mlp,
        "use_sliding_window": has_window,
        "max_window_layers": model.num_layers,
        **write_experts(model, experts),
    }


def write_experts(model: ModelConfig, experts: Experts) -> dict[str, Any]:
    """Return the config.json fields of a model's experts."""
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.num_active,
        "moe_intermediate_size": experts.mlp,
        "norm_topk_prob": experts.routing.is_normed,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.num_layers) if not experts.are_in(layer)],
    }


def write_windows(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of the window; it is disabled if the model has none."""
    if (window := model.attention.window) is None:
        return {"use_sliding_window": False}
    windows = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return windows | ({"layer_types": llama.layer_types(model)} if None in model.attention.windows else {})


_SHARED = "model.layers.{layer}.mlp.shared_expert"

SHARED_EXPERT_NAMES = {
    "layers.shared_expert_gate": f"{_SHARED}_gate.weight",
    "layers.shared_gate": f"{_SHARED}.gate_proj.weight",
    "layers.shared_up": f"{_SHARED}.up_proj.weight",
    "layers.shared_down": f"{_SHARED}.down_proj.weight",
}

FAMILY = PublishedFamily(
    family=QWEN2,
    readers={"qwen2": read, "qwen2_moe": read_moe},
    names=names_of({**LLAMA_NAMES, **EXPERT_NAMES, **SHARED_EXPERT_NAMES}),
    write=write,
    presets=(
        llama.preset(
            "tiny-qwen2-moe",
            llama.TINY,
            QWEN2,
            head_dim=16,
            biases=Biases(qkv=True),
            norms=Norms(epsilon=1e-6),
            experts=Experts(
                count=8,
                num_active=4,
                mlp=96,
                shared_mlp=384,
                has_shared_gate=True,
                routing=Routing(is_normed=False),
            ),
        ),
        # Qwen2: arXiv:2407.10671, table 1, and the config.json of Qwen/Qwen2-7B.
        llama.preset(
            "qwen2-7b",
            (28, 3584, 18944, 28, 4, 152_064),
            QWEN2,
            biases=Biases(qkv=True),
            positions=rotary(1_000_000.0),
        ),
    ),
)
