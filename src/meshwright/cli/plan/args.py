"""The arguments of `meshwright plan`, one dataclass for each kind of plan: training, serving, and models of images."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from meshwright.cli.arguments import Json, Mesh, WorkloadArgs, option, positional
from meshwright.description.step.strategy import Attention, Optimizer
from meshwright.description.step.workload import Dtype

Model = Annotated[tyro.conf.Positional[str], positional("MODEL")]
Output = Annotated[Path | None, option("FILE", "-o")]
Headroom = Annotated[str | None, option("SHARE")]
Top = Annotated[str, option("N")]


@dataclass(frozen=True)
class SearchArgs:
    """What to search and print."""

    mesh: Mesh = None
    """Compare this mesh with the best, and write it with -o, as fsdp=16,tp=4."""
    compare: Annotated[tuple[str, ...], option("MESH…")] = ()
    """Compare these meshes with each other instead of searching."""
    sweep: Annotated[str | None, option("KEY=VALUES")] = None
    """Sweep values of one key: chips=64..1024, batch=96,192,384 or seq-len=2k..32k."""
    include_planned: Annotated[bool, option()] = False
    """Include plans that train cannot run yet. Default: only plans that run, if there are any."""
    tokens: Annotated[str | None, option("N")] = None
    """Print the days and chip hours of training on this many tokens, as 15T."""
    price: Annotated[str | None, option("AMOUNT")] = None
    """With --tokens: the price of a chip hour, as 4.2, to print the cost of the training."""
    top: Top = "5"
    """How many meshes to print. Default: 5."""


@dataclass(frozen=True)
class FixedArgs:
    """Fixed choices. Default: the planner chooses, or uses the value in brackets."""

    num_microbatches: Annotated[str | None, option("N")] = None
    """Microbatches of a device's batch, run one after the other."""
    zero_stage: Annotated[Literal[1, 2, 3] | None, option("1|2|3")] = None
    """fsdp shards 1 optimizer state, 2 also gradients, 3 also parameters."""
    attention: Annotated[Attention | None, option("flash|cudnn|scores")] = None
    """flash: a fused kernel. cudnn: NVIDIA's. scores: through memory (flash; on simulated CPU devices scores)."""
    optimizer: Annotated[Optimizer | None, option("NAME")] = None
    """adamw, adamw-8bit, lion, adafactor, sgd or muon (adamw)."""
    param_dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """Format of parameters, gradients and moments (f32)."""
    reference_mesh: Mesh = None
    """The mesh of the frozen model of --objective dpo, as fsdp=2,tp=4 (that of the policy)."""


@dataclass(frozen=True)
class OutputArgs:
    """Output."""

    output: Output = None
    """Write the plan, as YAML or .json, for verify and train."""
    plot: Annotated[Path | None, option("FILE")] = None
    """Draw the candidates, or the sweep, to this file (.svg, .png or .pdf)."""
    explain: Annotated[bool, option()] = False
    """Also print terms of step and memory, collectives, rules of thumb, nearby plans, and faster plans not run yet."""
    ops: Annotated[bool, option()] = False
    """Also print every op of the best mesh's step in the notation: sizes, flops, collectives, what bounds it."""
    json: Json = False
    """Print data instead of tables: {"candidates": [record, …], "why", "nearby", …}."""


@dataclass(frozen=True)
class Args:
    """Find the best mesh for a model on some chips: memory, every collective, the step time, and why."""

    model: Model
    """A preset (llama3-8b, …), a config.json, or a plan.yaml or a run to print again. See also --serve, resnet50."""
    workload: WorkloadArgs = field(default_factory=WorkloadArgs)
    search: SearchArgs = field(default_factory=SearchArgs)
    fixed: FixedArgs = field(default_factory=FixedArgs)
    output: OutputArgs = field(default_factory=OutputArgs)


@dataclass(frozen=True)
class ServedArgs:
    """The work and the hardware."""

    serve: Annotated[Literal["decode", "prefill"], option("decode|prefill")] = "decode"
    """Tokens that a server writes (decode), or prompts that it reads (prefill)."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware: a chip and a slice shape or a device count, as v5e:4x4 or h100:8. Needed."""
    batch: Annotated[str | None, option("N")] = None
    """Sequences served at once. Default: the most within --latency, else one for each group of devices."""
    latency: Annotated[
        str | None,
        option(
            "TIME",
            help="Longest step, as 30ms: a token of decode, or a batch of prompts of prefill. Default: no limit; "
            "the shortest step is best.",
        ),
    ] = None
    prompt_len: Annotated[str | None, option("N")] = None
    """Tokens of a prompt. Default: 1024."""
    output_len: Annotated[str | None, option("N")] = None
    """Tokens of an answer. Default: 256; prefill has none."""
    chunk: Annotated[str | None, option("N")] = None
    """With --serve prefill: tokens of each prompt in a step, as `serve` does. Default: whole prompts."""
    num_layers: Annotated[str | None, option("N")] = None
    """Use only N layers of the model. Default: all."""
    hardware: Annotated[Path | None, option("FILE")] = None
    """A TOML file that describes a chip of your own, for --on to name."""
    memory_headroom: Headroom = None
    """Fraction added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""


@dataclass(frozen=True)
class FormatArgs:
    """Formats. Default: bf16, on simulated CPU devices f32."""

    dtype: Annotated[str | None, option("DTYPE")] = None
    """Format of matmuls: also int8 or fp8 on chips that have it."""
    weight_dtype: Annotated[str | None, option("DTYPE")] = None
    """Format of weights: int8, fp8, int4, …"""
    kv_dtype: Annotated[str | None, option("DTYPE")] = None
    """Format of cached keys and values."""


@dataclass(frozen=True)
class ServingOutputArgs:
    """Output."""

    mesh: Mesh = None
    """Look at this mesh alone: tp=4, or dp,fsdp,tp,sp as 1,1,4,1. Default: all."""
    top: Top = "5"
    """How many layouts to print. Default: 5."""
    output: Output = None
    """Write the best plan, as YAML or .json."""
    explain: Annotated[bool, option()] = False
    """Also print the frontier of latency and throughput, the terms of step and memory, and the collectives."""
    json: Json = False
    """Print data instead of tables: {"candidates": [plan, …], "frontier", …}."""


@dataclass(frozen=True)
class ServeArgs:
    """Find the best mesh and batch to serve a model on some chips, and the frontier of latency and throughput."""

    model: Model
    """A preset (llama3-8b, …) or the path of a Hugging Face config.json."""
    served: ServedArgs = field(default_factory=ServedArgs)
    formats: FormatArgs = field(default_factory=FormatArgs)
    output: ServingOutputArgs = field(default_factory=ServingOutputArgs)


@dataclass(frozen=True)
class ImageArgs:
    """Find the best mesh of dp and fsdp for a model of images, and why data parallelism is enough."""

    model: Model
    """resnet18, resnet34, resnet50, resnet101 or resnet152."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware, as a100-80gb:8. Needed."""
    batch: Annotated[str | None, option("N")] = None
    """Images of the global batch. Needed."""
    dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """Format of matmuls. Default: bf16, on simulated CPU devices f32."""
    mesh: Mesh = None
    """Look at this mesh alone, as dp=-1,fsdp=2. Default: all of dp and fsdp."""
    hardware: Annotated[Path | None, option("FILE")] = None
    """A TOML file that describes a chip of your own, for --on to name."""
    memory_headroom: Headroom = None
    """Fraction added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""
    top: Top = "8"
    """How many meshes to print. Default: 8."""
    json: Json = False
    """Print data instead of tables: {"candidates": [record, …]}."""
