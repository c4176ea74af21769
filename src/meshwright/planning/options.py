"""Convert the options of a plan, which are text or objects, to a workload, a system and a strategy.

The command line and `meshwright.plan`, `verify` and `train` share these functions, so that errors are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from meshwright.description.families.adapters import ALL_LINEAR, read_adapter_config, with_adapter_slots, with_adapters
from meshwright.description.families.load import load_model, load_published_weights, usual_seq_len
from meshwright.description.families.quantization import scattered_groups
from meshwright.description.hardware.system import System
from meshwright.description.step.legality import check_positions
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.serving import Serving, ServingPhase, cache_lanes, check_stored_dtypes
from meshwright.description.step.workload import Remat, Workload
from meshwright.errors import MeshwrightError
from meshwright.options.given import given
from meshwright.options.keywords import ServingOptions, StrategyOptions, WorkloadOptions
from meshwright.options.values import (
    Count,
    read_count,
    read_mesh,
    read_system,
)
from meshwright.support.field_types import check_value
from meshwright.units import parse_seconds

ModelLike = str | Path | ModelConfig | Workload
"""A preset's name, the path of a Hugging Face config.json, a ModelConfig, or a whole Workload."""

_OF_SYSTEM = ("on", "hardware", "memory_headroom")
WORKLOAD_OPTIONS = ("on", *WorkloadOptions.__annotations__)
STRATEGY_OPTIONS = tuple(StrategyOptions.__annotations__)


def check_model(model: object) -> None:
    """Raise if `model` has a type that cannot be planned, such as a function or another library's module."""
    if isinstance(model, str | Path | ModelConfig | Workload):
        return
    shown = repr(model) if isinstance(model, int | float | None) else f"a {type(model).__name__}"
    raise MeshwrightError(
        f"model is {shown}; it is a preset's name, the path of a Hugging Face config.json, a ModelConfig or a Workload"
    )


def read_model(model: str | Path | ModelConfig, num_layers: Count | None = None) -> ModelConfig:
    """Return the model of a preset's name or a path; num_layers: the number of its layers to keep, None for all."""
    check_model(model)
    found = model if isinstance(model, ModelConfig) else load_model(str(model))
    return found if num_layers is None else replace(found, num_layers=read_count("num_layers", num_layers))


def read_workload(model: ModelLike, options: Mapping[str, Any]) -> tuple[Workload, System]:
    """Return the workload and the system described by a model and `WORKLOAD_OPTIONS`.

    With a `Workload` in place of a model, only the options of the system are allowed: `on`, `hardware` and
    `memory_headroom`.

    Raises:
        MeshwrightError: `options` have both or neither of batch and batch_tokens; or `model` is a Workload, and
            `options` have one that the Workload already sets.
    """
    said = given(options, WORKLOAD_OPTIONS)
    name = model if isinstance(model, str) else getattr(model, "name", model)
    # A wrong model name is reported before other options that are missing.
    found = model if isinstance(model, Workload) else read_model(model, said.pop("num_layers", None))
    if not isinstance(found, Workload):
        found = read_adapters(found, said)
    system = _hardware(name, said)
    said = {option: value for option, value in said.items() if option not in _OF_SYSTEM}
    if isinstance(found, Workload):
        if said:
            raise MeshwrightError(f"a Workload sets {', '.join(said)} itself; leave it out")
        return found, system
    if ("batch" in said) == ("batch_tokens" in said):
        raise MeshwrightError(f"{name} needs one of --batch (batch=…) and --batch-tokens (batch_tokens=…)")
    seq_len = read_count("seq_len", said["seq_len"]) if "seq_len" in said else usual_seq_len(found)
    check_positions(found, seq_len)
    objective = said.get("objective", "next-token")
    batch = (
        read_count("batch", said["batch"])
        if "batch" in said
        else _in_sequences(said["batch_tokens"], seq_len, is_pairs=objective == "dpo")
    )
    remat = said.get("remat", "auto")
    workload = Workload(
        model=found,
        batch=batch,
        seq_len=seq_len,
        compute_dtype=said.get("dtype", "f32" if system.chip.kind == "cpu" else "bf16"),
        param_dtype=said.get("param_dtype", "f32"),
        remat="block" if remat == "auto" else remat,
        frozen=read_names(said.get("freeze", ())),
        objective=objective,
        reference=said.get("reference", "live"),
        packed=said.get("packed", False),
        quantize_base=said.get("quantize_base"),
        z_loss=said.get("z_loss", 0.0),
    )
    return workload, system


LORA_OPTIONS = ("lora_rank", "lora_alpha", "lora_targets", "lora_dropout", "lora_dora")
"""Options of low-rank adapters."""


def read_adapters(model: ModelConfig, options: Mapping[str, Any]) -> ModelConfig:
    """Return the model with the low-rank adapters that options describe; the same model if they describe none.

    Raises:
        MeshwrightError: options have both an adapter directory and `LORA_OPTIONS`, or `LORA_OPTIONS` without a rank.
    """
    if "adapter" in options:
        for name in LORA_OPTIONS:
            if name in options:
                raise MeshwrightError(f"adapter {options['adapter']} sets {name} itself; leave {name} out")
        check_value("adapter", options["adapter"], str | Path)
        return replace(model, lora=read_adapter_config(Path(options["adapter"]), model))
    if "lora_rank" not in options:
        for name in LORA_OPTIONS[1:]:
            if name in options:
                raise MeshwrightError(
                    f"{name} is {options[name]!r} of adapters without a rank; give lora_rank too, as 16"
                )
        return model
    rank, targets = read_count("lora_rank", options["lora_rank"]), read_names(options.get("lora_targets", ALL_LINEAR))
    dropout = options.get("lora_dropout", 0.0)
    return with_adapters(
        model,
        rank=rank,
        alpha=options.get("lora_alpha"),
        targets=targets,
        dropout=dropout,
        dora=options.get("lora_dora", False),
    )


def read_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names in a comma-separated text, or in a sequence of such texts."""
    texts = (value,) if isinstance(value, str) else value
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def read_strategy(options: Mapping[str, Any], num_devices: int) -> dict[str, Any]:
    """Return the fields of `Strategy` that `StrategyOptions` set, by name.

    num_devices: the mesh's number of devices, which determines a degree of -1 in reference_mesh.
    """
    said = given(options, STRATEGY_OPTIONS)
    for name in ("num_microbatches", "virtual_stages"):
        if name in said:
            said[name] = read_count(name, said[name])
    if "reference_mesh" in said:
        said["reference_mesh"] = read_mesh(said["reference_mesh"], num_devices)
    return said


PROMPT_LEN, OUTPUT_LEN = 1024, 256
"""Default numbers of tokens of a prompt and of an answer."""

SERVING_OPTIONS = tuple(ServingOptions.__annotations__)


def read_serving(
    model: str | Path | ModelConfig, phase: ServingPhase, options: Mapping[str, Any]
) -> tuple[Serving, System]:
    """Return the serving workload and the system that a model and `SERVING_OPTIONS` describe.

    The option latency is text, such as `30ms`, or a number of seconds.
    """
    said = given(options, SERVING_OPTIONS)
    system = _hardware(model, said)
    plain = "f32" if system.chip.kind == "cpu" else "bf16"
    counts = {
        name: read_count(name, said[name]) for name in ("batch", "prompt_len", "output_len", "chunk") if name in said
    }
    latency = said.get("latency")
    slots, rank = (read_count(name, said[name]) if name in said else None for name in ("adapter_slots", "adapter_rank"))
    if rank is not None and slots is None:
        raise MeshwrightError(f"adapter_rank is {rank} of adapters without slots; give adapter_slots too, as 4")
    found = with_adapter_slots(
        read_model(model, said.get("num_layers")), slots=slots or 0, rank=16 if rank is None else rank
    )
    prompt_len = counts.get("prompt_len", PROMPT_LEN)
    output_len = counts.get("output_len", OUTPUT_LEN if phase == "decode" else 1)
    advice = "{} or less of --prompt-len (prompt_len=…) and --output-len (output_len=…) together"
    check_positions(found, prompt_len + (output_len if phase == "decode" else 0), advice)
    weight_dtype = said.get("weight_dtype", plain)
    published = None if isinstance(model, ModelConfig) else load_published_weights(str(model))
    # A server keeps a checkpoint's groups and zero points if its weights are in the format.
    kept = published if published is not None and published.dtype == weight_dtype else None
    if kept is not None and kept.has_scattered_groups:
        raise scattered_groups(str(model))
    serving = Serving(
        model=found,
        phase=phase,
        prompt_len=prompt_len,
        output_len=output_len,
        batch=counts.get("batch"),
        chunk=counts.get("chunk"),
        weight_dtype=weight_dtype,
        weight_group=kept and kept.group,
        has_weight_zeros=kept is not None and kept.has_zeros,
        kv_dtype=said.get("kv_dtype", plain),
        compute_dtype=said.get("dtype", plain),
        latency_seconds=parse_seconds(latency) if isinstance(latency, str) else latency,
        cache_lanes=cache_lanes(system.chip.kind),
    )
    check_stored_dtypes(system.chip, weight_dtype=serving.weight_dtype, kv_dtype=serving.kv_dtype)
    return serving, system


def _hardware(model: object, options: Mapping[str, Any]) -> System:
    """Return the system that the options describe. Raises if they have no `on`. model: shown in the error."""
    if "on" not in options:
        raise MeshwrightError(f"{model} needs hardware: --on (on=…), as v5p:4x4x4, h100:64 or cpu:8")
    return read_system(options["on"], options.get("hardware"), options.get("memory_headroom"))


def remats(remat: Remat | Literal["auto"] | None) -> tuple[Remat, ...]:
    """Return the remat policies to choose from: (remat,), or () for `auto` and None, so that the planner chooses."""
    return () if remat in (None, "auto") else (remat,)


def _in_sequences(batch_tokens: Count, seq_len: int, *, is_pairs: bool) -> int:
    """Return the number of sequences (or, with `is_pairs`, of preference pairs) in `batch_tokens` tokens.

    Raises if that is not a whole number.
    """
    tokens, each = read_count("batch_tokens", batch_tokens), 2 * seq_len if is_pairs else seq_len
    if tokens % each:
        around = " or ".join(str(each * count) for count in (tokens // each, tokens // each + 1) if count)
        unit = f"a pair's {each} tokens" if is_pairs else f"seq_len {seq_len}"
        raise MeshwrightError(f"batch_tokens {batch_tokens} is {tokens} tokens, not a multiple of {unit}; use {around}")
    return tokens // each
