"""Measured decode steps of an engine, beside a plan for sequences of the same lengths on the same mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.cost import sequence_cache_bytes, token_cache_bytes
from meshwright.hardware import System
from meshwright.planner.serving.plan import planned_speed
from meshwright.step import Serving, ServingLayout
from meshwright.units import show_bytes, show_seconds


@dataclass
class DecodeStats:
    """Sums over the decode steps that ran back to back, and over first tokens.

    Args:
        steps: decode steps without another step between them. seconds: from each one's tokens to the next one's.
        sequences: rows of these steps that held a sequence. cached: tokens of the pages of these sequences.
        firsts: sequences with a first token. first_seconds: from their requests to these.
        prompt_tokens: of these sequences. generated_tokens: of all sequences.
    """

    steps: int = 0
    seconds: float = 0.0
    sequences: int = 0
    cached: int = 0
    firsts: int = 0
    first_seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class StepMeans(NamedTuple):
    """Means of a decode step: seconds, sequences, bytes of their cache over all devices; seconds to first tokens."""

    step_seconds: float
    batch: float
    cache_bytes: float
    first_token_seconds: float


def measured_and_planned(
    stats: DecodeStats, serving: Serving, layout: ServingLayout, system: System, chunk: int
) -> tuple[StepMeans, StepMeans] | None:
    """The measured means, and those planned for as many sequences of these lengths; None before the first steps.

    Args:
        serving: the model and the dtypes that are served; lengths and batch are those measured.
        chunk: the tokens of a prompt that are read at once.
    """
    if not stats.steps or not stats.firsts:
        return None
    prompt_len, output_len = (
        max(1, round(stats.prompt_tokens / stats.firsts)),
        max(1, round(stats.generated_tokens / stats.firsts)),
    )
    batch = stats.sequences / stats.steps
    planned_for = replace(serving, prompt_len=prompt_len, output_len=output_len, batch=math.ceil(batch))
    speed = planned_speed(planned_for, layout, system, prompts=1, chunk=chunk)
    if speed is None:
        return None
    planned = StepMeans(
        speed.step_seconds, speed.batch, sequence_cache_bytes(planned_for) * speed.batch, speed.first_token_seconds
    )
    cache = stats.cached / stats.steps * token_cache_bytes(planned_for)
    return StepMeans(stats.seconds / stats.steps, batch, cache, stats.first_seconds / stats.firsts), planned


def show_means(measured: StepMeans, planned: StepMeans) -> str:
    """Both in a line."""
    return (
        f"a step of decoding {show_seconds(measured.step_seconds)} (plan: {show_seconds(planned.step_seconds)})"
        f" for {measured.batch:.1f} texts (plan: {planned.batch:.0f}),"
        f" their cache {show_bytes(measured.cache_bytes)} (plan: {show_bytes(planned.cache_bytes)}),"
        f" first tokens after {show_seconds(measured.first_token_seconds)}"
        f" (plan, nothing waiting: {show_seconds(planned.first_token_seconds)})"
    )
