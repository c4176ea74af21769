"""Assign the physical axes of a torus to mesh axes: whole physical axes if possible, else factors of them.

Mirrors `jax.experimental.mesh_utils.create_device_mesh` (JAX 0.10.2), so that plans are for the mesh that JAX makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

Part = tuple[int, ...]
"""For each physical axis, the factor of its size that one mesh axis uses; 1 if it does not use that axis."""


def assign(sizes: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[list[Part], bool]:
    """Return the `Part` of each mesh axis, in the order of `degrees`, and whether mesh axes share a physical axis.

    Args:
        sizes: chips along each physical axis.
        degrees: degrees of the mesh axes, outermost first; their product is that of `sizes`.
    """
    inner_first = degrees[::-1]
    whole = _whole_axes(sizes, inner_first)
    if whole is not None:
        return whole[::-1], False
    # Degrees and sizes have the same prime factors, so any choice leaves enough for the other degrees.
    left, parts = sizes, list[Part]()
    for degree in inner_first:
        best = max(_factors(left, degree), key=lambda part: _preference(part, sizes, left))
        left = tuple(size // taken for size, taken in zip(left, best, strict=True))
        parts.append(best)
    return parts[::-1], True


def _whole_axes(sizes: tuple[int, ...], degrees: tuple[int, ...]) -> list[Part] | None:
    """Return, for each degree, a `Part` that uses whole physical axes only, and as many of them as possible.

    None if for some degree no set of unused axes has that product.
    """
    free, parts = set(range(len(sizes))), []
    for degree in degrees:
        sets = (some for count in range(len(free), 0, -1) for some in combinations(sorted(free), count))
        fitting = (some for some in sets if math.prod(sizes[axis] for axis in some) == degree)
        taken = () if degree == 1 else next(fitting, None)
        if taken is None:
            return None
        free -= set(taken)
        parts.append(tuple(size if axis in taken else 1 for axis, size in enumerate(sizes)))
    return parts


def _preference(part: Part, sizes: tuple[int, ...], left: tuple[int, ...]) -> tuple[int, int, int, Part]:
    """Return the sort key by which JAX chooses a part; larger keys are preferred.

    In this order: devices along whole axes, number of whole axes, devices along axes that other mesh axes use already,
    the part itself. left: for each physical axis, the factor of its size that no mesh axis uses yet.
    """
    whole = [taken for taken, size in zip(part, sizes, strict=True) if taken == size > 1]
    shared = [taken for taken, size, rest in zip(part, sizes, left, strict=True) if rest < size]
    return math.prod(whole), len(whole), math.prod(shared), part


def _factors(sizes: tuple[int, ...], degree: int) -> Iterator[Part]:
    """Yield every part whose product is `degree`: one divisor of each size."""
    if not sizes:
        if degree == 1:
            yield ()
        return
    for taken in range(1, math.gcd(sizes[0], degree) + 1):
        if sizes[0] % taken == 0 and degree % taken == 0:
            for rest in _factors(sizes[1:], degree // taken):
                yield (taken, *rest)
