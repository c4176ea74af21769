"""What is known of a published family: how its config.json is read, where its weights are, and models by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.families.fields import Fields
from meshwright.step.model import Family, ModelConfig

Features = dict[str, Any]
"""Arguments of `ModelConfig`."""

Reader = Callable[[Fields], Features]
"""The features of a model from the fields of its config.json."""


Writer = Callable[[ModelConfig], dict[str, Any]]
"""The config.json of a model, as its reader takes it."""


@dataclass(frozen=True)
class Published:
    """Where a parameter is in a published checkpoint: the tensor `name`, with {layer} and {expert} to be filled in.

    is_transposed: stored [out, in], as PyTorch's Linear has it; ours is [in, out]. part: (index, count) where the
    tensor holds several of our parameters along its output. by_head, is_interleaved: whether these alternate head by
    head (GPT-NeoX) or column by column (gpt-oss), and do not follow one another (GPT-2). A name without {expert} is of
    a tensor that has all experts of a layer, its first dim.
    """

    name: str
    is_transposed: bool = False
    part: tuple[int, int] = (0, 1)
    by_head: bool = False
    is_interleaved: bool = False


Names = Mapping[str, Published]
"""Our path of a parameter, `layers.query` in whichever stack, to where it is published."""


@dataclass(frozen=True, kw_only=True)
class PublishedFamily:
    """A family with models on Hugging Face; its readers by the model_type of a config.json.

    write: the config.json of a model, None of a family that is only planned. buffers: patterns of the names of tensors
    in published checkpoints that are no parameters (`_keys_to_ignore_on_load_unexpected` of transformers).
    """

    family: Family
    readers: Mapping[str, Reader]
    names: Names
    write: Writer | None = None
    presets: tuple[ModelConfig, ...] = field(default=())
    buffers: tuple[str, ...] = ()


def names_of(names: Mapping[str, str]) -> dict[str, Published]:
    """Published names as one writes them down: weights of layers are Linears, stored [out, in]; vectors are not.

    A weight of a layer starts with {layer}'s prefix; norms, biases and tables are told by our names.
    """
    found = {}
    for ours, theirs in names.items():
        is_matrix = not ("norm" in ours or ours.endswith("_bias") or ours in ("embedding", "positions"))
        found[ours] = Published(theirs, is_transposed=is_matrix)
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
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
}
"""The names of Llama's weights, which many families share."""

EXPERT_NAMES: Mapping[str, str] = {
    "layers.router": "model.layers.{layer}.mlp.gate.weight",
    "layers.expert_gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "layers.expert_up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "layers.expert_down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}
"""The names of experts' weights as Qwen and DeepSeek have them."""
