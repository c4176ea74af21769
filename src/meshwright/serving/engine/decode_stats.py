"""Measured decode steps of an engine, compared with a plan for sequences of the same lengths on the same mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.description.step.serve import page_parts
from meshwright.description.step.serving import Serving, ServingLayout, cache_lanes
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.planning.cost.kv_cache import sequence_cache_bytes, token_cache_bytes
from meshwright.planning.serving.plan import planned_speed
from meshwright.serving.engine.settings import EngineLayout, EngineSettings
from meshwright.units import show_bytes, show_seconds


@dataclass
class DecodeStats:
    """Sums over decode steps that directly followed another step, and over sequences at their first token.

    Args:
        steps: number of these decode steps.
        seconds: time from reading the previous step's tokens to reading this step's, summed over these steps.
        sequences: number of sequences decoded, summed over these steps.
        cached: token capacity of the pages in use by these sequences, summed over these steps.
        firsts: number of sequences that have generated a first token.
        first_seconds: time from request to first token, summed over the sequences in `firsts`.
        prompt_tokens: prompt tokens, summed over the sequences in `firsts`.
        generated_tokens: generated tokens of all sequences.
    """

    steps: int = 0
    seconds: float = 0.0
    sequences: int = 0
    cached: int = 0
    firsts: int = 0
    first_seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def add_step(self, starts: Sequence[int], seconds: float, page_size: int) -> None:
        """Add a decode step that directly followed another step.

        Args:
            starts: for each sequence, the position of the token that the step processed.
            seconds: time from reading the previous step's tokens to reading this step's.
        """
        self.steps += 1
        self.seconds += seconds
        self.sequences += len(starts)
        self.cached += sum((start // page_size + 1) * page_size for start in starts)


class StepMeans(NamedTuple):
    """Means over decode steps, and the mean time to first token over sequences."""

    step_seconds: float  # Per step.
    batch: float  # Sequences per step.
    cache_bytes: float  # Per step: bytes of the sequences' pages, over all devices.
    first_token_seconds: float  # Per sequence, from request to first token.


def measured_and_planned(
    stats: DecodeStats, model: LoadedModel, settings: EngineSettings, engine: EngineLayout, layout: ServingLayout
) -> tuple[StepMeans, StepMeans] | None:
    """Return the measured means, and the means predicted for the same number and lengths of sequences.

    None if nothing was measured yet, or the planner has no prediction for this system.
    """
    if not stats.steps or not stats.firsts:
        return None
    prompt_len, output_len = (
        max(1, round(stats.prompt_tokens / stats.firsts)),
        max(1, round(stats.generated_tokens / stats.firsts)),
    )
    batch = stats.sequences / stats.steps
    planned_for = Serving(
        model=settings.with_slots(model.config),
        prompt_len=prompt_len, output_len=output_len, batch=math.ceil(batch),
        page_size=engine.page_size // page_parts(model.config, layout), compute_dtype=model.dtype,
        cache_lanes=cache_lanes(model.system.chip.kind),
        weight_dtype=settings.weight_dtype or model.dtype, kv_dtype=settings.kv_dtype or model.dtype,
    )  # fmt: skip
    speed = planned_speed(planned_for, layout, model.system, prompts=1, chunk=engine.chunks[0][1])
    if speed is None:
        return None
    planned = StepMeans(
        speed.step_seconds, speed.batch, sequence_cache_bytes(planned_for) * speed.batch, speed.first_token_seconds
    )
    cache = stats.cached / stats.steps * token_cache_bytes(planned_for)
    return StepMeans(stats.seconds / stats.steps, batch, cache, stats.first_seconds / stats.firsts), planned


def show_means(measured: StepMeans, planned: StepMeans) -> str:
    """Return the measured and predicted means as a line."""
    return (
        f"a step of decoding {show_seconds(measured.step_seconds)} (predicted: {show_seconds(planned.step_seconds)})"
        f" for {measured.batch:.1f} texts (predicted: {planned.batch:.0f}),"
        f" their cache {show_bytes(measured.cache_bytes)} (predicted: {show_bytes(planned.cache_bytes)}),"
        f" first tokens after {show_seconds(measured.first_token_seconds)}"
        f" (predicted, nothing waiting: {show_seconds(planned.first_token_seconds)})"
    )
