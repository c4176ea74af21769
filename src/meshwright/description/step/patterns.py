"""Select parameters by patterns of their paths: `layers.query`, `query`, `layers`, `*norm*`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from meshwright.errors import MeshwrightError, did_you_mean


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a parameter's whole path, the last name in it, or its first names.

    `*` matches any characters, `?` one. Paths are those of `leaves(parameters(model))`.

    >>> [matches(pattern, "layers.mlp_norm") for pattern in ("layers.mlp_norm", "mlp_norm", "layers", "*norm*", "mlp")]
    [True, True, True, True, False]
    """
    return any(fnmatchcase(part, pattern) for part in (path, path.rpartition(".")[2], path.partition(".")[0]))


def check_patterns(what: str, patterns: Iterable[str], paths: Iterable[str]) -> None:
    """Raise if a pattern matches no parameter, suggesting the nearest name.

    Args:
        what: name of the option, for the error.
    """
    known = tuple(paths)
    for pattern in patterns:
        if not any(matches(pattern, path) for path in known):
            names = sorted(
                {*known, *(path.rpartition(".")[2] for path in known), *(p.partition(".")[0] for p in known)}
            )
            hint = did_you_mean(difflib.get_close_matches(pattern.strip("*"), names, n=1, cutoff=0.4))
            raise MeshwrightError(
                f"{what} is {pattern!r}, which names no parameter of the model; {hint}its parameters are"
                f" {', '.join(known)}"
            )
