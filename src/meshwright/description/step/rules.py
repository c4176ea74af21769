"""The rules table: logical axes to mesh axes. A strategy is a table like this one, not a code path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from meshwright.description.step.parameter_tree import Parameter
from meshwright.description.step.strategy import Strategy, TpStream
from meshwright.errors import MeshwrightError
from meshwright.mesh import AXES, MeshShape, check_divides, local_shape

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes that split each dim of an array, the axes of degree 1 left out."""

Rules = Mapping[str, tuple[str, ...]]

RULES: Rules = {
    # Parameters. Norm scales are kept whole: at a few kB a layer a gather would be all latency.
    "layers": (),
    "dense_layers": (),
    "embed": ("fsdp", "sp"),
    "norm": (),
    "kv_heads": ("tp",),
    "group": (),
    "head_dim": (),
    "mlp": ("tp",),
    "vocab": ("tp",),
    "expert": ("ep",),
    "latent_input": ("fsdp", "sp"),
    "latent": (),
    "router": (),
    "positions": (),
    "rank": (),
    # Activations. Between products the residual stream is split over tp along the sequence (sequence parallelism).
    "batch": ("dp", "fsdp", "ep"),
    "sequence": ("sp",),
    "residual_sequence": ("sp", "tp"),
    "activation": (),
}
"""Weights: stored over fsdp and sp, split over tp along heads, mlp and vocab; experts split over ep.

Tokens: split over dp, fsdp, ep and sp.
"""

WHOLE_STREAM: Rules = {**RULES, "residual_sequence": RULES["sequence"]}
"""The rules where each device of tp has the whole stream between products (Megatron-LM, arXiv:1909.08053)."""

IN_USE = {"embed": "activation", "latent_input": "activation"}
"""Logical axes used for storage only, and the axis whose layout they take once gathered for use."""


def stream_rules(tp_stream: TpStream) -> Rules:
    """The rules by which a mesh is legal: `RULES`, or `WHOLE_STREAM` where tp does not split the stream."""
    return RULES if tp_stream == "split" else WHOLE_STREAM


def rules_of(strategy: Strategy) -> Rules:
    """The rules that a strategy is run by; of a pipeline each stage stores its layers, and all share the vocab.

    Without ZeRO nothing is stored in shards alone.
    """
    stored = {} if strategy.zero_stage else dict.fromkeys(IN_USE, ())
    return {**stream_rules(strategy.tp_stream), **stored, "layers": ("pp",), "vocab": (*RULES["vocab"], "pp")}


def logical_rules(strategy: Strategy) -> Rules:
    """The rules that a strategy is run by, with the names that other models' dims have: `heads` for grouped ones."""
    found = rules_of(strategy)
    return {**found, "heads": found["kv_heads"]}


def check_rules(rules: Rules) -> None:
    """Raise an error if a rule is for a dim that no decoder has, or names an unknown mesh axis."""
    for name, axes in rules.items():
        if name not in RULES:
            near = difflib.get_close_matches(name, RULES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise MeshwrightError(
                f"there is a rule for dim {name!r}, which no array has; {hint}rules are for {', '.join(RULES)}"
            )
        for axis in axes:
            _check_axis(name, axis)


def _check_axis(name: str, axis: str) -> None:
    """Raise where the rule for a dim names an axis that does not exist."""
    if axis not in AXES:
        raise MeshwrightError(f"the rule for {name!r} names axis {axis!r}; the axes are {', '.join(AXES)}")


def token_axes(rules: Rules = RULES) -> tuple[str, ...]:
    """The mesh axes that split tokens: over these every weight's gradient has to be summed."""
    return (*rules["batch"], *rules["sequence"])


def spec(axes: tuple[str, ...], *, mesh: MeshShape, rules: Rules = RULES, what: str = "an array") -> Spec:
    """The mesh axes on each dim of an array whose dims have these logical axes.

    A logical axis without a rule, a rule for an axis that does not exist and a mesh axis wanted by two dims are errors.
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
                f"{what} wants axis {axis}={mesh.degree(axis)} on dims {' and '.join(dims)}; an axis splits one dim"
                f" only: take it out of the rule for one of them, or use {axis}=1"
            )
    return tuple(result)


def local_parameter_shape(
    parameter: Parameter, *, mesh: MeshShape, rules: Rules = RULES, what: str = "a parameter"
) -> tuple[int, ...]:
    """The shape that one device holds of `parameter`; a degree that does not divide its dim is an error."""
    found = spec(parameter.axes, mesh=mesh, rules=rules, what=what)
    for name, size, axes in zip(parameter.axes, parameter.shape, found, strict=True):
        check_divides(name, size, mesh, axes, of=what)
    return local_shape(parameter.shape, found, mesh.degrees)
