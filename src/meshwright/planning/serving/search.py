"""Search for the best layout and batch to serve a model on a system, and the frontier of latency and throughput."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.description.hardware.fabric import MeshPlacement, lay_mesh
from meshwright.description.hardware.system import System
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.serving import (
    CACHE_SPLITS,
    CacheSplit,
    Serving,
    ServingLayout,
    ServingPhase,
    cache_axes,
    can_gather_weights,
    check_serving,
)
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.options.values import MeshLike, read_mesh
from meshwright.planning.cost.serving_bytes import most_sequences
from meshwright.planning.cost.serving_seconds import serving_step
from meshwright.planning.options import read_serving
from meshwright.planning.serving.plan import ServingPlan, make_serving_plan, step_tokens
from meshwright.planning.space import factorings

AXES = ("dp", "ep", "fsdp", "sp", "tp")
"""The mesh axes of a server; ep only for models with experts."""

MOST_SEQUENCES = 1 << 17
"""The largest number of sequences per group of devices that a search tries."""


@dataclass(frozen=True)
class ServingPoint:
    """A layout with a batch: the predicted seconds of a step, and the tokens per second of all devices together."""

    layout: ServingLayout
    batch: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class ServingRanking:
    """The plans of all legal layouts, each at its best batch, and the frontier of latency and throughput.

    candidates: first the plans that fit in memory and meet the latency, by throughput if a latency is requested, else
    by step time; then those that miss the latency, by step time; then those that do not fit, by memory. frontier: the
    fitting points that are Pareto-optimal in step time and throughput, by step time. num_layouts: the number of layouts
    tried, legal or not.
    """

    candidates: tuple[ServingPlan, ...]
    frontier: tuple[ServingPoint, ...]
    num_layouts: int

    @property
    def num_fit(self) -> int:
        """The number of candidates that fit in memory."""
        return sum(bool(plan.predicted.fits) for plan in self.candidates)


def rank_serving(serving: Serving, system: System, mesh: MeshShape | None = None) -> ServingRanking:
    """Return the plans of every legal layout (of one mesh, if given), each at its best batch. Raises if none is legal.

    A group is the devices that together hold the cache of a sequence (`ServingLayout.num_groups`). If neither a batch
    nor a latency is requested, the best batch is one sequence for each group: the shortest step. With a latency, it is
    the largest batch that fits and meets it, because throughput grows with the batch, rounded down so that all groups
    have equally many sequences. The ranking's frontier of latency and throughput has these batches, and every power of
    two of sequences for each group that fits.
    """
    system.peak(serving.compute_dtype)  # Raise for a dtype without a peak before the search.
    legal, num_layouts = _legal(serving, [mesh] if mesh else serving_meshes(serving, system.num_devices))
    chosen: list[ServingPlan] = []
    points: list[ServingPoint] = []
    for layout in legal:
        batches = _Batches(serving, layout, system)
        best = batches.best_sequences()
        chosen.append(batches.plan(best))
        points += [
            batches.point(sequences) for sequences in {*batches.frontier_sequences(), best} if batches.fits(sequences)
        ]
    return ServingRanking(tuple(sorted(chosen, key=_order)), pareto(points), num_layouts)


def best_serving_plan(
    model: str | Path | ModelConfig,
    phase: ServingPhase,
    options: Mapping[str, Any],
    *,
    mesh: MeshLike | None = None,
    cache: CacheSplit | None = None,
) -> ServingPlan:
    """Return the best plan to serve a model; options: as in `read_serving`.

    mesh, cache: consider only this mesh, only this split of the KV cache.

    Raises:
        MeshwrightError: no layout is legal, or the cache cannot be split as requested.
    """
    serving, system = read_serving(model, phase, options)
    shape = None if mesh is None else read_mesh(mesh, system.num_devices)
    candidates = rank_serving(serving, system, shape).candidates
    found = next((plan for plan in candidates if cache in (None, plan.cache)), None)
    if found is None:
        splits = ", ".join(dict.fromkeys(plan.cache for plan in candidates))
        raise MeshwrightError(f"cache is {cache!r}, which splits nothing on {mesh or system}; it can be {splits}")
    return found


def pareto(points: list[ServingPoint]) -> tuple[ServingPoint, ...]:
    """Return the points that are Pareto-optimal in step time and throughput, sorted by step time."""
    frontier: list[ServingPoint] = []
    for point in sorted(points, key=lambda point: (point.seconds, -point.tokens_per_second)):
        if not frontier or point.tokens_per_second > frontier[-1].tokens_per_second:
            frontier.append(point)
    return tuple(frontier)


def best_prefill(serving: Serving, system: System) -> ServingPlan | None:
    """Return the fastest plan to prefill one prompt per group of devices at a time; None if no plan fits."""
    alone = replace(serving, phase="prefill", batch=None, latency_seconds=None)
    plans = [_Batches(alone, layout, system) for layout in _legal(alone, serving_meshes(alone, system.num_devices))[0]]
    points = [(batches.point(1), batches) for batches in plans if batches.fits(1)]
    if not points:
        return None
    return max(points, key=lambda found: found[0].tokens_per_second)[1].plan(1)


def serving_meshes(serving: Serving, num_devices: int) -> Iterator[MeshShape]:
    """Yield the meshes of `num_devices` devices that are worth trying for a server.

    In a server sp splits heads too, not sequences: tp splits kv heads, and sp the query heads of each kv head. Kv heads
    are split first (scaling book, inference): sp gets no factor that tp could take. sp is 1 if every query head has its
    own kv head. tp is at most the number of kv heads: a larger tp would copy kv heads, and sp splits their query heads
    without copies.
    """
    sizes = {
        name: size
        for _, parameter in leaves(parameters(serving.model))
        for name, size in zip(parameter.axes, parameter.shape, strict=True)
    }
    axes = [axis for axis in AXES if axis != "ep" or "expert" in sizes]
    for degrees in factorings(num_devices, len(axes)):
        mesh = MeshShape(**dict(zip(axes, degrees, strict=True)))
        heads_left = sizes["kv_heads"] // math.gcd(sizes["kv_heads"], mesh.tp)
        if mesh.tp > sizes["kv_heads"]:
            continue
        if mesh.sp == 1 or (sizes["group"] > 1 and math.gcd(heads_left, mesh.sp) == 1):
            yield mesh


def serving_layouts(serving: Serving, mesh: MeshShape) -> tuple[ServingLayout, ...]:
    """Return the layouts of a mesh, one for each split of the KV cache.

    Of whole prompts keys and values stay with their tokens: one layout, and one that gathers weights.
    """
    splits = CACHE_SPLITS if mesh.degree(cache_axes(serving.model)) > 1 else CACHE_SPLITS[:1]
    if not serving.is_paged:
        splits = splits[1:] if can_gather_weights(serving.model, mesh) else splits[-1:]
    return tuple(ServingLayout(mesh, split) for split in splits)


def _legal(serving: Serving, shapes: Iterable[MeshShape]) -> tuple[list[ServingLayout], int]:
    """Return (legal layouts of some meshes, number of layouts tried). Raises if none is legal."""
    layouts = [layout for mesh in shapes for layout in serving_layouts(serving, mesh)]
    found: list[ServingLayout] = []
    refusals: list[str] = []
    for layout in layouts:
        try:
            check_serving(serving, layout)
        except MeshwrightError as error:
            refusals.append(f"{layout}: {error}")
        else:
            found.append(layout)
    if not found:
        raise MeshwrightError(
            f"none of {len(layouts)} layouts can serve {serving.model.name} on {layouts[0].mesh.num_devices} devices;"
            f" for one, {refusals[0]}"
        )
    return found, len(layouts)


@dataclass(frozen=True)
class _Batches:
    """The predicted step times of a layout on a system, at any batch.

    Batches are sequences per group of devices; each group has a copy of the weights.
    """

    serving: Serving
    layout: ServingLayout
    system: System

    @functools.cached_property
    def laid(self) -> MeshPlacement:
        """The mesh laid over the system."""
        return lay_mesh(self.system, self.layout.mesh.layout)

    @functools.cached_property
    def most(self) -> int:
        """The largest number of sequences per group that fits in memory."""
        return most_sequences(self.serving, self.layout, self.system.plannable_bytes, MOST_SEQUENCES, self.laid)

    @functools.cached_property
    def _known(self) -> dict[int, float]:
        """Seconds of the steps predicted so far, by sequences per group."""
        return {}

    def seconds(self, sequences: int) -> float:
        """Return the seconds of a step with `sequences` sequences per group."""
        if sequences not in self._known:
            batch = sequences * self.layout.num_groups
            step = serving_step(self.serving, self.layout, batch, self.laid)
            self._known[sequences] = step.seconds
        return self._known[sequences]

    def fits(self, sequences: int) -> bool:
        """Whether `sequences` sequences per group fit in memory."""
        return 1 <= sequences <= self.most

    def best_sequences(self) -> int:
        """Return the number of sequences per group with which the layout is compared to others.

        It is the requested batch's, else the best for the requested latency (`rank_serving`). It is one if neither is
        requested, or if no batch meets the latency.
        """
        if self.serving.batch is not None:
            return self.serving.batch // self.layout.num_groups
        limit = self.serving.latency_seconds
        if limit is None:
            return 1
        most = self._last_in_time(limit)
        # If the cache is split by batch, a step is as slow with one sequence as with one on each of `split` devices.
        split = self.layout.mesh.degree(cache_axes(self.serving.model)) if self.layout.cache == "batch" else 1
        return max(
            (max(most, 1), most // split * split or 1), key=lambda sequences: sequences / self.seconds(sequences)
        )

    def _last_in_time(self, limit: float) -> int:
        """Return the most sequences per group that fit and take at most `limit` seconds; 0 if even one takes longer.

        Step time is nearly linear in the batch, so interpolation search finds the number in a few steps.
        """
        low, high = 0, 1
        while high <= self.most and self.seconds(high) <= limit:
            low, high = high, 2 * high
        if high > self.most:
            if low == 0 or self.seconds(self.most) <= limit:
                return self.most
            high = self.most
        guesses = itertools.cycle((True, False))
        while high - low > 1:
            on_line = (limit - self.seconds(low)) / (self.seconds(high) - self.seconds(low)) if low else 0.5
            middle = low + int((on_line if next(guesses) else 0.5) * (high - low))
            for tried in (middle, middle + 1):
                if low < tried < high:
                    low, high = (tried, high) if self.seconds(tried) <= limit else (low, tried)
        return low

    def frontier_sequences(self) -> Iterator[int]:
        """Yield the sequences per group to try for the frontier: powers of two, and the most that fit.

        Yield nothing if the batch is fixed.
        """
        if self.serving.batch is None:
            yield from (1 << power for power in range(self.most.bit_length()))
            yield self.most

    def point(self, sequences: int) -> ServingPoint:
        """Return the point of the frontier for a number of sequences per group."""
        batch, seconds = sequences * self.layout.num_groups, self.seconds(sequences)
        return ServingPoint(self.layout, batch, seconds, step_tokens(self.serving, batch) / seconds)

    def plan(self, sequences: int) -> ServingPlan:
        """Return the plan for a number of sequences per group."""
        filled = replace(self.serving, batch=sequences * self.layout.num_groups)
        return make_serving_plan(filled, self.layout, self.system)


def _order(plan: ServingPlan) -> tuple[int, float, float]:
    """Return the sort key of `ServingRanking.candidates`; plans that are equally good are sorted by memory."""
    peak = plan.predicted.memory_bytes["peak"]
    if not plan.predicted.fits:
        return 2, peak, plan.seconds
    if not plan.is_in_time:
        return 1, plan.seconds, peak
    return 0, -plan.tokens_per_second if plan.serving.latency_seconds else plan.seconds, peak
