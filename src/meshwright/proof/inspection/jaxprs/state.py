"""Find state that a function returns with a changed weak type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from meshwright.proof.compiler.program import TracedMistake
from meshwright.proof.inspection.jaxprs.blocks import hlo_dtype
from meshwright.proof.inspection.jaxprs.places import place


def state_mistakes(traced: Any) -> Iterator[TracedMistake]:
    """Yield arguments whose weak type differs from that of the result with the same path and shape."""
    arguments, _ = jax.tree_util.tree_flatten_with_path(traced.args_info)
    results, _ = jax.tree_util.tree_flatten_with_path(traced.out_info)
    jaxpr = traced.jaxpr.jaxpr
    made = {id(var): equation for equation in jaxpr.eqns for var in equation.outvars}
    free = [(end, var) for (path, _), var in zip(results, jaxpr.outvars, strict=True) for end in _ends(path)]
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))
    for (path, _), aval, name in zip(arguments, traced.jaxpr.in_avals, names, strict=True):
        own = tuple(str(key) for key in path[2:])
        same = [var for end, var in free if own and end == own and var.aval.shape == aval.shape]
        if len(same) != 1 or same[0].aval.dtype != aval.dtype or same[0].aval.weak_type == aval.weak_type:
            continue
        figures = {"name": name or jax.tree_util.keystr(path[1:]), "was_weak": bool(aval.weak_type)}
        source = place(made[id(same[0])]) if id(same[0]) in made else ""
        yield TracedMistake("state-changed", hlo_dtype(aval.dtype.name), tuple(aval.shape), source, (), 1, figures)


def _ends(path: Any) -> set[tuple[str, ...]]:
    """Return the key path of a result's leaf, with and without its index in a tuple."""
    keys = tuple(str(key) for key in path)
    return {keys, keys[1:]} if path and isinstance(path[0], jax.tree_util.SequenceKey) else {keys}
