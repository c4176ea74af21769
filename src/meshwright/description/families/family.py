"""A model family on Hugging Face: how to read and write its config.json, names of its weights, and its presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Family, ModelConfig

Features = dict[str, Any]
"""Keyword arguments of `ModelConfig`."""

Reader = Callable[[Fields], Features]
"""A function that returns the features of a model from the fields of its config.json."""


Writer = Callable[[ModelConfig], dict[str, Any]]
"""A function that returns the config.json of a model; the family's `Reader` reads it back."""


@dataclass(frozen=True)
class Published:
    """Where a parameter is in a Hugging Face checkpoint: the tensor's name, and its layout in the tensor.

    Attributes:
        name: with {layer} and {expert} as placeholders. A tensor of expert weights whose name has no {expert} holds all
            experts of a layer in its first dim.
        is_transposed: whether the tensor is stored [out, in], as in PyTorch's Linear; our parameter is [in, out].
        part: (index of this parameter, count) if the tensor holds `count` of our parameters along its output.
        by_head: how those parameters alternate along the output: 0, each is contiguous (GPT-2); 1, head by head
            (GPT-NeoX); 2, head by head, if two dims number the heads (kv head, query heads that share it).
        is_interleaved: whether those parameters alternate column by column (gpt-oss).
        is_convolution: whether the tensor is a convolution of each channel, [channels, 1, taps].
    """

    name: str
    is_transposed: bool = False
    part: tuple[int, int] = (0, 1)
    by_head: int = 0
    is_interleaved: bool = False
    is_convolution: bool = False


Names = Mapping[str, Published]
"""The place of each parameter in a Hugging Face checkpoint, by our path; `layers.query` stands for every stack."""


@dataclass(frozen=True, kw_only=True)
class PublishedFamily:
    """A family with models on Hugging Face.

    Attributes:
        readers: the function that reads a config.json, by the file's model_type.
        write: the function that returns a model's config.json; None if the family can only be planned.
        buffers: patterns of names of checkpoint tensors that are not parameters (`_keys_to_ignore_on_load_unexpected`
            of transformers).
    """

    family: Family
    readers: Mapping[str, Reader]
    names: Names
    write: Writer | None = None
    presets: tuple[ModelConfig, ...] = field(default=())
    buffers: tuple[str, ...] = ()


def names_of(names: Mapping[str, str]) -> dict[str, Published]:
    """Return the `Published` of each parameter, by our path. names: the tensor's name, by our path.

    Weights of matmuls are marked as stored [out, in]. Norms, biases and embedding tables, recognised by our names, are
    not.
    """
    found = {}
    for ours, theirs in names.items():
        is_matrix = not ("norm" in ours or ours.endswith("_bias") or ours in ("embedding", "positions"))
        found[ours] = Published(theirs, is_transposed=is_matrix)
    return found


QKV_PROJ = ("self_attn.qkv_proj", ("query", "key", "value"))
GATE_UP_PROJ = ("mlp.gate_up_proj", ("gate", "up"))


def fused(names: Names, *modules: tuple[str, tuple[str, ...]]) -> dict[str, Published]:
    """Return the names with some parameters of a layer fused into one tensor, one after another along its output.

    modules: for each fused tensor, its module and our names of the parameters: `QKV_PROJ`, `GATE_UP_PROJ`.
    """
    found = dict(names)
    for module, parts in modules:
        for index, ours in enumerate(parts):
            name = f"model.layers.{{layer}}.{module}.weight"
            found[f"layers.{ours}"] = replace(found[f"layers.{ours}"], name=name, part=(index, len(parts)))
    return found


LLAMA_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "layers.attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "layers.query": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers.key": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers.value": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers.output": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers.query_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "layers.key_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "layers.value_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "layers.output_bias": "model.layers.{layer}.self_attn.o_proj.bias",
    "layers.query_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers.key_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "layers.mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.up": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.down": "model.layers.{layer}.mlp.down_proj.weight",
    "layers.gate_bias": "model.layers.{layer}.mlp.gate_proj.bias",
    "layers.up_bias": "model.layers.{layer}.mlp.up_proj.bias",
    "layers.down_bias": "model.layers.{layer}.mlp.down_proj.bias",
    "layers.attention_norm_bias": "model.layers.{layer}.input_layernorm.bias",
    "layers.mlp_norm_bias": "model.layers.{layer}.post_attention_layernorm.bias",
    "final_norm": "model.norm.weight",
    "final_norm_bias": "model.norm.bias",
    "unembedding": "lm_head.weight",
}
"""The names of Llama's weights, which many families share."""

EXPERT_NAMES: Mapping[str, str] = {
    "layers.router": "model.layers.{layer}.mlp.gate.weight",
    "layers.expert_gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "layers.expert_up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "layers.expert_down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}
"""Names of expert weights in Qwen and DeepSeek."""
