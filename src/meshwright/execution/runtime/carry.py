"""Convert a plan to JAX: its mesh, and the sharding of each leaf of a tree, determined by the leaf's path.

`Plan` and `MeshShape` import this module on first use, so that planning works without JAX.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.rules import Rules, logical_rules, rules_of, spec
from meshwright.description.step.stages import staged_parameters
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.execution.runtime.mesh import build_mesh, with_axis_type
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape, check_divides
from meshwright.planning.plan import Plan


def mesh_of(shape: MeshShape, devices: Sequence[Any] | None, types: Literal["explicit", "auto"]) -> Mesh:
    """Return the `jax.sharding.Mesh` of a shape, with all axes of type `types`. Raises if that type is unknown."""
    if types not in ("explicit", "auto"):
        raise MeshwrightError(f"types is {types!r}; it is one of explicit, auto")
    mesh = build_mesh(shape, devices)
    return mesh if types == "explicit" else with_axis_type(mesh, AxisType.Auto)


Axes = Mapping[str, Sequence[str | None] | Literal["replicated"]]
"""{regular expression of leaf paths: logical axis of each dim, None for a dim that is not sharded; or "replicated"}."""

_ELSE = "*"
"""Key of `Axes` for all paths that no regular expression matches."""


def plan_shardings(plan: Plan, tree: Any, axes: Axes | None, mesh: Mesh | None) -> Any:
    """Return the tree with the sharding of each leaf in its place (implements `Plan.shardings`).

    Args:
        tree: a tree of parameters, with the paths of the plan's model unless `axes` is given.
        axes: logical axes by path; default: those that the plan's model declares.
        mesh: default: the plan's mesh with explicit axes.

    Raises:
        MeshwrightError: the mesh is not the plan's, a path is unknown, or a degree does not divide a dim.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]
    shapes = [tuple(getattr(leaf, "shape", ())) for _, leaf in found]
    specs = _declared(plan, paths, shapes) if axes is None else _matched(plan, paths, shapes, axes)
    mesh = plan.mesh() if mesh is None else mesh
    if not isinstance(mesh, Mesh) or dict(mesh.shape) != plan.mesh.layout:
        shown = dict(mesh.shape) if isinstance(mesh, Mesh) else repr(mesh)
        raise MeshwrightError(f"mesh is {shown}; it is what plan.mesh() or plan.mesh(types='auto') returns")
    return jax.tree_util.tree_unflatten(structure, [NamedSharding(mesh, found) for found in specs])


def _declared(plan: Plan, paths: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[PartitionSpec]:
    """Return the PartitionSpec of each leaf, as the plan's model declares its parameters.

    Layers may be stacked in the model's order or in the order of pipeline slots. Raises for unknown paths and shapes.
    """
    model, context = plan.workload.model, ShardingContext(plan.mesh, rules_of(plan.strategy))
    stored = padded(model, plan.mesh, context.rules)
    declared = dict(leaves(parameters(stored)))
    staged = dict(leaves(staged_parameters(stored, stages=plan.mesh.pp, virtual_stages=plan.strategy.virtual_stages)))
    specs = []
    for path, shape in zip(paths, shapes, strict=True):
        if path not in declared:
            hint = did_you_mean(difflib.get_close_matches(path, declared, n=1))
            raise MeshwrightError(
                f"{model.name} has no parameter {path!r}; {hint}for another tree give axes={{'regular expression':"
                f" (logical axis of each dim)}}"
            )
        if shape not in (declared[path].shape, staged[path].shape):
            raise MeshwrightError(
                f"{path} has shape {shape}; {model.name} on {plan.mesh} has it of {declared[path].shape}"
            )
        _check_divides(path, shape, declared[path].axes, plan.mesh, context.rules)
        specs.append(context.spec(*declared[path].axes))
    return specs


def _matched(plan: Plan, paths: Sequence[str], shapes: Sequence[tuple[int, ...]], axes: Axes) -> list[PartitionSpec]:
    """Return the PartitionSpec of each leaf, from the first regular expression that matches its path.

    Raises if no expression matches a path, or an expression matches none.
    """
    rules = {**logical_rules(plan.strategy), "": ()}
    specs, used = [], set()
    for path, shape in zip(paths, shapes, strict=True):
        expressions = (pattern for pattern in axes if pattern != _ELSE)
        match = next((pattern for pattern in expressions if _matches(pattern, path)), _ELSE)
        if match not in axes and not shape:
            specs.append(PartitionSpec())
            continue
        if match not in axes:
            raise MeshwrightError(
                f"no expression matches {path!r} {shape}; add one, as {{{path!r}: (…)}}, or {{'*': 'replicated'}} for"
                f" all that none matches"
            )
        used.add(match)
        dims = axes[match]
        if isinstance(dims, str) and dims != "replicated":
            raise MeshwrightError(f"{match!r} is for {dims!r}; it is for the logical axis of each dim, or 'replicated'")
        names = ("",) * len(shape) if isinstance(dims, str) else tuple(name or "" for name in dims)
        if len(names) != len(shape):
            raise MeshwrightError(
                f"{match!r} gives {len(names)} logical axes, {', '.join(map(str, axes[match]))}, to {path},"
                f" which has {len(shape)} dims: {shape}"
            )
        for name in names:
            if name not in rules:
                known = [known for known in rules if known]
                hint = did_you_mean(difflib.get_close_matches(name, known, n=1))
                raise MeshwrightError(f"{path} has logical axis {name!r}; {hint}logical axes are {', '.join(known)}")
        _check_divides(path, shape, names, plan.mesh, rules)
        found = spec(names, mesh=plan.mesh, rules=rules, what=path)
        specs.append(PartitionSpec(*(dim or None for dim in found)))
    if unused := [pattern for pattern in axes if pattern not in used and pattern != _ELSE]:
        raise MeshwrightError(f"{unused[0]!r} matches no leaf; leaves are {', '.join(paths[:8])}")
    return specs


def _matches(pattern: str, path: str) -> bool:
    """Whether a regular expression matches a whole path, with or without the `.value` that NNX appends to paths."""
    try:
        return any(re.fullmatch(pattern, one) for one in (path, path.removesuffix(".value")))
    except re.error as error:
        raise MeshwrightError(f"{pattern!r} is not a regular expression: {error}") from None


def _check_divides(path: str, shape: tuple[int, ...], names: tuple[str, ...], mesh: MeshShape, rules: Rules) -> None:
    for name, size in zip(names, shape, strict=True):
        check_divides(name, size, mesh, rules[name], of=path)
