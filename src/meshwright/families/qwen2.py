"""Qwen2 and Qwen2-MoE: Llama with biases of queries, keys and values; the window is written down but off by default."""

from __future__ import annotations

from typing import Any

from meshwright.families import llama
from meshwright.families.family import EXPERT_NAMES, LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.families.fields import Fields
from meshwright.step.model import Experts, Family, ModelConfig

QWEN2 = Family("qwen2")


def read(fields: Fields) -> Features:
    """Llama's fields, the window where it is on, and biases of queries, keys and values alone."""
    features = llama.read(fields)
    windows = windows_of(fields, features["num_layers"])
    return features | windows | {"qkv_bias": fields.flag("qkv_bias", True), "output_bias": False}


def windows_of(fields: Fields, num_layers: int) -> Features:
    """The window where `use_sliding_window` has it on: in layers from `max_window_layers` on, which has to be 0."""
    is_on = fields.flag("use_sliding_window", False)
    first = fields.whole("max_window_layers", 0, least=0)
    # Where a file names the kind of each layer, transformers asks no more from which on they have a window.
    if fields.value("layer_types", None) is not None:
        return fields.windows(num_layers, is_on=is_on)
    if is_on and 0 < first < num_layers:
        raise fields.refusal("max_window_layers", "with use_sliding_window it is known as 0, for all layers, or all")
    return fields.windows(num_layers, is_on=is_on and first == 0)


def read_experts(fields: Fields, features: Features) -> Features:
    """Experts in every `decoder_sparse_step`-th layer, but for `mlp_only_layers`.

    Which layers are dense changes no plan, nor does how shares are normed: a model with others than ours can be
    planned, and does not run.
    """
    layers = features["num_layers"]
    step, dense = fields.whole("decoder_sparse_step", 1), fields.layers("mlp_only_layers", layers)
    sparse = [layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense]
    num_dense = layers - len(sparse)
    shared = fields.whole("shared_expert_intermediate_size", 0, least=0)
    planned_only = () if fields.flag("norm_topk_prob", False) else ("norm_topk_prob=False",)
    if sparse != list(range(num_dense, layers)):
        planned_only += ("dense layers between those of experts, by decoder_sparse_step and mlp_only_layers",)
    if shared:
        planned_only += ("a gate of the shared expert",)
    experts = Experts(
        count=fields.whole("num_experts", None) or fields.whole("num_local_experts"),
        num_active=fields.whole("num_experts_per_tok"),
        mlp=fields.whole("moe_intermediate_size"),
        shared_mlp=shared,
        num_dense_layers=num_dense,
    )
    return {"experts": experts, "planned_only": planned_only}


def read_moe(fields: Fields) -> Features:
    """Qwen2-MoE."""
    features = read(fields)
    return features | read_experts(fields, features)


def write(model: ModelConfig) -> dict[str, Any]:
    """The config.json of a Qwen2 without experts."""
    return llama.write_shared(model, "qwen2", "Qwen2ForCausalLM") | write_windows(model)


def write_windows(model: ModelConfig) -> dict[str, Any]:
    """The fields of the window, which is off where a model has none."""
    if model.sliding_window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": model.sliding_window, "max_window_layers": 0}


_SHARED = "model.layers.{layer}.mlp.shared_expert"

FAMILY = PublishedFamily(
    family=QWEN2,
    readers={"qwen2": read, "qwen2_moe": read_moe},
    names=names_of(
        {
            **LLAMA_NAMES,
            **EXPERT_NAMES,
            "layers.shared_gate": f"{_SHARED}.gate_proj.weight",
            "layers.shared_up": f"{_SHARED}.up_proj.weight",
            "layers.shared_down": f"{_SHARED}.down_proj.weight",
        }
    ),
    write=write,
    presets=(
        # Qwen2: arXiv:2407.10671, table 1, and the config.json of Qwen/Qwen2-7B.
        llama.preset("qwen2-7b", (28, 3584, 18944, 28, 4, 152_064), QWEN2, qkv_bias=True, rope_theta=1_000_000.0),
    ),
)
