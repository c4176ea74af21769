"""A serving plan: model, system, mesh, batch and prediction."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.description.families.registry import serving_from_data
from meshwright.description.hardware.fabric import MeshPlacement, lay_mesh
from meshwright.description.hardware.system import System, parse_system
from meshwright.description.step.padding import padding_notes
from meshwright.description.step.serving import SERVING_RULES, CacheSplit, Serving, ServingLayout, check_serving
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.gpu_pool import pool_notes
from meshwright.planning.cost.rates.borrowed import borrowed_notes
from meshwright.planning.cost.serving_bytes import serving_memory
from meshwright.planning.cost.serving_seconds import moves_fewer_weights, serving_flops, serving_step
from meshwright.planning.files import has_fields, read_data, write_data
from meshwright.planning.plan import check_predicted, is_plan_file, predicted_again
from meshwright.record import Record, merge
from meshwright.support.field_types import from_data
from meshwright.support.notebook import card
from meshwright.units import show_bytes, show_seconds

FORMAT = 1
"""The version of the file format; other versions are refused."""


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """One phase of serving (prefill or decode) on a mesh of a system, with its batch and predicted record.

    cache: the dim of the KV cache that is split in addition to kv heads. predicted: its step_seconds are the time of
    one token of every sequence (decode), or of one batch of prompts or chunks (prefill); its tokens_per_second are over
    all devices. hardware_file, memory_headroom: as in `Plan`.
    """

    serving: Serving
    hardware: str
    mesh: MeshShape
    cache: CacheSplit
    predicted: Record
    hardware_file: str | None = None
    memory_headroom: float | None = None

    def __str__(self) -> str:
        """Format workload, layout and prediction in two lines."""
        serving, peak = self.serving, self.predicted.memory_bytes["peak"]
        answers = f" + {serving.output_len:,}" if serving.phase == "decode" else ""
        chunks = "" if serving.chunk is None else f" in chunks of {serving.chunk:,}"
        unit = "a token" if serving.phase == "decode" else "a batch" if serving.chunk is None else "a chunk"
        return (
            f"{serving.model.name} · {serving.phase} · {self.batch:,} × {serving.prompt_len:,}{answers} tokens{chunks}"
            f" · {self.hardware}\n{self.layout}   {show_seconds(self.seconds)} {unit}"
            f"   {self.tokens_per_second:,.0f} tok/s   {show_bytes(peak)} of"
            f" {show_bytes(self.system.usable_bytes)}" + ("" if self.predicted.fits else "   DOES NOT FIT")
        )

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the plan, and the terms of step time and memory."""
        title, answer = str(self).split("\n")
        return card(title, answer, self.predicted.tables(), self.predicted.notes)

    @property
    def system(self) -> System:
        """The system that `hardware` names, with the plan's memory headroom."""
        system = parse_system(self.hardware, hardware_file=self.hardware_file)
        return replace(system, memory_headroom=self.memory_headroom)

    @property
    def layout(self) -> ServingLayout:
        """The mesh, with the split of the KV cache."""
        return ServingLayout(self.mesh, self.cache)

    @property
    def batch(self) -> int:
        """The number of sequences served at once, over all devices."""
        assert self.serving.batch is not None
        return self.serving.batch

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.predicted.step_seconds or 0.0

    @property
    def tokens_per_second(self) -> float:
        """The predicted tokens per second of all devices together."""
        return self.predicted.tokens_per_second or 0.0

    @property
    def is_in_time(self) -> bool:
        """Whether a step takes no longer than the requested latency; True if none is requested."""
        return self.serving.latency_seconds is None or self.seconds <= self.serving.latency_seconds


def make_serving_plan(serving: Serving, layout: ServingLayout, system: System) -> ServingPlan:
    """Return the plan of a layout. Raises if `serving` has no batch, or if the layout cannot split the model."""
    if serving.batch is None:
        raise MeshwrightError(f"a plan to serve {serving.model.name} on {layout} needs a batch; none is given")
    check_serving(serving, layout)
    laid = lay_mesh(system, layout.mesh.layout)
    step = serving_step(serving, layout, serving.batch, laid)
    assert serving.batch is not None
    memory = serving_memory(serving, layout, serving.batch, laid)
    rate = serving_flops(serving, serving.batch) / step.seconds
    return ServingPlan(
        serving=serving,
        hardware=str(system),
        mesh=layout.mesh,
        cache=layout.cache,
        predicted=Record(
            origin="predicted",
            mesh=layout.mesh.degrees,
            hardware=str(system),
            step_seconds=step.seconds,
            mfu=rate / (system.peak(serving.compute_dtype) * layout.mesh.num_devices),
            memory_bytes=memory,
            fits=memory["peak"] <= system.plannable_bytes,
            bound=step.bound,
            tokens_per_second=step_tokens(serving, serving.batch) / step.seconds,
            breakdown_seconds=step.breakdown_seconds,
            collectives=merge(step.collectives),
            notes=laid.notes
            + padding_notes(serving.model, layout.mesh, SERVING_RULES)
            + borrowed_notes(system)
            + pool_notes(system, memory["peak"])
            + _format_notes(serving, layout, laid, step.seconds),
        ),
        hardware_file=system.chip.file,
        memory_headroom=system.memory_headroom,
    )


def _format_notes(serving: Serving, layout: ServingLayout, laid: MeshPlacement, seconds: float) -> tuple[str, ...]:
    """Return a note if a GPU's step with narrow weights is no faster than with whole ones, as converting takes long."""
    if laid.system.chip.kind != "gpu" or serving.weight_format is None or serving.batch is None:
        return ()
    dtype = serving.activation_dtype
    whole = replace(serving, weight_dtype=dtype, weight_group=None, has_weight_zeros=False)
    taken = serving_step(whole, layout, serving.batch, laid).seconds
    if seconds < 0.97 * taken:
        return ()
    return (
        f"{serving.weight_dtype} weights save memory on {laid.system.chip.name}, not time: with {dtype} a step would"
        f" take {show_seconds(taken)}",
    )


@dataclass(frozen=True)
class ServingSpeed:
    """Predicted speed of generation: seconds of prefill, seconds of a decode step, and sequences of a decode step."""

    first_token_seconds: float
    step_seconds: float
    batch: int


def planned_speed(
    texts: Serving, layout: ServingLayout, system: System, *, prompts: int, chunk: int | None = None
) -> ServingSpeed | None:
    """Return the predicted speed of generation; None if the layout cannot be planned.

    Args:
        texts: the decode workload; its batch is rounded up to a multiple of the layout's groups of devices.
        layout, system: where it runs.
        prompts: the number of prompts prefilled at once, rounded up in the same way.
        chunk: tokens of each prompt per prefill step; None for whole prompts.
    """

    def plan(serving: Serving, batch: int, layout: ServingLayout) -> ServingPlan:
        groups = layout.num_groups
        return make_serving_plan(replace(serving, batch=math.ceil(batch / groups) * groups), layout, system)

    assert texts.batch is not None
    chunk, of_prompts = None if chunk is None else min(chunk, texts.prompt_len), layout
    if chunk is None and layout.cache == "batch":
        gathers = moves_fewer_weights(texts.model, layout.mesh, prompts=prompts, length=texts.prompt_len)
        of_prompts = replace(layout, cache="batch" if gathers else "sequence")
    try:
        read = plan(replace(texts, phase="prefill", chunk=chunk), prompts, of_prompts)
        made = plan(texts, texts.batch, layout)
    except MeshwrightError:
        return None
    steps = 1 if chunk is None else math.ceil(texts.prompt_len / chunk)
    return ServingSpeed(steps * read.seconds, made.seconds, made.batch)


def step_tokens(serving: Serving, batch: int) -> int:
    """Return the tokens that a step processes: one of each sequence, whole prompts, or a chunk of each prompt."""
    return batch * serving.step_length


def serving_plan_to_data(plan: ServingPlan) -> dict[str, Any]:
    """Return the plan as plain data, for JSON or YAML."""
    return {
        "meshwright_serving_plan": FORMAT,
        "serving": asdict(plan.serving),
        "hardware": plan.hardware,
        "hardware_file": plan.hardware_file,
        "memory_headroom": plan.memory_headroom,
        "mesh": plan.mesh.degrees,
        "cache": plan.cache,
        "predicted": plan.predicted.to_json(),
    }


def serving_plan_from_data(data: Any, *, name: str) -> ServingPlan:
    """Return the plan in data from `serving_plan_to_data`, with a new prediction. name: the file's name, for errors."""
    if not has_fields(data) or data.get("meshwright_serving_plan") is not FORMAT:
        training = " but a plan to train" if has_fields(data) and "meshwright_plan" in data else ""
        raise MeshwrightError(
            f"{name} is not a serving plan of format {FORMAT}{training};"
            f" `meshwright plan … --serve decode -o {shlex.quote(name)}` writes one"
        )
    # The output of `plan --serve … --json` also has each candidate's gap to the best.
    own = {field: value for field, value in data.items() if field not in ("meshwright_serving_plan", "gap_to_best")}
    try:
        read = from_data(ServingPlan, own, readers={Serving: serving_from_data})
        check_predicted(read.predicted, read.mesh)
        made = make_serving_plan(read.serving, read.layout, read.system)
    except MeshwrightError as error:
        raise MeshwrightError(f"{name} is not a whole serving plan: {error}") from None
    return replace(made, predicted=predicted_again(made.predicted, read.predicted, name=name))


def write_serving_plan(plan: ServingPlan, path: Path) -> None:
    """Write the plan to a file, completely or not at all: as JSON if its name ends in `.json`, else as YAML."""
    write_data(serving_plan_to_data(plan), path)


def is_serving_plan_file(path: str | Path) -> bool:
    """Whether a path is a file that has a serving plan."""
    if not is_plan_file(path) or not Path(path).is_file():
        return False
    data = read_data(Path(path))
    return has_fields(data) and "meshwright_serving_plan" in data


def read_serving_plan(path: Path) -> ServingPlan:
    """Return the serving plan in a JSON or YAML file, with a new prediction. Raises if there is no file or no plan."""
    if not path.is_file():
        raise MeshwrightError(
            f"no serving plan {str(path)!r}; `meshwright plan … --serve decode -o {shlex.quote(str(path))}` writes one"
        )
    return serving_plan_from_data(read_data(path), name=str(path))
