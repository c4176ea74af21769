"""How fast an engine is, beside what a plan of the same texts on the same mesh says."""

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
class Pace:
    """Sums over the steps of decoding that nothing came between, and over first tokens.

    Args:
        steps: of decoding. seconds: that they took, from the tokens of one to those of the next. texts: in them.
        cached: tokens of the pages of these texts.
        firsts: texts with a first token. first_seconds: until these, from when their requests came.
        prompt_tokens: of these texts. made: tokens made of all texts.
    """

    steps: int = 0
    seconds: float = 0.0
    texts: int = 0
    cached: int = 0
    firsts: int = 0
    first_seconds: float = 0.0
    prompt_tokens: int = 0
    made: int = 0


class Means(NamedTuple):
    """A step's seconds, its texts, the bytes of their cache over all devices, and the seconds until first tokens."""

    step_seconds: float
    batch: float
    cache_bytes: float
    first_token_seconds: float


def measured_and_planned(
    pace: Pace, serving: Serving, layout: ServingLayout, system: System, chunk: int
) -> tuple[Means, Means] | None:
    """The means measured, and those planned for as many texts as long; None before there is anything to compare.

    Args:
        serving: the model and the dtypes that are served; lengths and batch are those measured.
        chunk: the tokens of a prompt that are read at once.
    """
    if not pace.steps or not pace.firsts:
        return None
    prompt_len, made = max(1, round(pace.prompt_tokens / pace.firsts)), max(1, round(pace.made / pace.firsts))
    batch = pace.texts / pace.steps
    texts = replace(serving, prompt_len=prompt_len, output_len=made, batch=math.ceil(batch))
    speed = planned_speed(texts, layout, system, prompts=1, chunk=chunk)
    if speed is None:
        return None
    planned = Means(
        speed.step_seconds, speed.batch, sequence_cache_bytes(texts) * speed.batch, speed.first_token_seconds
    )
    cache = pace.cached / pace.steps * token_cache_bytes(texts)
    return Means(pace.seconds / pace.steps, batch, cache, pace.first_seconds / pace.firsts), planned


def show_means(measured: Means, planned: Means) -> str:
    """Both in a line."""
    return (
        f"a step of decoding {show_seconds(measured.step_seconds)} (plan: {show_seconds(planned.step_seconds)})"
        f" for {measured.batch:.1f} texts (plan: {planned.batch:.0f}),"
        f" their cache {show_bytes(measured.cache_bytes)} (plan: {show_bytes(planned.cache_bytes)}),"
        f" first tokens after {show_seconds(measured.first_token_seconds)}"
        f" (plan, nothing waiting: {show_seconds(planned.first_token_seconds)})"
    )
