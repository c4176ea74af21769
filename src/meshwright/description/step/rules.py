"""Sharding rules: logical axes to mesh axes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from meshwright.description.step.parameter_tree import IN_USE, Parameter
from meshwright.description.step.strategy import Strategy, TpStream
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.mesh import AXES, MeshShape, check_divides, local_shape

Spec = tuple[tuple[str, ...], ...]
"""Mesh axes that split each dim of an array, without axes of degree 1."""

Rules = Mapping[str, tuple[str, ...]]
"""For each logical axis, the mesh axes that split it, outermost first."""

RULES: Rules = {
    # Parameters. Norm scales (a few kB per layer) are replicated: a gather would be pure latency.
    "layers": (),
    "dense_layers": (),
    "embed": ("fsdp", "sp"),
    "norm": (),
    "kv_heads": ("tp",),
    "group": (),
    "head_dim": (),
    "linear_heads": ("tp",),
    "taps": (),
    "mlp": ("tp",),
    "vocab": ("tp",),
    "expert": ("ep",),
    "latent_input": ("fsdp", "sp"),
    "latent": (),
    "router": (),
    "positions": (),
    # The table with an input for each layer is used as it is stored: tokens are sent to its columns.
    "layer_columns": ("fsdp", "sp"),
    "layer_input": (),
    "rank": (),
    "adapter": (),
    # Activations. Between blocks the residual stream is split over tp along the sequence (sequence parallelism).
    "batch": ("dp", "fsdp", "ep"),
    "sequence": ("sp",),
    "residual_sequence": ("sp", "tp"),
    "activation": (),
}
"""Weights: stored over fsdp and sp, split over tp along heads, mlp and vocab; experts split over ep.

Tokens: split over dp, fsdp, ep and sp.
"""

WHOLE_STREAM: Rules = {**RULES, "residual_sequence": RULES["sequence"]}
"""`RULES` with the residual stream replicated over tp between blocks (Megatron-LM, arXiv:1909.08053)."""


def stream_rules(tp_stream: TpStream) -> Rules:
    """Return the sharding rules: `RULES`, or `WHOLE_STREAM` if tp does not split the residual stream between blocks."""
    return RULES if tp_stream == "split" else WHOLE_STREAM


def rules_of(strategy: Strategy) -> Rules:
    """Return a strategy's sharding rules.

    Layers are split over pp, and so is the vocab if all stages are one program. At ZeRO stage 0, no dim is sharded only
    in storage.
    """
    stored = {} if strategy.zero_stage else dict.fromkeys(IN_USE, ())
    vocab = (*RULES["vocab"], "pp") if strategy.profile.spmd_pipeline else RULES["vocab"]
    return {**stream_rules(strategy.tp_stream), **stored, "layers": ("pp",), "vocab": vocab}


def logical_rules(strategy: Strategy) -> Rules:
    """Return a strategy's sharding rules, and one for the logical axis `heads` of models without grouped heads."""
    found = rules_of(strategy)
    return {**found, "heads": found["kv_heads"]}


def check_rules(rules: Rules) -> None:
    """Raise an error if a rule is for a logical axis that no decoder has, or has an unknown mesh axis."""
    for name, axes in rules.items():
        if name not in RULES:
            hint = did_you_mean(map(repr, difflib.get_close_matches(name, RULES, n=1)))
            raise MeshwrightError(
                f"there is a rule for dim {name!r}, which no array has; {hint}rules are for {', '.join(RULES)}"
            )
        for axis in axes:
            _check_axis(name, axis)


def _check_axis(name: str, axis: str) -> None:
    """Raise if the rule for the logical axis `name` has a mesh axis that does not exist."""
    if axis not in AXES:
        raise MeshwrightError(f"the rule for {name!r} names axis {axis!r}; the axes are {', '.join(AXES)}")


def token_axes() -> tuple[str, ...]:
    """Return the mesh axes that split tokens, over which the gradients of weights are summed."""
    return (*RULES["batch"], *RULES["sequence"])


def spec(axes: tuple[str, ...], *, mesh: MeshShape, rules: Rules = RULES, what: str = "an array") -> Spec:
    """Return the mesh axes on each dim of an array whose dims have these logical axes.

    Args:
        what: the array's name in error messages.

    Raises:
        MeshwrightError: a logical axis has no rule, a rule names an unknown mesh axis, or two dims need the same mesh
            axis.
    """
    result: list[tuple[str, ...]] = []
    for name in axes:
        if name not in rules:
            raise MeshwrightError(
                f"{what} has dim {name!r}, for which there is no rule; rules are for {', '.join(rules)}"
            )
        for axis in rules[name]:
            _check_axis(name, axis)
        result.append(tuple(axis for axis in rules[name] if mesh.degree(axis) > 1))
    used = [axis for dim in result for axis in dim]
    for axis in used:
        if used.count(axis) > 1:
            dims = [name for name, dim in zip(axes, result, strict=True) if axis in dim]
            raise MeshwrightError(
                f"{what} needs axis {axis}={mesh.degree(axis)} on dims {' and '.join(dims)}; an axis splits one dim"
                f" only: take it out of the rule for one of them, or use {axis}=1"
            )
    return tuple(result)


def local_parameter_shape(
    parameter: Parameter, *, mesh: MeshShape, rules: Rules = RULES, what: str = "a parameter"
) -> tuple[int, ...]:
    """Return the shape of one device's shard of `parameter`. Raises if a degree does not divide its dim."""
    found = spec(parameter.axes, mesh=mesh, rules=rules, what=what)
    for name, size, axes in zip(parameter.axes, parameter.shape, found, strict=True):
        check_divides(name, size, mesh, axes, of=what)
    return local_shape(parameter.shape, found, mesh.degrees)
