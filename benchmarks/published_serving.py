"""Published measurements of serving, and of single layers, in the planner's words: measured and predicted seconds."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from published_rows import Row, read_setting, read_system, row_model

from meshwright.description.hardware.system import System
from meshwright.description.step.serving import CacheSplit, Serving, ServingLayout
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape, divisors
from meshwright.planning.prediction import predict
from meshwright.planning.serving.plan import ServingPlan, make_serving_plan

SPLITS: tuple[CacheSplit, ...] = ("heads", "batch", "sequence")


class Timed(NamedTuple):
    """What a row measured and what is predicted for it, in seconds, and the predicted peak memory."""

    measured: float
    predicted: float
    peak_bytes: int
    fits: bool


def time_serving(row: Row) -> Timed:
    """The seconds of a row: of a decode step, of a prompt with its answer, or of an output token under load."""
    system, measured, batch = read_system(row), row["measured"], row["global_batch_sequences"]
    kind = row["kind"]
    if kind == "inference_decode":
        plan = _fastest(row, system, _serving(row, "decode", row["seq_len"] - 1, 1, batch))
        return _timed(plan, measured["ms_per_decode_step"] / 1e3, plan.seconds)
    if kind == "inference_e2e":
        count = int(_number(row, r"(\d+) generated"))
        made = _fastest(row, system, _serving(row, "decode", row["seq_len"], count, batch))
        read = _fastest(row, system, _serving(row, "prefill", row["seq_len"], 1, batch))
        return _timed(made, measured["total_ms"] / 1e3, read.seconds + count * made.seconds)
    if kind == "inference_serving":
        prompt, answer = int(_number(row, r"(\d+) in")), int(_number(row, r"(\d+) out"))
        made = _fastest(row, system, _serving(row, "decode", prompt, answer // 2, batch))
        read = _fastest(row, system, _serving(row, "prefill", prompt, 1, 1))
        # Between two tokens of all sequences, as many prompts are read as answers end.
        between = made.seconds + batch / answer * read.seconds
        return _timed(made, batch / measured["output_tokens_per_s"], between)
    raise MeshwrightError(f"{kind} is not planned yet")


def time_layer(row: Row) -> Timed:
    """The seconds of one layer, forward and backward: what a second layer adds to a step."""
    setting = read_setting(row)
    first, second = (
        predict(
            replace(setting.workload, model=replace(setting.workload.model, num_layers=count)),
            setting.mesh,
            setting.system,
            setting.strategy,
        )
        for count in (1, 2)
    )
    names = ("forward", "recompute", "backward", "exposed communication")
    added = sum(second.breakdown_seconds[name] - first.breakdown_seconds[name] for name in names)
    return Timed(row["measured"]["combined_ms"] / 1e3, added, first.memory_bytes["peak"], bool(first.fits))


def _timed(plan: ServingPlan, measured: float, predicted: float) -> Timed:
    return Timed(measured, predicted, plan.predicted.memory_bytes["peak"], bool(plan.predicted.fits))


def _serving(row: Row, phase: str, prompt_len: int, output_len: int, batch: int) -> Serving:
    """The texts of a row; `int8 weights + int8 KV cache` says what is stored narrow."""
    words = row["dtype"].lower()
    narrow = {f"{name}_dtype": "int8" for name, text in (("weight", "int8 weight"), ("kv", "int8 kv")) if text in words}
    return Serving(
        model=row_model(row["model"]),
        phase=phase,
        prompt_len=prompt_len,
        output_len=output_len,
        batch=batch,
        **narrow,  # type: ignore[arg-type]
    )


def _fastest(row: Row, system: System, serving: Serving) -> ServingPlan:
    """The fastest layout of a row: what it calls tensor parallel is tp as far as the heads go, else sp."""
    said = row["parallelism"]
    dp, inner = said.get("dp") or 1, said.get("tp") or 1
    plans, error = [], None
    for sp in divisors(inner):
        for cache in SPLITS:
            layout = ServingLayout(MeshShape(dp=dp, sp=sp, tp=inner // sp), cache)
            try:
                plans.append(make_serving_plan(serving, layout, system))
            except MeshwrightError as raised:
                error = raised
    if not plans:
        raise error or MeshwrightError("no layout")
    return min(plans, key=lambda plan: plan.seconds)


def _number(row: Row, pattern: str) -> float:
    """A number in a row's notes."""
    found = re.search(pattern, row["notes"])
    if not found:
        raise MeshwrightError(f"its notes do not say {pattern!r}")
    return float(found[1])
