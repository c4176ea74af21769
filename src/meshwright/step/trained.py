"""Which parameters of a workload train: all but those that are frozen by a pattern, or by the adapters beside them."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from functools import cache

from meshwright.errors import MeshwrightError
from meshwright.step.model import Model
from meshwright.step.parameter_tree import is_adapter, leaves, parameters


@cache
def frozen_paths(model: Model, patterns: tuple[str, ...]) -> frozenset[str]:
    """The paths of the parameters that get no gradient: those that a pattern matches, and all but adapters beside any.

    A pattern is a path as `layers.query`, one with wildcards as `layers.*_norm`, or a part of the tree as `layers`.

    Raises:
        MeshwrightError: a pattern that matches nothing, or patterns that leave nothing to train.
    """
    paths = tuple(path for path, _ in leaves(parameters(model)))
    has_adapters = any(map(is_adapter, paths))
    frozen = {path for path in paths if has_adapters and not is_adapter(path)}
    for pattern in patterns:
        found = {path for path in paths if fnmatchcase(path, pattern) or path.startswith(f"{pattern}.")}
        if not found:
            near = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise MeshwrightError(
                f"frozen {pattern!r} matches no parameter of {model.name}; {hint}patterns are paths, as 'embedding',"
                f" 'layers.query' or 'layers.*_norm'"
            )
        frozen |= found
    if frozen.issuperset(paths):
        raise MeshwrightError(
            f"frozen {', '.join(map(repr, patterns))} leaves no parameter of {model.name} to train; leave one out"
        )
    return frozenset(frozen)
