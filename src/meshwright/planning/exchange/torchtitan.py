"""Read and write settings of torchtitan: degrees, local and global batch, pipelines and activation checkpoints."""

from __future__ import annotations

import re
from typing import Any

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.planning.exchange.settings import Settings

_DEGREES = {"tp": "tensor", "sp": "context", "pp": "pipeline", "ep": "expert"}

_SCHEDULES = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "1f1b"}


def read(settings: Settings) -> None:
    """Set the fields of the mesh, the batch, the pipeline, remat, ZeRO stage and fp8 matmuls from the options."""
    _read_mesh(settings)
    _read_batch(settings)
    mode = settings.text("activation_checkpoint.mode", "selective")
    option = settings.text("activation_checkpoint.selective_ac_option", "2")
    settings.left.pop("activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", None)
    remats = {"none": "none", "full": "block", "selective": "alternate" if option == "op" else ""}
    if not (remat := remats.get(mode, "")):
        raise settings.refusal(
            "activation_checkpoint.mode",
            f"is {mode}, of every layer {option}; none, full and selective with selective_ac_option = op are read",
        )
    settings.fields["remat"] = remat
    settings.means("activation_checkpoint.mode", mode, f"remat={remat}")
    fields = settings.fields
    option = "parallelism.fsdp_reshard_after_forward"
    policy = settings.text(option, "default")
    if policy not in ("default", "always", "never"):
        raise settings.refusal(option, f"is {policy!r}; it takes default, always or never")
    fields["zero_stage"] = 2 if policy == "never" or (policy == "default" and fields["pp"] > 1) else 3
    settings.means(option, policy, f"zero_stage={fields['zero_stage']}")
    converters = settings.names("model.converters")
    if wrong := [name for name in converters if name != "float8"]:
        raise settings.refusal("model.converters", f"has {wrong[0]}; float8 is read, --matmul-dtype fp8 here")
    if converters:
        fields["matmul_dtype"] = "fp8"
        settings.means("model.converters", converters, "matmul_dtype=fp8")


def _read_mesh(settings: Settings) -> None:
    """Set the degrees of all axes. Expert parallelism uses devices of torchtitan's FSDP shard axis."""
    fields = settings.fields
    for ours, theirs in _DEGREES.items():
        option = f"parallelism.{theirs}_parallel_degree"
        fields[ours] = settings.whole(option, 1)
        settings.means(option, fields[ours], f"{ours}={fields[ours]}")
    replicas = settings.whole("parallelism.data_parallel_replicate_degree", 1)
    shards = settings.whole("parallelism.data_parallel_shard_degree", -1)
    known = replicas * fields["tp"] * fields["sp"] * fields["pp"]
    filled = settings.quotient("devices over the other degrees", settings.system.num_devices, known)
    if shards not in (-1, filled):
        raise settings.refusal(
            "parallelism.data_parallel_shard_degree",
            f"is {shards}; with the other degrees {settings.system} has {filled}",
        )
    fields |= {"dp": replicas, "fsdp": settings.quotient("shards over experts", filled, fields["ep"])}
    settings.means("parallelism.data_parallel_replicate_degree", replicas, f"dp={replicas}")
    experts = f", and ep={fields['ep']} of its devices" if fields["ep"] > 1 else ""
    settings.means("parallelism.data_parallel_shard_degree", shards, f"fsdp={fields['fsdp']}{experts}")


def _read_batch(settings: Settings) -> None:
    """Set the batch, the microbatches, and the schedule of a pipeline from the options."""
    fields = settings.fields
    local = settings.whole("training.local_batch_size", 8)
    degree = fields["dp"] * fields["fsdp"] * fields["ep"]
    batch = settings.whole("training.global_batch_size", -1)
    batch = local * degree if batch == -1 else batch
    steps = settings.quotient("the global batch over local ones", batch, local * degree)
    fields |= {"batch": batch, "num_microbatches": steps}
    settings.means("training.local_batch_size", local, f"batch={batch}, num_microbatches={steps}")
    size = settings.whole("parallelism.pipeline_parallel_microbatch_size", 1)
    schedule = settings.text("parallelism.pipeline_parallel_schedule", "1F1B")
    points = settings.names("parallelism.pipeline_parallel_split_points")
    per_stage = settings.take("parallelism.pipeline_parallel_layers_per_stage")
    if fields["pp"] == 1:
        return
    if steps > 1:
        raise settings.refusal("training.global_batch_size", "accumulates beside a pipeline; here that is one number")
    if schedule not in _SCHEDULES:
        raise settings.refusal(
            "parallelism.pipeline_parallel_schedule", f"is {schedule!r}; {', '.join(_SCHEDULES)} are read"
        )
    if per_stage is not None:
        raise settings.refusal(
            "parallelism.pipeline_parallel_layers_per_stage",
            "is not read; name the layers in pipeline_parallel_split_points",
        )
    stages = len(points) + 1 if points else fields["pp"] * (2 if schedule.startswith("Interleaved") else 1)
    fields |= {
        "num_microbatches": settings.quotient("the local batch over microbatches", local, size),
        "schedule": _SCHEDULES[schedule],
        "virtual_stages": settings.quotient("stages over ranks", stages, fields["pp"]),
    }
    if points and settings.model is not None and points != _split_points(settings.model.num_layers, stages):
        raise settings.refusal(
            "parallelism.pipeline_parallel_split_points", f"are not those of {stages} stages of as many layers each"
        )
    said = f"schedule={fields['schedule']}, virtual_stages={fields['virtual_stages']}"
    settings.means("parallelism.pipeline_parallel_schedule", schedule, said)
    settings.means(
        "parallelism.pipeline_parallel_microbatch_size", size, f"num_microbatches={fields['num_microbatches']}"
    )


def _split_points(num_layers: int, num_stages: int) -> list[str]:
    """Return the name of the first layer of every stage but the first: `layers.8`."""
    return [f"layers.{num_layers * stage // num_stages}" for stage in range(1, num_stages)]


def write(fields: dict[str, Any], system: System) -> dict[str, Any]:
    """Return the options of the mesh, the batch, the pipeline and the activation checkpoints, from a plan's fields.

    Raises:
        MeshwrightError: torchtitan has no counterpart of the plan's ZeRO stage or remat policy.
    """
    name, _, flavor = fields["model"].partition("/")
    options: dict[str, Any] = {"model.name": name, "model.flavor": flavor}
    if fields.get("matmul_dtype") == "fp8":
        options["model.converters"] = ["float8"]
    degree = fields["dp"] * fields["fsdp"] * fields["ep"]
    microbatches, is_pipeline = fields["num_microbatches"], fields["pp"] > 1
    local = fields["batch"] // degree // (1 if is_pipeline else microbatches)
    options |= {"training.local_batch_size": local, "training.global_batch_size": fields["batch"]}
    options["parallelism.data_parallel_replicate_degree"] = fields["dp"]
    options["parallelism.data_parallel_shard_degree"] = fields["fsdp"] * fields["ep"]
    options |= {f"parallelism.{theirs}_parallel_degree": fields[ours] for ours, theirs in _DEGREES.items()}
    if (stage := fields.get("zero_stage", 3)) < 2:
        raise MeshwrightError(f"torchtitan has no zero_stage={stage}; its FSDP is 3, or 2 where it keeps weights")
    options["parallelism.fsdp_reshard_after_forward"] = "always" if stage == 3 else "never"
    if is_pipeline:
        virtual = fields["virtual_stages"]
        schedule = "GPipe" if fields["schedule"] == "gpipe" else "Interleaved1F1B" if virtual > 1 else "1F1B"
        options["parallelism.pipeline_parallel_schedule"] = schedule
        options["parallelism.pipeline_parallel_microbatch_size"] = max(1, local // microbatches)
        points = _split_points(fields["model.num_layers"], fields["pp"] * virtual)
        options["parallelism.pipeline_parallel_split_points"] = points
    modes = {"none": "none", "block": "full", "alternate": "selective"}
    if fields["remat"] not in modes:
        raise MeshwrightError(f"torchtitan has no remat={fields['remat']}; it has {', '.join(modes)}")
    options["activation_checkpoint.mode"] = modes[fields["remat"]]
    if fields["remat"] == "alternate":
        options["activation_checkpoint.selective_ac_option"] = "op"
    return options


def preset_name(settings: Settings) -> str:
    """Return torchtitan's name of the file's model, such as `llama3/8B`; '' if the file names no model."""
    name, flavor = settings.text("model.name"), settings.text("model.flavor")
    return re.sub("^/$", "", f"{name}/{flavor}")
