"""Read and write settings of MaxText: axes within a slice (ici) and across slices (dcn), batch, pipelines, remat."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshwright.description.frameworks.framework import load_framework
from meshwright.description.hardware.system import System
from meshwright.description.step.strategy import XLA
from meshwright.errors import MeshwrightError
from meshwright.mesh import LAYOUT, OTHERS_AXES
from meshwright.planning.exchange.settings import Settings

OURS = {
    axis: OTHERS_AXES.get(axis, axis).partition(",")[0]
    for axis in ("data", "fsdp", "fsdp_transpose", "tensor", "tensor_sequence", "context", "expert", "pipeline")
}
"""The mesh axis for each MaxText axis of a train step. Degrees that map to one axis are multiplied."""

_NOTES = {
    "fsdp_transpose": ", planned with weights along the embedding; MaxText splits them along the mlp too",
    "tensor": ", planned with the stream split along the sequence; MaxText splits its width, the same bytes",
}


def read(settings: Settings) -> None:
    """Set the fields of the mesh, the batch and the remat policy from the options."""
    # The axes that cross slices must be the outermost ones of `LAYOUT`.
    system = settings.system
    ici = _degrees(settings, "ici", system.num_devices // system.num_slices, "fsdp")
    dcn = _degrees(settings, "dcn", system.num_slices, "data")
    for ours in OURS.values():
        settings.fields[ours] = math.prod(ici[axis] * dcn[axis] for axis in OURS if OURS[axis] == ours)
    crossing = {axis: math.prod(dcn[name] for name in OURS if OURS[name] == axis) for axis in LAYOUT}
    if crossing != (here := _across(settings.fields, system.num_slices)):
        axis = next(axis for axis in LAYOUT if crossing[axis] != here[axis])
        raise MeshwrightError(
            f"MaxText: {axis} crosses {crossing[axis]} slices; here the outermost of {', '.join(LAYOUT)} cross them,"
            f" with this mesh {', '.join(f'{name} {degree}' for name, degree in here.items() if degree > 1)}"
        )
    _read_batch(settings)
    _read_saved(settings)
    if "enable_dropout" in settings.left and not settings.flag("enable_dropout"):
        settings.fields["dropout"] = 0.0
        settings.means("enable_dropout", False, "dropout=0")
    settings.fields["tp_stream"] = "split"
    option = "shard_optimizer_over_data"
    if option in settings.left and settings.flag(option):
        fields = settings.fields
        if fields["fsdp"] > 1:
            raise settings.refusal(option, "beside an fsdp axis: here optimizer state is split over fsdp alone")
        fields |= {"fsdp": fields["dp"], "dp": 1, "zero_stage": 1}
        settings.means(option, True, f"fsdp={fields['fsdp']}, zero_stage=1 instead of dp")


def _degrees(settings: Settings, kind: str, total: int, inferred: str) -> dict[str, int]:
    """Return the degrees of all MaxText axes of a kind (`ici` or `dcn`), with -1 replaced by its value.

    total: the product of the degrees. inferred: the axis whose degree is -1 if the file does not set it.
    """
    names = {axis: f"{kind}_{axis}_parallelism" for axis in OURS}
    typed = {axis: settings.left.get(name) for axis, name in names.items()}
    degrees = {axis: settings.whole(name, -1 if axis == inferred else 1) for axis, name in names.items()}
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise settings.refusal(names[open_axes[0]], f"is -1, and {names[open_axes[1]]} too; only one can be inferred")
    known = math.prod(degree for degree in degrees.values() if degree != -1)
    if open_axes:
        degrees[open_axes[0]] = settings.quotient(f"degrees of {kind} axes", total, known)
    elif known != total:
        what = "devices of a slice" if kind == "ici" else "slices"
        raise MeshwrightError(f"MaxText: the {kind} degrees multiply to {known}; {settings.system} has {total} {what}")
    for axis, name in names.items():
        if typed[axis] is not None:
            settings.means(
                name, typed[axis], f"{OURS[axis]}={degrees[axis]}{_NOTES.get(axis, '') * (degrees[axis] > 1)}"
            )
    return degrees


def _across(degrees: dict[str, int], num_slices: int) -> dict[str, int]:
    """Return, by axis, the factor of its degree that crosses slices; the outermost axes of `LAYOUT` cross first."""
    left, found = num_slices, dict[str, int]()
    for axis in LAYOUT:
        found[axis] = math.gcd(degrees[axis], left)
        left //= found[axis]
    return found


def _read_batch(settings: Settings) -> None:
    """Set the fields of the batch, the microbatches and the pipeline's schedule from the options."""
    fields, devices = settings.fields, settings.system.num_devices
    typed = settings.left.get("per_device_batch_size", 12.0)
    batch = settings.number("per_device_batch_size", 12.0) * devices
    if abs(batch - round(batch)) > 1e-6 or batch < 1:
        raise settings.refusal(
            "per_device_batch_size", f"is {typed}, {batch:g} sequences on {devices} devices; use whole"
        )
    accumulated = settings.whole("gradient_accumulation_steps", 1)
    fields["batch"], fields["num_microbatches"] = round(batch) * accumulated, accumulated
    settings.means("per_device_batch_size", typed, f"batch={fields['batch']}")
    if accumulated > 1:
        settings.means("gradient_accumulation_steps", accumulated, f"num_microbatches={accumulated}")
    microbatches, per_stage = (
        settings.whole("num_pipeline_microbatches", -1),
        settings.whole("num_layers_per_pipeline_stage", 1),
    )
    repeats, stages = settings.whole("num_pipeline_repeats", -1), fields["pp"]
    if settings.flag("pipeline_delay_activation_forwarding"):
        raise settings.refusal("pipeline_delay_activation_forwarding", "is on; stages here send at once")
    if stages == 1:
        return
    if accumulated > 1:
        raise settings.refusal(
            "gradient_accumulation_steps", f"is {accumulated} beside a pipeline; here it is one number"
        )
    if settings.model is None:
        raise MeshwrightError("MaxText: a pipeline needs the number of layers")
    virtual = settings.quotient("layers of a pipeline stage", settings.model.num_layers, stages * per_stage)
    if repeats not in (-1, virtual):
        raise settings.refusal("num_pipeline_repeats", f"is {repeats}; the layers make {virtual}")
    fields |= {"schedule": "gpipe", "virtual_stages": virtual}
    fields["num_microbatches"] = stages if microbatches == -1 else microbatches
    settings.means("num_layers_per_pipeline_stage", per_stage, f"virtual_stages={virtual}, schedule=gpipe")
    settings.means("num_pipeline_microbatches", microbatches, f"num_microbatches={fields['num_microbatches']}")


def names_saved_values(option: str, word: str) -> bool:
    """Whether an option and its value name a remat policy by the values that it saves: `custom` or `save_qkv_proj`."""
    named = word in load_framework("maxtext").saved and word.startswith("save_")
    return option == "remat_policy" and (word == "custom" or named)


def _read_saved(settings: Settings) -> None:
    """Set the remat policy from options that list the saved values, as the policy `custom` does."""
    saved = load_framework("maxtext").saved
    policy = settings.fields.pop("remat_policy", None)
    chosen = {name: settings.text(name, "remat") for name in saved if name in settings.left}
    stream = settings.text("decoder_layer_input", "device")
    if policy is None:
        return
    if policy == "custom" and stream == "offload" and set(chosen.values()) <= {"remat"}:
        settings.fields["remat"] = "offload"
        settings.means("decoder_layer_input", "offload", "remat=offload")
        return
    if policy == "custom":
        if wrong := next((name for name, where in chosen.items() if where not in ("remat", "device")), ""):
            raise settings.refusal(wrong, f"is {chosen[wrong]}; here only a layer's input is offloaded")
        names = [word for name, where in chosen.items() if where == "device" for word in saved[name].split()]
    else:
        names = saved[policy].split()
    values = tuple(dict.fromkeys(names))
    settings.fields |= {"remat": "named", "profile": replace(XLA, saved_values=values)}
    settings.means(
        "remat_policy", policy, f"remat=named, which saves {', '.join(values)}; it can be planned and does not run"
    )


def write(fields: dict[str, Any], system: System) -> dict[str, Any]:
    """Return the options of the mesh, the batch, the pipeline and offloading, from a plan's fields."""
    options: dict[str, Any] = {}
    degrees: dict[str, int] = {axis: fields[axis] for axis in LAYOUT}
    is_sharded = fields.get("zero_stage") == 1 and degrees["dp"] == 1
    if is_sharded:
        degrees |= {"dp": degrees["fsdp"], "fsdp": 1}
        options["shard_optimizer_over_data"] = True
    across = _across(degrees, system.num_slices)
    names = {"dp": "data", "fsdp": "fsdp", "tp": "tensor_sequence", "sp": "context", "ep": "expert", "pp": "pipeline"}
    for ours, theirs in names.items():
        options[f"ici_{theirs}_parallelism"] = degrees[ours] // across[ours]
    for ours, theirs in names.items():
        options[f"dcn_{theirs}_parallelism"] = across[ours]
    microbatches = fields["num_microbatches"]
    if fields["pp"] > 1:
        stages = fields["pp"] * fields["virtual_stages"]
        options["num_layers_per_pipeline_stage"] = max(1, fields["model.num_layers"] // stages)
        options["num_pipeline_microbatches"], microbatches = microbatches, 1
    options["gradient_accumulation_steps"] = microbatches
    options["per_device_batch_size"] = fields["batch"] / system.num_devices / microbatches
    if fields["remat"] == "offload":
        options |= {"remat_policy": "custom", "decoder_layer_input": "offload"}
    if fields.get("experts.count"):
        options["decoder_block"] = "mixtral"
    return options
