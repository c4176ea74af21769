"""Which parameters of a workload train: all, except those frozen by a pattern or because of adapters."""

from __future__ import annotations

from functools import cache

from meshwright.description.step.model import Model
from meshwright.description.step.parameter_tree import is_adapter, leaves, parameters
from meshwright.description.step.patterns import check_patterns, matches
from meshwright.errors import MeshwrightError


@cache
def frozen_paths(model: Model, patterns: tuple[str, ...]) -> frozenset[str]:
    """Return the paths of frozen parameters: those a pattern matches and, in a model with adapters, all but adapters.

    Patterns are as in `step.patterns`.

    Raises:
        MeshwrightError: a pattern matches nothing, or the patterns leave nothing to train.
    """
    paths = tuple(path for path, _ in leaves(parameters(model)))
    has_adapters = any(map(is_adapter, paths))
    frozen = {path for path in paths if has_adapters and not is_adapter(path)}
    check_patterns("freeze", patterns, paths)
    frozen |= {path for path in paths if any(matches(pattern, path) for pattern in patterns)}
    if frozen.issuperset(paths):
        raise MeshwrightError(
            f"freeze {', '.join(map(repr, patterns))} leaves no parameter of {model.name} to train; leave one out"
        )
    return frozenset(frozen)
