"""Rules that explain differences between planned and compiled collectives, each by an exact identity of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain

from meshwright.proof.verification.differences import Cause, Difference
from meshwright.record import PHASES

Key = tuple[str, tuple[str, ...], str]
"""Kind, axes and phase: collectives that share them are added up."""

Explained = Iterator[tuple[Key, Cause]]
"""Differences that a rule explains: the key of the collectives that differ, and the cause."""


def combined_sums(planned: Mapping[Key, int], found: Mapping[Key, int]) -> frozenset[Key]:
    """Return the keys of all-reduces that differ from the plan, in phases whose bytes over each axis are as planned.

    XLA:GPU and XLA:TPU sum the squares of a gradient's norm over all axes of a parameter at once. planned, found: bytes
    of the plan and of the program.
    """
    result: set[Key] = set()
    for phase in PHASES:
        keys = [key for key in dict.fromkeys((*planned, *found)) if (key[0], key[2]) == ("all-reduce", phase)]
        axes = {axis for key in keys for axis in key[1]}
        is_same = all(
            sum(planned.get(key, 0) - found.get(key, 0) for key in keys if axis in key[1]) == 0 for axis in axes
        )
        result.update(key for key in keys if is_same and planned.get(key, 0) != found.get(key, 0))
    return frozenset(result)


TILE_BYTES = 4 * 8 * 128
"""The smallest all-reduce between slices that the TPU compiler makes of small arrays, in bytes: a float32 tile."""

ROW_BYTES = 4 * 128
"""The smallest array that the TPU compiler sends between slices: a register row in float32."""


def explain(planned: Mapping[Key, int], found: Mapping[Key, int], mesh: Mapping[str, int]) -> dict[Key, Cause]:
    """Return the cause of each difference that one of these rules explains; figures are bytes.

    - Other phase: XLA runs a gather or a small sum in another phase; over all phases the bytes are as planned.
    - Padded shards: the TPU compiler scatters rows in whole tiles, then devices permute rows to their owners. With n
      devices, the permutes carry (n - 1) / n of the bytes added to the reduce-scatter.
    - Ring steps: a gather or a reduce-scatter becomes a ring of permutes between the parts of a matmul
      (arXiv:2211.05102, section 3.5), which carry (n - 1) / n of its bytes.
    - Within and between slices: an all-reduce over axes inside a slice and axes between slices becomes one of each
      kind; small sums share a tile.
    - Combined across phases: small sums of several phases, such as a loss and gradients of norms, become one over
      all their axes.
    - Sliced further: a reduce-scatter whose result is sliced by other axes becomes an all-reduce of equal bytes.
    - Register rows: arrays of a few numbers are padded to whole rows.

    Args:
      planned: bytes by kind, axes and phase.
      found: the compiled program's bytes, by the same keys.
      mesh: every axis and its degree.
    """
    difference = {key: found.get(key, 0) - planned.get(key, 0) for key in dict.fromkeys((*planned, *found))}
    causes: dict[Key, Cause] = {}
    explained = (
        _other_phase(difference),
        _padded_shards(difference, mesh),
        _ring_steps(difference, mesh),
        _sliced_further(difference),
        _combined_across_phases(difference),
        _within_and_between_slices(difference),
    )
    for key, cause in chain(*explained):
        if difference[key]:
            causes.setdefault(key, cause)
    for key, size in difference.items():
        if key[0] == "all-reduce" and key in planned and 0 < size < TILE_BYTES and found[key] % ROW_BYTES == 0:
            causes.setdefault(key, Cause(difference=Difference.REGISTER_ROWS))
    return causes


def _other_phase(difference: Mapping[Key, int]) -> Explained:
    """Explain collectives of one kind, over the same axes, whose bytes differ by phase but are equal over all phases.

    difference: bytes by key, the program's less the plan's, here and in the rules below.
    """
    for kind, axes in dict.fromkeys(key[:2] for key in difference):
        keys = [key for key in difference if key[:2] == (kind, axes)]
        if sum(difference[key] for key in keys) == 0:
            yield from ((key, Cause(difference=Difference.OTHER_PHASE)) for key in keys)


def _padded_shards(difference: Mapping[Key, int], mesh: Mapping[str, int]) -> Explained:
    """Explain reduce-scatters of padded shards, and the permutes that then move the shards.

    The program's reduce-scatters have more bytes than planned, and its permutes (n - 1) / n of that excess, with n
    devices along their axes. This is checked for each phase alone, and for all phases together. difference: bytes by
    key, the program's less the plan's.
    """
    for axes in dict.fromkeys(axes for kind, axes, _ in difference if kind == "reduce-scatter"):
        degree = math.prod(mesh[axis] for axis in axes)
        for phases in (*((phase,) for phase in PHASES), PHASES):
            more = [key for key in difference if key[1] == axes and key[2] in phases and difference[key] > 0]
            scatters, permutes = (
                [key for key in more if key[0] == kind] for kind in ("reduce-scatter", "collective-permute")
            )
            padding, sent = (sum(difference[key] for key in keys) for keys in (scatters, permutes))
            if padding and sent * degree == padding * (degree - 1):
                yield from ((key, Cause(difference=Difference.PADDED_SHARDS)) for key in scatters)
                yield from ((key, Cause(difference=Difference.PADDED_SHARDS_PERMUTED)) for key in permutes)


def _ring_steps(difference: Mapping[Key, int], mesh: Mapping[str, int]) -> Explained:
    """Explain all-gathers and reduce-scatters that the compiler replaced by the permutes of a ring.

    The program's gathers and scatters have fewer bytes than planned, and its permutes (n - 1) / n of what is missing,
    with n devices along their axes. This is checked for each phase alone, and for all phases together. difference:
    bytes by key, the program's less the plan's.
    """
    for axes in dict.fromkeys(axes for kind, axes, _ in difference if kind == "collective-permute"):
        degree = math.prod(mesh[axis] for axis in axes)
        for phases in (*((phase,) for phase in PHASES), PHASES):
            keys = [key for key in difference if key[1] == axes and key[2] in phases]
            permutes = [key for key in keys if key[0] == "collective-permute" and difference[key] > 0]
            others = [key for key in keys if key[0] in ("all-gather", "reduce-scatter") and difference[key]]
            lacking = -sum(difference[key] for key in others)
            if lacking > 0 and sum(difference[key] for key in permutes) * degree == lacking * (degree - 1):
                kinds = tuple(dict.fromkeys(key[0] for key in others))
                yield from ((key, Cause(difference=Difference.RING_STEPS, collectives=kinds)) for key in permutes)
                yield from ((key, Cause(difference=Difference.RING_REMAINDER)) for key in others)


def _sliced_further(difference: Mapping[Key, int]) -> Explained:
    """Explain all-reduces whose excess bytes equal the bytes that reduce-scatters over the same axes lack."""
    for key, more in difference.items():
        scatter: Key = ("reduce-scatter", *key[1:])
        if key[0] == "all-reduce" and more > 0 and difference.get(scatter) == -more:
            yield from ((each, Cause(difference=Difference.SLICED_FURTHER)) for each in (key, scatter))


def _within_and_between_slices(difference: Mapping[Key, int]) -> Explained:
    """Explain all-reduces that are split differently over sets of axes than planned.

    Over each axis, the program's all-reduces have the plan's bytes in total, or less than a tile (`TILE_BYTES`) more.
    """
    keys = [key for key in difference if key[0] == "all-reduce"]
    is_apart = any(difference[key] < 0 for key in keys if len(key[1]) > 1)
    axes = {axis for key in keys for axis in key[1]}
    more = [sum(difference[key] for key in keys if axis in key[1]) for axis in axes]
    if is_apart and all(0 <= size < TILE_BYTES for size in more):
        yield from ((key, Cause(difference=Difference.WITHIN_AND_BETWEEN_SLICES)) for key in keys)


def _combined_across_phases(difference: Mapping[Key, int]) -> Explained:
    """Explain all-reduces over other sets of axes and in other phases than planned, with equal total bytes per axis."""
    keys = [key for key in difference if key[0] == "all-reduce"]
    axes = {axis for key in keys for axis in key[1]}
    is_together = any(difference[key] > 0 for key in keys if len(key[1]) > 1)
    if is_together and all(sum(difference[key] for key in keys if axis in key[1]) == 0 for axis in axes):
        yield from ((key, Cause(difference=Difference.COMBINED_SUMS_ACROSS_PHASES)) for key in keys)
