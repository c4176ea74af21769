"""The arguments of `meshwright plan`, one dataclass for each kind of plan: training, serving, and models of images."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from meshwright.cli.arguments import Json, Mesh, WorkloadArgs, option, positional
from meshwright.step import RESNETS, Attention, Dtype, Optimizer

Model = Annotated[tyro.conf.Positional[str], positional("MODEL")]
Output = Annotated[Path | None, option("FILE", "-o")]
Headroom = Annotated[str | None, option("SHARE")]
Top = Annotated[str, option("N")]


@dataclass(frozen=True)
class SearchArgs:
    """What to plan, and what to show."""

    mesh: Mesh = None
    """Compare this mesh with the best, and write it with -o, as fsdp=16,tp=4."""
    compare: Annotated[tuple[str, ...], option("MESH…")] = ()
    """Compare these meshes with each other instead of searching."""
    sweep: Annotated[str | None, option("KEY=VALUES")] = None
    """The best for each of several values: chips=64..1024, batch=96,192,384 or seq-len=2k..32k."""
    include_planned: Annotated[bool, option()] = False
    """Rank what can be planned and train does not run today too. Default: what runs, where anything does."""
    tokens: Annotated[str | None, option("N")] = None
    """Say what training on so many tokens takes, as 15T: days and chip hours."""
    price: Annotated[str | None, option("AMOUNT")] = None
    """With --tokens, what a chip costs an hour, as 4.2, for the cost of the training."""
    top: Top = "5"
    """How many meshes to print. Default: 5."""


@dataclass(frozen=True)
class FixedArgs:
    """What the planner is not to choose. Default: it chooses, or takes the value in brackets."""

    num_microbatches: Annotated[str | None, option("N")] = None
    """Parts of a device's batch that run one after the other."""
    zero_stage: Annotated[Literal[1, 2, 3] | None, option("1|2|3")] = None
    """What fsdp shards: 1 optimizer state, 2 gradients too, 3 parameters too."""
    attention: Annotated[Attention | None, option("flash|cudnn|scores")] = None
    """flash: a fused kernel. cudnn: NVIDIA's. scores: through memory (flash; on simulated CPU devices scores)."""
    optimizer: Annotated[Optimizer | None, option("NAME")] = None
    """adamw, adamw-8bit, lion, adafactor, sgd or muon (adamw)."""
    param_dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """What parameters, gradients and moments are kept in (f32)."""
    reference_mesh: Mesh = None
    """The mesh of the frozen model of --objective dpo, as fsdp=2,tp=4 (that of the policy)."""


@dataclass(frozen=True)
class OutputArgs:
    """Where the plan goes."""

    output: Output = None
    """Write the plan, as YAML or .json, for verify and train."""
    plot: Annotated[Path | None, option("FILE")] = None
    """Draw the candidates, or the sweep, to this file (.svg, .png or .pdf)."""
    explain: Annotated[bool, option()] = False
    """Say why in full: terms of step and memory, collectives, rules of thumb, what is near, faster ways not run yet."""
    ops: Annotated[bool, option()] = False
    """Print every op of the best mesh's step in the notation too: sizes, flops, collectives, what binds it."""
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
    """What is served, and on what."""

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
            help="What a step may take, as 30ms: of decode a token, of prefill a batch of prompts. Default: no limit; "
            "the shortest step is best.",
        ),
    ] = None
    prompt_len: Annotated[str | None, option("N")] = None
    """Tokens of a prompt. Default: 1024."""
    output_len: Annotated[str | None, option("N")] = None
    """Tokens of an answer. Default: 256; prefill has none."""
    chunk: Annotated[str | None, option("N")] = None
    """Of --serve prefill, the tokens of each prompt that a step reads, as `serve` does. Default: whole prompts."""
    num_layers: Annotated[str | None, option("N")] = None
    """Cut the model to N layers, to look at a part of it. Default: all."""
    hardware: Annotated[Path | None, option("FILE")] = None
    """A TOML file that describes a chip of your own, for --on to name."""
    memory_headroom: Headroom = None
    """The share added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""


@dataclass(frozen=True)
class FormatArgs:
    """Formats. Default: bf16, on simulated CPU devices f32."""

    dtype: Annotated[str | None, option("DTYPE")] = None
    """What products are computed in: int8 or fp8 where the chip has a peak for it."""
    weight_dtype: Annotated[str | None, option("DTYPE")] = None
    """What weights are kept in: int8, fp8, int4, …"""
    kv_dtype: Annotated[str | None, option("DTYPE")] = None
    """What keys and values are kept in."""


@dataclass(frozen=True)
class ServingOutputArgs:
    """What to show, and where the plan goes."""

    mesh: Mesh = None
    """Look at this mesh alone: tp=4, or dp,fsdp,tp,sp as 1,1,4,1. Default: all."""
    top: Top = "5"
    """How many layouts to print. Default: 5."""
    output: Output = None
    """Write the best plan, as YAML or .json."""
    explain: Annotated[bool, option()] = False
    """Print the frontier of latency and throughput, the terms of step and memory, and the collectives too."""
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
    """What products are computed in. Default: bf16, on simulated CPU devices f32."""
    mesh: Mesh = None
    """Look at this mesh alone, as dp=-1,fsdp=2. Default: all of dp and fsdp."""
    hardware: Annotated[Path | None, option("FILE")] = None
    """A TOML file that describes a chip of your own, for --on to name."""
    memory_headroom: Headroom = None
    """The share added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""
    top: Top = "8"
    """How many meshes to print. Default: 8."""
    json: Json = False
    """Print data instead of tables: {"candidates": [record, …]}."""


KINDS: dict[str, type] = {
    "a training plan": Args,
    "a serving plan (--serve decode)": ServeArgs,
    "a plan of a model of images": ImageArgs,
}
"""The kinds of plans, as messages name them."""

HINTS = {
    ServeArgs: {"--batch-tokens": "--batch", "--seq-len": "--prompt-len"},
    Args: {"--prompt-len": "--seq-len"},
}
"""What a kind of plan has instead of another's options."""


def args_of(words: list[str]) -> type:
    """The kind of plan that some words ask for: --serve is serving, the name of a ResNet images, all else training."""
    if any(word.split("=")[0] == "--serve" for word in words):
        return ServeArgs
    return ImageArgs if {word.lower() for word in words} & set(RESNETS) else Args
