"""How fast an engine is, beside what a plan of the same texts on the same mesh says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.cost import sequence_cache_bytes, token_cache_bytes
from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.planner.serving.plan import make_serving_plan
from meshwright.step import SERVING_RULES, Serving, ServingLayout, ServingPhase
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
    batch, groups = pace.texts / pace.steps, layout.mesh.degree(SERVING_RULES["batch"])

    def plan(phase: ServingPhase, batch: float, prompt_len: int) -> Serving:
        return Serving(
            model=serving.model, phase=phase, prompt_len=prompt_len, output_len=made,
            batch=math.ceil(batch / groups) * groups, weight_dtype=serving.weight_dtype, kv_dtype=serving.kv_dtype,
            compute_dtype=serving.compute_dtype, page_size=serving.page_size,
        )  # fmt: skip

    decode = plan("decode", batch, prompt_len)
    try:
        step_seconds = make_serving_plan(decode, layout, system).seconds
        chunks = math.ceil(prompt_len / chunk)
        read = make_serving_plan(plan("prefill", 1, min(chunk, prompt_len)), layout, system).seconds
    except MeshwrightError:
        return None
    assert decode.batch is not None
    planned = Means(step_seconds, decode.batch, sequence_cache_bytes(decode) * decode.batch, chunks * read)
    cache = pace.cached / pace.steps * token_cache_bytes(decode)
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
