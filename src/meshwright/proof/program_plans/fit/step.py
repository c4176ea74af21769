"""A train step sharded by its plan: its state as {path: array}, its metrics as {name: scalar}, checks of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.errors import MeshwrightError
from meshwright.proof.program_plans.fit.keys import is_key, key_data, keys_from
from meshwright.proof.program_plans.plan import ProgramPlan
from meshwright.proof.programs.apply import Applied, apply
from meshwright.proof.programs.classes import table_by_name

RESERVED = frozenset({"step", "time", "mesh", "hardware", "began_at", "memory_peak_bytes", "host_peak_bytes"})
"""Fields of `metrics.jsonl` that a step's metrics cannot use as names; neither can names with `_seconds`."""


@dataclass(frozen=True)
class FitStep:
    """A step (state, batch) -> (state, metrics) sharded over a mesh. Its state is a dict of arrays by path.

    applied: the step in its layout. structure: the pytree structure of the state. state, batch: abstract arrays with
    shardings. has_parts: whether the batch is a tuple of several arguments of the step. metrics: names of the metrics.
    """

    applied: Applied
    structure: Any
    state: Mapping[str, jax.ShapeDtypeStruct]
    batch: Any
    has_parts: bool
    metrics: tuple[str, ...]

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices that run the step."""
        assert isinstance(self.applied.mesh, Mesh)
        return self.applied.mesh

    def tree(self, leaves: Mapping[str, Any]) -> Any:
        """Convert a state from {path: array} to the tree that the step takes."""
        return jax.tree.unflatten(self.structure, [leaves[path] for path in self.state])

    @cached_property
    def jitted(self) -> Any:
        """The jitted step (state, batch) -> (new state, metrics), on dicts of arrays. The state is donated."""

        def step(leaves: Mapping[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            state, found = self.applied(self.tree(leaves), *(batch if self.has_parts else (batch,)))
            after = dict(leaf_paths(state))
            return {path: after[path] for path in self.state}, _named(found)

        places = {path: one.sharding for path, one in self.state.items()}
        return jax.jit(
            step,
            in_shardings=(places, jax.tree.map(lambda one: one.sharding, self.batch)),
            out_shardings=(places, NamedSharding(self.mesh, PartitionSpec())),
            donate_argnums=0,
        )

    def place(self, state: Any) -> dict[str, Any]:
        """Return the initial state as {path: sharded array}: a copy of `state`, or its result if it is a function."""
        places = {path: one.sharding for path, one in self.state.items()}
        if is_maker(state):
            return jax.jit(lambda: dict(zip(places, jax.tree.leaves(state()), strict=True)), out_shardings=places)()
        leaves = zip(self.state.items(), jax.tree.leaves(state), strict=True)
        return {path: _copied(leaf, wanted) for (path, wanted), leaf in leaves}


def _copied(leaf: Any, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a copy of an array with a sharding. Without a copy, the first step would delete the caller's array."""
    if jax.process_count() > 1 and isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
        # JAX takes arrays of one process to the devices of all through the host only.
        if is_key(leaf):
            return keys_from(jax.device_put(np.asarray(key_data(leaf)), key_data(wanted).sharding), wanted)
        leaf = np.asarray(leaf)
    return jax.device_put(leaf, wanted.sharding, may_alias=False)


def is_maker(state: Any) -> bool:
    """Whether `state` is a function that returns the state. A pytree is not, even if its class is callable."""
    return callable(state) and jax.tree_util.all_leaves([state])


def lay_out(step: Callable[..., Any], state: Any, plan: Any) -> FitStep:
    """Return a step sharded by its plan (a `ProgramPlan` or an `Applied`), for a state or a function that returns it.

    Raises:
        MeshwrightError: the state or the step's dims differ from the plan's, or the step does not return state and
            metrics.
    """
    laid = plan.apply() if isinstance(plan, ProgramPlan) else plan
    if not isinstance(laid, Applied) or not isinstance(laid.mesh, Mesh):
        raise MeshwrightError(
            f"plan is {type(plan).__name__}; it is mw.plan(step, state, batch, on=…) or mw.apply(step, table, mesh,"
            " state, batch)"
        )
    args, kwargs = laid.program.traced.args_info
    if len(args) < 2 or kwargs:
        what = f"the argument {next(iter(kwargs))} by name" if kwargs else "one argument"
        raise MeshwrightError(f"the plan is of a step with {what}; fit takes step(state, batch), or with several parts")
    planned, *parts = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), args)
    found = _abstract(state)
    if wrong := differences(found, planned):
        raise MeshwrightError(f"the state is not the one that the plan was made for: {_first(wrong)}")
    metrics = _check_results(found, jax.eval_shape(step, found, *parts))
    table = table_by_name(laid.classes, laid.layout.table)
    try:
        # The step itself, which may have been changed since it was planned.
        applied = apply(step, table, laid.mesh, found, *parts, store=laid.layout.store)
    except MeshwrightError as error:
        raise MeshwrightError(f"the plan is of another step: {error}") from None
    (of_state, *of_parts), _ = applied.shardings
    placed = jax.tree.map(_sharded, parts, of_parts)
    leaves = zip(leaf_paths(found), jax.tree.leaves(of_state), strict=True)
    return FitStep(
        applied=applied,
        structure=jax.tree.structure(found),
        state={path: _sharded(leaf, place) for (path, leaf), place in leaves},
        batch=tuple(placed) if len(placed) > 1 else placed[0],
        has_parts=len(placed) > 1,
        metrics=metrics,
    )


def _sharded(leaf: jax.ShapeDtypeStruct, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _abstract(state: Any) -> Any:
    """Return the shapes and dtypes of a state, or of the state that a function returns."""
    if is_maker(state):
        return jax.eval_shape(state)
    try:
        return jax.eval_shape(lambda tree: tree, state)
    except TypeError as error:
        raise MeshwrightError(f"state has a leaf that is not an array: {str(error).splitlines()[0][:200]}") from None


def leaf_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their paths, such as `params.kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") or "value" for path, _ in leaves]
    if len({*paths}) < len(paths):  # A key with a dot in it.
        paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    return list(zip(paths, (leaf for _, leaf in leaves), strict=True))


def differences(found: Any, wanted: Any) -> list[str]:
    """Return a text for each array that differs in path, shape or dtype between two trees."""
    lines, ours, theirs = [], dict(leaf_paths(found)), dict(leaf_paths(wanted))
    for path in {**theirs, **ours}:
        now, then = (describe(tree[path]) if path in tree else None for tree in (ours, theirs))
        if now is None:
            lines.append(f"{path} is missing, which is to be {then}")
        elif then is None:
            lines.append(f"{path}, {now}, is not in it")
        elif now != then:
            lines.append(f"{path} is {now}, and is to be {then}")
    return lines


def describe(leaf: Any) -> str:
    """Return an array's dtype and shape: `float32[4,8]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _first(lines: list[str]) -> str:
    return lines[0] + (f"; and {len(lines) - 1} more" if len(lines) > 1 else "")


def _check_results(state: Any, results: Any) -> tuple[str, ...]:
    """Return the names of a step's metrics; raise unless the step returns a state like its argument, and metrics."""
    if not isinstance(results, tuple) or len(results) != 2:
        count = f"{len(results)} values" if isinstance(results, Sequence) else "one value"
        raise MeshwrightError(f"the step returns {count}; it is to return (state, metrics) or (state, loss)")
    after, found = results
    if wrong := differences(after, state):
        raise MeshwrightError(f"the step does not return the state as it takes it: {_first(wrong)}")
    for name, value in (named := _named(found)).items():
        if not isinstance(name, str) or not hasattr(value, "shape") or value.shape != ():
            what = describe(value) if hasattr(value, "shape") else f"a {type(value).__name__}"
            raise MeshwrightError(
                f"the step's metric {name!r} is {what}; metrics are a scalar, or a dict of scalars by name"
            )
        if not any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
            raise MeshwrightError(f"the step's metric {name!r} is {value.dtype}; it is to be a real number")
        if name in RESERVED or name.endswith("_seconds"):
            raise MeshwrightError(f"the step's metric {name!r} has the name of what every run measures; rename it")
    return tuple(named)


def _named(found: Any) -> dict[str, Any]:
    """Return the metrics of a step by name. A single value is named `loss`."""
    return dict(found) if isinstance(found, Mapping) else {"loss": found}
