"""Rotary embedding in a config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from meshwright.description.families.family import Features
from meshwright.description.families.fields import Fields, listed
from meshwright.description.step.frequencies import (
    DynamicRopeScaling,
    Frequencies,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    QueryScaling,
    RopeScaling,
    YarnRopeScaling,
)
from meshwright.description.step.layer import of_layers, shortest_cycle
from meshwright.description.step.model import ModelConfig, RotaryPositions
from meshwright.errors import MeshwrightError

ORIGINAL = "original_max_position_embeddings"

QUERY_BETA = "llama_4_scaling_beta"
"""The field of Ministral 3 and Mistral 4 for scaling queries by their position."""

MSCALES = ("short_mscale", "long_mscale")
"""The fields of Phi-3.5-MoE for the factor of cosines and sines in short and in long sequences."""

SCALING_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (ORIGINAL,)),
    "yarn": (
        ("factor",),
        (ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), (ORIGINAL, "factor", "attention_factor")),
}
"""For each known kind of rope scaling, its required and its optional fields."""


class Rope(NamedTuple):
    """Rotary embedding as a config.json has it. partial: fraction of a head's dims that is rotated."""

    frequencies: Frequencies
    partial: float


def read_rope(
    fields: Fields,
    layer_type: str | None = None,
    *,
    theta: float = 10_000.0,
    theta_field: str = "rope_theta",
    partial: float = 1.0,
    partial_field: str | None = None,
) -> Rope:
    """Read theta, scaling and the rotated fraction of a head.

    As in transformers, `rope_scaling` replaces `rope_parameters`. If `rope_parameters` has an object for each kind of
    layer, `rope_scaling` extends the object of full attention.

    Args:
        fields: the file.
        layer_type: the kind of layer to read, if kinds have their own parameters.
        theta: the default theta.
        theta_field: the top-level field with theta.
        partial: the default fraction of a head that is rotated.
        partial_field: the top-level field with that fraction; None if the family always rotates whole heads.
    """
    given, scaling = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if layer_type is None:
        found = scaling or given
    else:
        own = given.get(layer_type) or {"rope_type": "default"}
        if given and not (isinstance(own, Mapping) and all(isinstance(each, Mapping) for each in given.values())):
            raise fields.refusal("rope_parameters", "it takes an object for each kind of layer")
        found = dict[str, Any](own) | (scaling if layer_type == "full_attention" else {})
    found = {name: value for name, value in found.items() if value is not None}
    theta = fields.positive(theta_field, theta)
    kind = found.pop("rope_type", found.pop("type", "default"))
    found.pop("type", None)
    if "rope_theta" in found:
        theta = fields.above_zero("rope_parameters.rope_theta", found.pop("rope_theta"))
    partial = fields.positive(partial_field or "partial_rotary_factor", partial)
    if (own := found.pop("partial_rotary_factor", None)) is not None:
        partial = fields.above_zero("rope_parameters.partial_rotary_factor", own)
    is_proportional = kind == "proportional" and fields.family.startswith("gemma4")
    if fields.family.startswith("gemma4") and partial != 1.0 and not is_proportional:
        raise fields.refusal(
            "rope_parameters", "a fraction of each head is known to rotate with rope_type proportional"
        )
    if is_proportional:
        # It always rotates whole heads, most of whose dims may have an angle of 0.
        factor = fields.above_zero("rope scaling's factor", found.pop("factor", 1.0))
        _check_scaling_fields(fields, "default", found)
        return Rope(Frequencies(theta=theta, scaling=ProportionalRopeScaling(share=partial, factor=factor)), 1.0)
    if partial != 1.0 and partial_field is None:
        raise MeshwrightError(
            f"the config.json of {fields.name} has partial_rotary_factor={partial:g}; its family rotates whole heads"
        )
    if not isinstance(kind, str) or kind not in SCALING_FIELDS:
        raise MeshwrightError(
            f"the config.json of {fields.name} has rope_scaling of type {kind!r}; {listed(SCALING_FIELDS)} are known"
        )
    return Rope(Frequencies(theta=theta, scaling=_read_scaling(fields, kind, found)), partial)


def read_rotary(fields: Fields, head_dim: int, *, partial_field: str | None = None) -> RotaryPositions:
    """Read a rotary embedding that is the same in all layers. partial_field: as in `read_rope`."""
    rope = read_rope(fields, partial_field=partial_field)
    return RotaryPositions(frequencies=(rope.frequencies,), dims=read_rotary_dims(fields, rope, head_dim))


def read_rotary_by_window(
    fields: Fields, features: Features, *, theta: float, local_theta: float, full_dim: int | None = None
) -> RotaryPositions:
    """Read a rotary embedding whose frequencies differ between layers with and without a window.

    Args:
        fields: the file.
        features: the features read so far, which include the windows.
        theta: default for layers without a window.
        local_theta: default for layers with a window.
        full_dim: dims of a head in layers without a window; None: as many as in the others.
    """
    full = read_rope(fields, "full_attention", theta=theta)
    local = read_rope(fields, "sliding_attention", theta=local_theta, theta_field="rope_local_base_freq").frequencies
    if local.scaling is not None:
        raise fields.refusal("rope_parameters", "frequencies in layers of sliding_attention are known unscaled")
    read_rotary_dims(fields, full, full_dim or features["head_dim"])
    windows = of_layers(features["attention"].windows, range(features["num_layers"]))
    return RotaryPositions(
        frequencies=shortest_cycle(full.frequencies if window is None else local for window in windows)
    )


def rotated_layers(fields: Fields, num_layers: int, *, is_empty_default: bool = False) -> list[bool]:
    """Return whether each layer has rotary embedding.

    The field `no_rope_layers` decides; by default, all have it except every `no_rope_layer_interval`-th.

    is_empty_default: whether an empty list means the default.
    """
    every = fields.whole("no_rope_layer_interval", 4)
    default = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    rotates = fields.value("no_rope_layers", default)
    if rotates == [] and is_empty_default:
        rotates = default
    if not isinstance(rotates, list) or len(rotates) < num_layers or any(flag not in (0, 1) for flag in rotates):
        raise fields.refusal(
            "no_rope_layers", f"it takes 1 or 0, without rotary embedding, for each of {num_layers} layers"
        )
    return [bool(flag) for flag in rotates[:num_layers]]


def rotated_where(
    positions: RotaryPositions, rotates: Iterable[bool], of_queries: QueryScaling | None = None
) -> RotaryPositions:
    """Return the positions with rotary embedding only in some layers.

    Args:
        positions: positions whose layers all have the same frequencies.
        rotates: for each layer of the model, whether it has rotary embedding.
        of_queries: the scaling of queries in layers without it.
    """
    (rotated,) = positions.frequencies
    identity = Frequencies(theta=rotated.theta, is_identity=True, of_queries=of_queries)
    return replace(positions, frequencies=shortest_cycle(rotated if flag else identity for flag in rotates))


def read_rotary_dims(fields: Fields, rope: Rope, head_dim: int) -> int:
    """Return the number of dims of a head that are rotated, counted from the first; 0 means all."""
    dims = int(head_dim * rope.partial)
    if not 1 <= dims <= head_dim or (dims % 2 and dims == head_dim):
        raise MeshwrightError(
            f"the config.json of {fields.name} rotates {dims} of {head_dim} dims (head_dim, or hidden_size for each of"
            f" num_attention_heads): partial_rotary_factor={rope.partial:g}; it takes at least one, and of a whole head"
            f" an even number"
        )
    return dims % head_dim


def scaling_field(fields: Fields) -> str:
    """Return the name of the field that has a file's rope scaling."""
    return "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"


def check_longrope(fields: Fields, frequencies: Frequencies) -> None:
    """Raise if the frequencies are scaled other than by LongRoPE."""
    if not isinstance(frequencies.scaling, LongRopeScaling | None):
        raise fields.refusal(
            scaling_field(fields), f"a {fields.family} model is known with rope_type 'default' or 'longrope'"
        )


def check_query_scaling(fields: Fields, frequencies: Frequencies) -> None:
    """Raise if the frequencies do not scale queries by their position, in a family that always does."""
    if not frequencies.query_scaling:
        raise fields.refusal(
            scaling_field(fields), f"a {fields.family} model has rope_type yarn and {QUERY_BETA} there"
        )


def frequencies_of(model: ModelConfig, *, has_window: bool = False) -> Frequencies:
    """Return the rotary frequencies of layers with or without a window (`has_window`).

    If no such layer is rotated, return those of another layer.
    """
    positions = model.positions if isinstance(model.positions, RotaryPositions) else RotaryPositions()
    layers = range(model.num_layers)
    by_layer = zip(of_layers(positions.frequencies, layers), of_layers(model.attention.windows, layers), strict=True)
    return min(by_layer, key=lambda layer: (layer[0].is_identity, (layer[1] is not None) != has_window))[0]


def rotary_share(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json field with the rotated fraction of a head."""
    dims = model.positions.dims if isinstance(model.positions, RotaryPositions) else 0
    return {"partial_rotary_factor": (dims or model.head_dim) / model.head_dim}


def _read_scaling(fields: Fields, kind: str, found: dict[str, Any]) -> RopeScaling | None:
    """Return the rope scaling of a kind (`SCALING_FIELDS`); None for `default`. found: the fields of the scaling."""
    _check_scaling_fields(fields, kind, found)

    def number(field: str, default: Any = None) -> Any:
        return fields.above_zero(f"rope scaling's {field}", found[field]) if field in found else default

    def numbers(field: str) -> tuple[float, ...]:
        several = found[field]
        if not isinstance(several, list):
            raise MeshwrightError(
                f"the config.json of {fields.name} has rope scaling's {field}={several!r}; it takes a list of numbers"
            )
        return tuple(fields.above_zero(f"rope scaling's {field}", one) for one in several)

    match kind:
        case "linear":
            return LinearRopeScaling(factor=number("factor"))
        case "dynamic":
            # For dynamic scaling the original length is max_position_embeddings.
            return DynamicRopeScaling(
                factor=number("factor"), original_max_seq_len=fields.whole("max_position_embeddings")
            )
        case "llama3":
            if number("low_freq_factor") > number("high_freq_factor"):
                raise MeshwrightError(
                    f"the config.json of {fields.name} has rope scaling's low_freq_factor={found['low_freq_factor']};"
                    f" it is at most high_freq_factor={found['high_freq_factor']}"
                )
            return Llama3RopeScaling(
                factor=number("factor"),
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
                original_max_seq_len=_original_length(fields, found),
            )
        case "yarn":
            truncate = found.get("truncate", True)
            if not isinstance(truncate, bool):
                raise MeshwrightError(
                    f"the config.json of {fields.name} has rope scaling's truncate={truncate!r}; it takes true or false"
                )
            return YarnRopeScaling(
                factor=number("factor"),
                original_max_seq_len=_original_length(fields, found),
                beta_fast=number("beta_fast", 32.0),
                beta_slow=number("beta_slow", 1.0),
                attention_factor=number("attention_factor"),
                mscale=number("mscale"),
                mscale_all_dim=number("mscale_all_dim"),
                truncate=truncate,
                query_beta=number(QUERY_BETA, 0.0),
            )
        case "longrope":
            length = _original_length(fields, found)
            if fields.family == "phimoe":
                found["attention_factor"] = found["short_mscale"]
                if found["short_mscale"] != found["long_mscale"]:
                    raise MeshwrightError(
                        f"the config.json of {fields.name} has rope scaling's long_mscale={found['long_mscale']!r};"
                        f" it is known equal to short_mscale={found['short_mscale']!r}"
                    )
            if "factor" not in found:
                found["factor"] = fields.whole("max_position_embeddings") / length
            return LongRopeScaling(
                short_factor=numbers("short_factor"),
                long_factor=numbers("long_factor"),
                factor=number("factor"),
                original_max_seq_len=length,
                attention_factor=number("attention_factor"),
            )
    return None


def _check_scaling_fields(fields: Fields, kind: str, found: Mapping[str, Any]) -> None:
    """Raise for an unknown or a missing field of this kind of scaling."""
    needed, optional = SCALING_FIELDS[kind]
    # transformers writes the original length for every kind of scaling. Qwen3.5 rotates by three positions (time and
    # place in an image), which are the same in a text.
    ignored = {ORIGINAL, "mrope_section", "mrope_interleaved"} if "qwen3_5" in fields.family else {ORIGINAL}
    if kind == "longrope" and fields.family == "phimoe":
        needed, optional = (*needed, *MSCALES), tuple(name for name in optional if name != "attention_factor")
    if kind == "yarn" and fields.family in ("ministral3", "mistral4"):
        optional = (*optional, QUERY_BETA)
        # A copy of the top-level field of that name, without effect.
        ignored.add("max_position_embeddings")
    extra, absent = set(found) - {*needed, *optional} - ignored, set(needed) - set(found)
    if extra or absent:
        field = min(extra or absent)
        what = "a field that is not known" if extra else "no field"
        raise MeshwrightError(
            f"the config.json of {fields.name} has {what} {field!r} in its rope scaling of type {kind!r}, which has"
            f" {listed((*needed, *optional)) or 'none'}"
        )


def _original_length(fields: Fields, found: Mapping[str, Any]) -> int:
    """Return the sequence length before scaling, in tokens.

    It is a field beside the scaling or in it (`found`), or else `max_position_embeddings`.
    """
    beside = fields.whole(ORIGINAL, None)
    if beside is None and ORIGINAL not in found:
        return fields.whole("max_position_embeddings")
    length = fields.above_zero(f"rope scaling's {ORIGINAL}", found[ORIGINAL] if beside is None else beside)
    if length < 2 or length != int(length):
        raise MeshwrightError(
            f"the config.json of {fields.name} has rope scaling's {ORIGINAL}={length:g}; it takes a whole number from 2"
        )
    return int(length)


def rope_parameters(frequencies: Frequencies) -> dict[str, Any]:
    """Return `rope_parameters` as transformers 5 writes them."""
    theta = {"rope_theta": frequencies.theta}
    match scaling := frequencies.scaling:
        case None:
            return {"rope_type": "default"} | theta
        case LinearRopeScaling():
            own: dict[str, Any] = {"rope_type": "linear"}
        case DynamicRopeScaling():
            own = {"rope_type": "dynamic"}
        case Llama3RopeScaling(low_freq_factor=low, high_freq_factor=high, original_max_seq_len=length):
            own = {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high, ORIGINAL: length}
        case YarnRopeScaling() as yarn:
            own = {"rope_type": "yarn", "beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow}
            own |= {ORIGINAL: yarn.original_max_seq_len, "truncate": yarn.truncate}
            optional = ("attention_factor", "mscale", "mscale_all_dim")
            own |= {name: value for name in optional if (value := getattr(yarn, name)) is not None}
            own |= {QUERY_BETA: yarn.query_beta} if yarn.query_beta else {}
        case ProportionalRopeScaling(share=share):
            own = {"rope_type": "proportional", "partial_rotary_factor": share}
        case LongRopeScaling() as long:
            own = {"rope_type": "longrope", "short_factor": [*long.short_factor], "long_factor": [*long.long_factor]}
            own |= {ORIGINAL: long.original_max_seq_len}
            own |= {} if long.attention_factor is None else {"attention_factor": long.attention_factor}
    is_default = isinstance(scaling, ProportionalRopeScaling) and scaling.factor == 1.0
    return own | theta | ({} if is_default else {"factor": scaling.factor})


def rope_by_layer(model: ModelConfig) -> dict[str, Any]:
    """Return the field `rope_parameters` with one object for layers without a window and one for the others."""
    return {
        "rope_parameters": {
            "full_attention": rope_parameters(frequencies_of(model)),
            "sliding_attention": rope_parameters(replace(frequencies_of(model, has_window=True), scaling=None)),
        }
    }


def longest_sequence(model: ModelConfig) -> dict[str, Any]:
    """Return the field `max_position_embeddings` if the rotary scaling determines it; else {}."""
    match frequencies_of(model).scaling:
        case None | LinearRopeScaling() | ProportionalRopeScaling():
            return {}
        case DynamicRopeScaling(original_max_seq_len=length):
            return {"max_position_embeddings": length}
        case Llama3RopeScaling() | YarnRopeScaling() | LongRopeScaling() as scaling:
            return {"max_position_embeddings": round(scaling.original_max_seq_len * scaling.factor)}
