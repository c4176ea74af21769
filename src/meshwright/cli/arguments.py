"""Arguments that several commands share: the workload, its hardware, how a step is run; how options are shown."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from meshwright.step import (
    Attention,
    Dtype,
    MatmulDtype,
    Objective,
    Optimizer,
    Reference,
    Remat,
    SequenceMethod,
    TpStream,
)


def option(metavar: str = "", *aliases: str, help: str | None = None) -> Any:  # noqa: A002
    """How an option is shown: the word for its value, its other names, and no default beside the help text.

    help: for a text of several lines; of a docstring tyro keeps the line breaks.
    """
    return tyro.conf.arg(metavar=metavar, aliases=aliases or None, help=help, help_behavior_hint="")


def positional(metavar: str) -> Any:
    """How an argument without a name is shown."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def given_options(*groups: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """The options of some groups by name, those left out as None; `without` are not read."""
    found: dict[str, Any] = {}
    for group in groups:
        for field in fields(group):
            if field.name not in without and not is_dataclass(value := getattr(group, field.name)):
                found[field.name] = None if value is False or value == () else value
    return found


Mesh = Annotated[str | None, option("MESH")]
Json = Annotated[bool, option()]
CompileCache = Annotated[str | None, option("DIRECTORY|off")]


@dataclass(frozen=True)
class WorkloadArgs:
    """What is computed, and on what."""

    on: Annotated[
        str | None,
        option(
            "CHIPS",
            help="The hardware: a chip and a slice shape or a device count, as v5p:4x4x4, h100:64 or cpu:8 "
            "(2*v6e:16x16 is two slices). Needed, unless a plan's file says it.",
        ),
    ] = None
    batch: Annotated[str | None, option("N")] = None
    """Sequences of the global batch, of --objective dpo its pairs. Needed, or --batch-tokens."""
    batch_tokens: Annotated[str | None, option("N")] = None
    """The global batch in tokens, as 4M, instead of --batch."""
    seq_len: Annotated[str | None, option("N")] = None
    """Tokens of a sequence. Default: what the model was trained on, or 2048."""
    dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """What products are computed in. Default: bf16, on simulated CPU devices f32."""
    remat: Annotated[
        Remat | Literal["auto"] | None,
        option(
            "POLICY",
            help="What a layer keeps for backward, from most to least memory: none (recompute nothing), attention (all"
            " but scores), matmuls (results of products), block (its input), offload (its input, in host memory)."
            " Default: plan tries them all (auto); train and verify take block.",
        ),
    ] = None
    objective: Annotated[Objective | None, option("next-token|dpo")] = None
    """next-token: all text. dpo: pairs of a chosen and a rejected answer. Default: next-token."""
    reference: Annotated[Reference | None, option("live|precomputed")] = None
    """dpo's frozen model: run in each step (live), or once before the first one (precomputed). Default: live."""
    packed: Annotated[bool, option()] = False
    """Rows hold several documents, or padding: the batch has positions, segments and weights too (off)."""
    z_loss: Annotated[float | None, option("NUMBER")] = None
    """Add this times the square of the log of the logits' normalizer to the loss, as 1e-4. Default: 0."""
    num_layers: Annotated[str | None, option("N")] = None
    """Cut the model to N layers, to look at a part of it. Default: all."""
    lora_rank: Annotated[str | None, option("N")] = None
    """Train adapters of this rank alone (LoRA), as 16; all other parameters are frozen. Default: train all."""
    lora_alpha: Annotated[float | None, option("NUMBER")] = None
    """What adapters add is times alpha / rank. Default: 2 * rank."""
    lora_targets: Annotated[str | None, option("NAMES")] = None
    """The products with adapters, as q_proj,v_proj or query,value. Default: all-linear."""
    lora_dropout: Annotated[float | None, option("SHARE")] = None
    """The share of what adapters read that is dropped at random in training, as 0.05. Default: 0."""
    adapter: Annotated[Path | None, option("DIRECTORY")] = None
    """Begin with these adapters, as PEFT writes them, which say rank, alpha and targets. Default: new ones."""
    freeze: Annotated[tuple[str, ...], option("PATTERN…")] = ()
    """Parameters that are not trained, by their paths: embedding, layers.query or 'layers.*_norm'. Default: none."""
    hardware: Annotated[Path | None, option("FILE")] = None
    """A TOML file that describes a chip of your own, for --on to name (form: meshwright/hardware/data)."""
    memory_headroom: Annotated[str | None, option("SHARE")] = None
    """The share added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""


@dataclass(frozen=True)
class StrategyArgs:
    """How a step is run. Default: as the plan says, else the value in brackets."""

    num_microbatches: Annotated[str | None, option("N")] = None
    """Parts of a device's batch that run one after the other; more need less memory (1)."""
    zero_stage: Annotated[Literal[0, 1, 2, 3] | None, option("0|1|2|3")] = None
    """What fsdp shards: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too (3)."""
    attention: Annotated[
        Attention | None,
        option(
            "flash|cudnn|scores",
            help="flash: a fused kernel, or blocks where a chip has none. cudnn: NVIDIA's. scores: through memory "
            "(scores; on TPUs flash).",
        ),
    ] = None
    sp_method: Annotated[SequenceMethod | None, option("gather|ring|ulysses")] = None
    """How queries meet the keys of a sequence that sp splits; ring and ulysses imply --attention flash (gather)."""
    tp_stream: Annotated[TpStream | None, option("split|whole")] = None
    """Whether tp splits the residual stream along the sequence between products, or keeps it whole (split)."""
    collective_matmul: Annotated[bool, option()] = False
    """Run tp's collectives chunk by chunk beside the products that need them (off)."""
    schedule: Annotated[Literal["gpipe", "1f1b"] | None, option("gpipe|1f1b")] = None
    """The order of microbatches in the stages of pp (1f1b)."""
    virtual_stages: Annotated[str | None, option("N")] = None
    """Chunks of layers in each stage; several make the schedule interleaved (1)."""
    optimizer: Annotated[Optimizer | None, option("NAME")] = None
    """adamw, lion, adafactor, sgd or muon; adamw-8bit can be planned (adamw)."""
    param_dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """What parameters and gradients are kept in (f32)."""
    moment_dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """What the optimizer's moments are kept in (as parameters)."""
    master_weights: Annotated[bool, option()] = False
    """Update float32 copies of narrower parameters (off)."""
    gradient_dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """What gradients are summed over devices in (as products)."""
    matmul_dtype: Annotated[MatmulDtype | None, option("int8|fp8")] = None
    """Round the operands of the layers' products; needs pip install meshwright[quantized] (off)."""
    dropout: Annotated[float | None, option("SHARE")] = None
    """The share dropped at random of what attention and MLP add to the residual stream (0)."""
    reference_mesh: Mesh = None
    """The mesh of dpo's frozen model, over the same devices, as fsdp=2,tp=4 (the policy's)."""
