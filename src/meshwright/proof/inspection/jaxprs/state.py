"""Find state that a function returns with a changed weak type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from meshwright.proof.compiler.program import TracedMistake
from meshwright.proof.inspection.jaxprs.blocks import hlo_dtype


def state_mistakes(traced: Any) -> Iterator[TracedMistake]:
    """Yield arguments whose weak type differs from that of the result with the same path and shape."""
    arguments, _ = jax.tree_util.tree_flatten_with_path(traced.args_info)
    results, _ = jax.tree_util.tree_flatten_with_path(traced.out_info)
    free = [(end, aval) for (path, _), aval in zip(results, traced.jaxpr.out_avals, strict=True) for end in _ends(path)]
    for (path, _), aval in zip(arguments, traced.jaxpr.in_avals, strict=True):
        own = tuple(str(key) for key in path[2:])
        same = [other for end, other in free if own and end == own and other.shape == aval.shape]
        if len(same) == 1 and same[0].dtype == aval.dtype and same[0].weak_type != aval.weak_type:
            name = jax.tree_util.keystr(path[1:])
            figures = {"name": name, "was_weak": bool(aval.weak_type)}
            yield TracedMistake("state-changed", hlo_dtype(aval.dtype.name), tuple(aval.shape), "", (), 1, figures)


def _ends(path: Any) -> set[tuple[str, ...]]:
    """Return the key path of a result's leaf, with and without its index in a tuple."""
    keys = tuple(str(key) for key in path)
    return {keys, keys[1:]} if path and isinstance(path[0], jax.tree_util.SequenceKey) else {keys}
