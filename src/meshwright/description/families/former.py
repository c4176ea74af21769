"""Convert models saved by earlier versions, whose features were all fields of `ModelConfig`, to the present fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.description.step.layer import of_layers, shortest_cycle
from meshwright.description.step.model import largest
from meshwright.errors import MeshwrightError
from meshwright.support.field_types import nested

_RENAMED = {
    "qkv_bias": "biases.qkv", "output_bias": "biases.output", "mlp_bias": "biases.mlp",
    "unembedding_bias": "biases.unembedding", "norm": "norms.kind", "norm_bias": "norms.has_bias",
    "norm_offset": "norms.offset", "norm_epsilon": "norms.epsilon", "embedding_norm": "norms.after_embedding",
    "attention_sinks": "attention.has_sinks", "latent": "attention.latent", "embedding_scale": "scales.embedding",
    "residual_scale": "scales.residual", "attention_scale": "scales.attention", "logits_scale": "scales.logits",
    "attention_softcap": "scales.attention_softcap", "logits_softcap": "scales.logits_softcap",
}  # fmt: skip
"""Former field to its present dotted name; the value is unchanged."""

_JOINED = {
    "pre_norms": True, "post_norms": False, "parallel_blocks": False, "shared_norm": False, "clamped_swiglu": None,
    "qk_norm": False, "qk_norm_over_heads": False, "qk_norm_after_rotary": False,
    "positions": "rotary", "max_positions": 0, "rope_theta": 10_000.0, "rope_theta_local": None, "rope_scaling": None,
    "rotary_dims": 0, "rotary_interleaved": False, "unrotated_every": 0, "unrotated_layers": (),
    "sliding_window": None, "full_attention_every": 0, "full_attention_layers": (),
}  # fmt: skip
"""Former fields that `_joined` combines into fewer present ones, with their former defaults."""


def with_present_fields(data: Any, path: str = "") -> Any:
    """Return a model's plain data with the present fields of `ModelConfig`; data that has them is unchanged.

    Args:
        data: the output of `dataclasses.asdict` of this or an earlier version.
        path: the place of `data` in its file, for error messages.
    """
    former = (_RENAMED.keys() | _JOINED.keys()) - {"positions", "parallel_blocks"}
    parts = {place.partition(".")[0] for place in _RENAMED.values()}
    if not isinstance(data, Mapping) or parts & data.keys() or not former & data.keys():
        return data
    kept = {name: value for name, value in data.items() if name not in _RENAMED.keys() | _JOINED.keys()}
    moved = {place: data[name] for name, place in _RENAMED.items() if name in data}
    try:
        found = nested(kept | moved | _joined({**_JOINED, **data}))
    except (KeyError, TypeError) as error:
        raise MeshwrightError(f"{path or 'it'} is no model as an earlier version wrote it: {error}") from None
    if isinstance(latent := found["attention"].get("latent"), Mapping):
        found["attention"]["latent"] = {name: value for name, value in latent.items() if name != "is_interleaved"}
    return found


def _joined(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the present fields that replace those of `_JOINED`, by dotted name. old: all former fields."""
    layers = range(max(1, min(old["num_layers"], largest("num_layers"))))
    listed, every = old["full_attention_layers"], min(old["full_attention_every"], largest("num_layers"))
    windows = [
        None if layer in listed or (every and (layer + 1) % every == 0) else old["sliding_window"]
        for layer in range(max(len(layers), every))
    ]
    everywhere = {"theta": old["rope_theta"], "scaling": old["rope_scaling"]}
    local = everywhere if old["rope_theta_local"] is None else {"theta": old["rope_theta_local"]}
    frequencies = shortest_cycle(everywhere if window is None else local for window in windows)
    if (every := old["unrotated_every"]) or old["unrotated_layers"]:
        identity = {"theta": old["rope_theta"], "is_identity": True}
        frequencies = shortest_cycle(
            identity if layer in old["unrotated_layers"] or (every and (layer + 1) % every == 0) else own
            for layer, own in enumerate(of_layers(frequencies, layers))
        )
    latent = old.get("latent")
    is_interleaved = latent.get("is_interleaved", True) if isinstance(latent, Mapping) else old["rotary_interleaved"]
    rotary = {"frequencies": frequencies, "dims": old["rotary_dims"], "is_interleaved": is_interleaved}
    positions = {"rotary": rotary, "learned": {"rows": old["max_positions"]}, "alibi": "alibi"}[old["positions"]]
    place = {(True, False): "before", (False, True): "after", (True, True): "both"}[old["pre_norms"], old["post_norms"]]
    norm = "all heads" if old["qk_norm_over_heads"] else "rotated head" if old["qk_norm_after_rotary"] else "head"
    parallel = ("shared norm" if old["shared_norm"] else "own norms") if old["parallel_blocks"] else None
    return {
        "positions": positions,
        "attention.windows": shortest_cycle(windows),
        "attention.qk_norm": norm if old["qk_norm"] else None,
        "norms.place": place,
        "parallel_blocks": parallel,
        "activation": old["clamped_swiglu"] or old.get("activation", "silu"),
    }
