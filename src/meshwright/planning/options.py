"""The options of a plan as people give them, as text or as objects, read into a workload, a system, a mesh, a strategy.

The command line and `meshwright.plan`, `verify` and `train` share these readers, so a mistake gets the same line.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from meshwright.description.families.adapters import ALL_LINEAR, read_adapter_config, with_adapters
from meshwright.description.families.load import load_model, usual_seq_len
from meshwright.description.hardware.chip import MEMORY_HEADROOM
from meshwright.description.hardware.system import System, parse_system
from meshwright.description.step.images import RESNETS, ImageWorkload
from meshwright.description.step.legality import check_positions
from meshwright.description.step.model import ModelConfig, largest
from meshwright.description.step.serving import Serving, ServingPhase
from meshwright.description.step.strategy import Attention, MatmulDtype, Optimizer, SequenceMethod, TpStream
from meshwright.description.step.workload import Dtype, Objective, Reference, Remat, Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape, parse_mesh
from meshwright.units import parse_count, parse_number, parse_seconds

ModelLike = str | Path | ModelConfig | Workload
"""A preset's name, the path of a Hugging Face config.json, a model, or a whole workload."""

SystemLike = str | System
"""`v5p:4x4x4`, or a system."""

MeshLike = str | MeshShape | Mapping[str, int]
"""`1,-1,4,1` or `fsdp=-1,tp=4`, a shape, or axes and their degrees."""

Count = int | str
"""A whole number, or one as text: `4096`, `64k`, `4M`."""


class StrategyOptions(TypedDict, total=False):
    """Options of a strategy. Omitted ones are chosen by the planner, or are defaults of `meshwright train`.

    num_microbatches: microbatches of a device's batch, run one after the other. zero_stage: what fsdp shards (1
    optimizer state, 2 also gradients, 3 also parameters). schedule, virtual_stages: of a pipeline. attention: `flash`,
    `cudnn` or `scores`. sp_method: gathered keys, ring attention or Ulysses. tp_stream: whether tp splits the residual
    stream between matmuls. collective_matmul: whether tp's collectives run chunk by chunk beside matmuls.
    reference_mesh: of the frozen reference of `objective="dpo"` (the policy's). The rest are fields of `Strategy`.
    """

    num_microbatches: Count | None
    zero_stage: Literal[0, 1, 2, 3] | None
    schedule: Literal["gpipe", "1f1b"] | None
    virtual_stages: Count | None
    attention: Attention | None
    sp_method: SequenceMethod | None
    tp_stream: TpStream | None
    collective_matmul: bool | None
    optimizer: Optimizer | None
    moment_dtype: Dtype | None
    master_weights: bool | None
    gradient_dtype: Dtype | None
    matmul_dtype: MatmulDtype | None
    dropout: float | None
    reference_mesh: MeshLike | None


class WorkloadOptions(TypedDict, total=False):
    """What is computed, and how its hardware is read.

    batch: sequences of the global batch, of dpo its pairs; batch_tokens: the same in tokens. seq_len: tokens of a
    sequence (what the model was trained on). objective: `next-token`, or `dpo` to train on pairs of answers against a
    frozen reference, which each step runs (reference `live`) or which is run once before the first step
    (`precomputed`). packed: whether rows hold several documents, or padding. z_loss: the coefficient of
    what keeps the logits' normalizer near 1 (0). dtype: of products (bf16; f32 on simulated CPU devices).
    param_dtype: of parameters (f32). remat: what a layer keeps for backward. num_layers: as many layers instead of the
    model's own. lora_rank, lora_alpha, lora_targets, lora_dropout: adapters of low rank, which then are all that
    trains (`families.adapters`); adapter: a directory of PEFT's that says these. freeze: patterns of the paths of
    parameters that are not trained. hardware: a TOML file with a chip of your own. memory_headroom: the share that is
    added to a predicted peak before it is held against the memory (`MEMORY_HEADROOM` of the kind of chip).
    """

    batch: Count | None
    batch_tokens: Count | None
    seq_len: Count | None
    dtype: Dtype | None
    param_dtype: Dtype | None
    remat: Remat | Literal["auto"] | None
    objective: Objective | None
    reference: Reference | None
    packed: bool | None
    z_loss: float | None
    num_layers: Count | None
    lora_rank: Count | None
    lora_alpha: float | None
    lora_targets: str | Sequence[str] | None
    lora_dropout: float | None
    adapter: str | Path | None
    freeze: str | Sequence[str] | None
    hardware: str | Path | None
    memory_headroom: float | str | None


class ServingOptions(TypedDict, total=False):
    """What is served, and on what.

    on: the hardware. batch: sequences at once. latency: what a step may take, as `30ms` or in seconds. prompt_len,
    output_len: tokens of a prompt and of an answer. chunk: of a prefill, the tokens of each prompt that a step reads;
    None for whole prompts. dtype: of products; weight_dtype, kv_dtype: of weights and of the cache. num_layers,
    hardware, memory_headroom: as in `WorkloadOptions`.
    """

    on: SystemLike
    batch: Count | None
    latency: str | float | None
    prompt_len: Count | None
    output_len: Count | None
    chunk: Count | None
    dtype: str | None
    weight_dtype: str | None
    kv_dtype: str | None
    num_layers: Count | None
    hardware: str | Path | None
    memory_headroom: float | str | None


class SearchOptions(WorkloadOptions, StrategyOptions, total=False):
    """What `meshwright.plan` plans, and what the planner is not to choose.

    include_planned: plan what `meshwright train` does not run today too; without it only where nothing runs.
    """

    include_planned: bool


class PlanOptions(WorkloadOptions, StrategyOptions, total=False):
    """All of both, the hardware (on: `v5p:4x4x4`) and the mesh."""

    on: SystemLike
    mesh: MeshLike | None


_OF_SYSTEM = ("on", "hardware", "memory_headroom")
WORKLOAD_OPTIONS = ("on", *WorkloadOptions.__annotations__)
STRATEGY_OPTIONS = tuple(StrategyOptions.__annotations__)


def given(options: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, Any]:
    """The options that are not None; an unknown name is an error with the nearest one."""
    names = list(allowed)
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise MeshwrightError(f"there is no option {name!r}; {hint}options are {', '.join(names)}")
    return {name: value for name, value in options.items() if value is not None}


def read_system(
    on: SystemLike, hardware: str | Path | None = None, memory_headroom: float | str | None = None
) -> System:
    """Parse a system; without a headroom of its own it gets the usual one of its kind of chip."""
    match on:
        case System():
            pass
        case str():
            on = parse_system(on, hardware_file=hardware)
        case _:
            raise MeshwrightError(
                f"on is {on!r}; it is a chip and a slice shape or a device count, as 'v5p:4x4x4', 'h100:64' or 'cpu:8'"
            )
    if memory_headroom is not None:
        return replace(on, memory_headroom=read_share(memory_headroom))
    usual = MEMORY_HEADROOM[on.chip.kind]
    return on if on.memory_headroom is not None else replace(on, memory_headroom=usual)


def read_share(value: float | str) -> float:
    """A share from 0 to below 1, of a number or a text: 0.1, "0.1" or "10%"."""
    text = str(value).strip()
    try:
        share = parse_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except MeshwrightError:
        share = -1.0
    if not 0 <= share < 1:
        raise MeshwrightError(f"memory_headroom is {value!r}; it is a share from 0 to below 1, as 0.1 or 10%")
    return share


def read_mesh(mesh: MeshLike, num_devices: int) -> MeshShape:
    """Parse a mesh from text, a mapping or a shape, for `num_devices` devices."""
    match mesh:
        case MeshShape():
            if mesh.num_devices != num_devices:
                raise MeshwrightError(f"mesh {mesh} has {mesh.num_devices} devices; the hardware has {num_devices}")
            return mesh
        case Mapping():
            text = ",".join(f"{axis}={degree}" for axis, degree in mesh.items())
            return parse_mesh(text, num_devices=num_devices)
        case str():
            return parse_mesh(mesh, num_devices=num_devices)
        case _:
            raise MeshwrightError(f"mesh is {mesh!r}; it is text, as 'fsdp=-1,tp=4' or '1,-1,4,1', or a MeshShape")


def read_count(name: str, value: Count) -> int:
    """A whole number from 1, of a number or a text."""
    try:
        number = parse_count(value) if isinstance(value, str) else operator.index(value)
    except (MeshwrightError, TypeError):
        number = 0
    if number < 1 or isinstance(value, bool):
        raise MeshwrightError(f"{name} is {value!r}; it is a whole number from 1, as 4096, 64k, 128Ki or 4M")
    if number > (most := 10**18 if name.removeprefix("--") == "tokens" else largest(name)):
        raise MeshwrightError(f"{name} is {value!r}; the most is {most:,}")
    return number


MOST_PRICE = 1e9
"""The most that a chip may cost an hour."""


def read_price(value: float | str) -> float:
    """An amount of money from 0, of a number or a text."""
    try:
        price = parse_number(str(value))
    except MeshwrightError:
        price = -1.0
    if not 0 <= price <= MOST_PRICE:
        raise MeshwrightError(f"price {value!r} is not an amount; it is what a chip costs an hour, as 4.2")
    return price


def check_model(model: object) -> None:
    """Raise if this cannot be planned as a model, such as a function or a library's module."""
    if isinstance(model, str | Path | ModelConfig | Workload):
        return
    shown, hint = (repr(model) if isinstance(model, int | float | None) else f"a {type(model).__name__}"), ""
    if callable(model):
        hint = "; of a function of your own mw.inspect(function, *arguments) tells what it does on a mesh"
    raise MeshwrightError(
        f"model is {shown}; it is a preset's name, the path of a Hugging Face config.json, a ModelConfig or a"
        f" Workload{hint}"
    )


def read_model(model: str | Path | ModelConfig, num_layers: Count | None = None) -> ModelConfig:
    """The model of a name or a path, cut to `num_layers`."""
    check_model(model)
    found = model if isinstance(model, ModelConfig) else load_model(str(model))
    return found if num_layers is None else replace(found, num_layers=read_count("num_layers", num_layers))


def read_workload(model: ModelLike, options: Mapping[str, Any]) -> tuple[Workload, System]:
    """Return the workload and the system described by `WORKLOAD_OPTIONS`.

    If a `Workload` object is passed, the only other options allowed are `on` and `hardware`.
    """
    said = given(options, WORKLOAD_OPTIONS)
    name = model if isinstance(model, str) else getattr(model, "name", model)
    # A wrong name of a model is told before what else is missing.
    found = model if isinstance(model, Workload) else read_model(model, said.pop("num_layers", None))
    if not isinstance(found, Workload):
        found = read_adapters(found, said)
    system = _hardware(name, said)
    said = {option: value for option, value in said.items() if option not in _OF_SYSTEM}
    if isinstance(found, Workload):
        if said:
            raise MeshwrightError(f"a Workload says {', '.join(said)} itself; leave it out")
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
        z_loss=said.get("z_loss", 0.0),
    )
    return workload, system


LORA_OPTIONS = ("lora_rank", "lora_alpha", "lora_targets", "lora_dropout")
"""Options for adapters."""


def read_adapters(model: ModelConfig, options: Mapping[str, Any]) -> ModelConfig:
    """Return the model with the low-rank adapters of the options, if any."""
    if "adapter" in options:
        for name in LORA_OPTIONS:
            if name in options:
                raise MeshwrightError(f"adapter {options['adapter']} says {name} itself; leave {name} out")
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
    return with_adapters(model, rank=rank, alpha=options.get("lora_alpha"), targets=targets, dropout=dropout)


def read_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Names as a text with commas between, or one by one; of a command's there may be both."""
    texts = (value,) if isinstance(value, str) else value
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def read_strategy(options: Mapping[str, Any], num_devices: int) -> dict[str, Any]:
    """Return the fields of `Strategy` set by `StrategyOptions`."""
    said = given(options, STRATEGY_OPTIONS)
    for name in ("num_microbatches", "virtual_stages"):
        if name in said:
            said[name] = read_count(name, said[name])
    if "reference_mesh" in said:
        said["reference_mesh"] = read_mesh(said["reference_mesh"], num_devices)
    return said


PROMPT_LEN, OUTPUT_LEN = 1024, 256
"""Default tokens of a prompt and of an answer."""

SERVING_OPTIONS = tuple(ServingOptions.__annotations__)
IMAGE_OPTIONS = (*_OF_SYSTEM, "batch", "dtype")


def read_serving(
    model: str | Path | ModelConfig, phase: ServingPhase, options: Mapping[str, Any]
) -> tuple[Serving, System]:
    """The serving and the system that `SERVING_OPTIONS` mean; latency is text, as 30ms, or seconds."""
    said = given(options, SERVING_OPTIONS)
    system = _hardware(model, said)
    plain = "f32" if system.chip.kind == "cpu" else "bf16"
    counts = {
        name: read_count(name, said[name]) for name in ("batch", "prompt_len", "output_len", "chunk") if name in said
    }
    latency = said.get("latency")
    found = read_model(model, said.get("num_layers"))
    prompt_len = counts.get("prompt_len", PROMPT_LEN)
    output_len = counts.get("output_len", OUTPUT_LEN if phase == "decode" else 1)
    advice = "{} or less of --prompt-len (prompt_len=…) and --output-len (output_len=…) together"
    check_positions(found, prompt_len + (output_len if phase == "decode" else 0), advice)
    serving = Serving(
        model=found,
        phase=phase,
        prompt_len=prompt_len,
        output_len=output_len,
        batch=counts.get("batch"),
        chunk=counts.get("chunk"),
        weight_dtype=said.get("weight_dtype", plain),
        kv_dtype=said.get("kv_dtype", plain),
        compute_dtype=said.get("dtype", plain),
        latency_seconds=parse_seconds(latency) if isinstance(latency, str) else latency,
    )
    return serving, system


def read_images(model: str, options: Mapping[str, Any]) -> tuple[ImageWorkload, System]:
    """The workload and the system that `IMAGE_OPTIONS` mean for a ResNet."""
    said = given(options, IMAGE_OPTIONS)
    system = _hardware(model, said)
    if "batch" not in said:
        raise MeshwrightError(f"{model} needs --batch (batch=…), its images over all devices, as 256")
    dtype = said.get("dtype", "f32" if system.chip.kind == "cpu" else "bf16")
    workload = ImageWorkload(
        model=RESNETS[model.lower()], batch=read_count("batch", said["batch"]), compute_dtype=dtype
    )
    return workload, system


def _hardware(name: object, said: Mapping[str, Any]) -> System:
    """The system that the options name."""
    if "on" not in said:
        raise MeshwrightError(f"{name} needs hardware: --on (on=…), as v5p:4x4x4, h100:64 or cpu:8")
    return read_system(said["on"], said.get("hardware"), said.get("memory_headroom"))


def remats(remat: Remat | Literal["auto"] | None) -> tuple[Remat, ...]:
    """Return the given remat policy, or none for the planner to choose."""
    return () if remat in (None, "auto") else (remat,)


def is_image_model(model: object) -> bool:
    """Whether this is the name of a ResNet, which has options of its own."""
    return isinstance(model, str) and model in RESNETS


def _in_sequences(batch_tokens: Count, seq_len: int, *, is_pairs: bool) -> int:
    """Return the number of sequences, or pairs, in `batch_tokens` tokens."""
    tokens, each = read_count("batch_tokens", batch_tokens), 2 * seq_len if is_pairs else seq_len
    if tokens % each:
        around = " or ".join(str(each * count) for count in (tokens // each, tokens // each + 1) if count)
        unit = f"a pair's {each} tokens" if is_pairs else f"seq_len {seq_len}"
        raise MeshwrightError(f"batch_tokens {batch_tokens} is {tokens} tokens, not a multiple of {unit}; use {around}")
    return tokens // each
