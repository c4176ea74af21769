"""Options of a plan: the work and its hardware, and how a step is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from meshwright.description.step.strategy import Attention, MatmulDtype, Optimizer, SequenceMethod, TpStream
from meshwright.description.step.trained import BaseFormat
from meshwright.description.step.workload import Dtype, Objective, Reference, Remat
from meshwright.options.declare import CountText, Keyword, Mesh, Setting, ShareText, option


@dataclass(frozen=True)
class WorkloadArgs:
    """The work and the hardware."""

    on: Annotated[str | None, option("CHIPS"), Keyword("SystemLike")] = None
    """The hardware: a chip and a slice shape or a device count, as v5p:4x4x4, h100:64 or cpu:8 (2*v6e:16x16 is two
    slices). Needed, except for a plan's file.
    """
    batch: CountText = None
    """Sequences of the global batch; with --objective dpo, pairs. Needed, or --batch-tokens."""
    batch_tokens: CountText = None
    """The global batch in tokens, as 4M, instead of --batch."""
    seq_len: CountText = None
    """Tokens of a sequence. Default: the model's trained length, or 2048."""
    dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """Dtype of matmuls. Default: bf16, on simulated CPU devices f32."""
    param_dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """Dtype of parameters and gradients. Default: f32."""
    remat: Annotated[Remat | Literal["auto"] | None, option("POLICY")] = None
    """Rematerialization: the activations that a layer saves for backward, from most to least memory: none (recompute
    nothing), attention (all but scores), matmuls (their outputs), block (its input), offload (its input, in host
    memory). Default: plan tries them all (auto); train and verify use block.
    """
    objective: Annotated[Objective | None, option("next-token|dpo")] = None
    """next-token: all text. dpo: pairs of a chosen and a rejected answer. Default: next-token."""
    reference: Annotated[Reference | None, option("live|precomputed")] = None
    """The reference model of dpo: run in each step (live), or once before the first (precomputed). Default: live.
    """
    packed: Annotated[bool, option()] = False
    """Rows have several documents or padding, so that the batch includes positions, segments and weights (off)."""
    z_loss: Annotated[float | None, option("NUMBER")] = None
    """Add this times the square of the log of the logits' normalizer to the loss, as 1e-4. Default: 0."""
    num_layers: CountText = None
    """Use only N layers of the model. Default: all."""
    lora_rank: CountText = None
    """Train only LoRA adapters of this rank, as 16; all other parameters are frozen. Default: train all."""
    lora_alpha: Annotated[float | None, option("NUMBER")] = None
    """Adapters' output is scaled by alpha / rank. Default: 2 * rank."""
    lora_targets: Annotated[str | None, option("NAMES"), Keyword("str | Sequence[str] | None")] = None
    """Matmuls with adapters, as q_proj,v_proj or query,value, and embed_tokens, lm_head. Default: all-linear."""
    lora_dropout: Annotated[float | None, option("SHARE")] = None
    """Dropout of the adapters' input in training, as 0.05. Default: 0."""
    lora_dora: Annotated[bool, option()] = False
    """Train a magnitude for each output of the adapted matmuls too, as DoRA does (arXiv:2402.09353). Default: off."""
    quantize_base: Annotated[BaseFormat | None, option("nf4|int8")] = None
    """With adapters: store the weights of layers in 4 bits (nf4) or in int8, as QLoRA does. Default: in --dtype.
    """
    adapter: Annotated[Path | None, option("DIRECTORY"), Setting("adapter", resume="never")] = None
    """Start from these PEFT adapters, which set rank, alpha and targets. Default: new ones."""
    freeze: Annotated[tuple[str, ...], option("PATTERN…")] = ()
    """Do not train these parameters, by path: embedding, layers.query or 'layers.*_norm'. Default: train all."""
    hardware: Annotated[Path | None, option("FILE")] = None
    """A TOML file with your own chip, whose name --on then accepts (examples: meshwright/description/hardware/data)."""
    memory_headroom: ShareText = None
    """Fraction added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""


@dataclass(frozen=True)
class StrategyArgs:
    """How a step runs. Default: the planner's choice or the plan file's value; else the value in parentheses."""

    num_microbatches: CountText = None
    """Microbatches of a device's batch, run one after the other; more need less memory (1)."""
    zero_stage: Annotated[Literal[0, 1, 2, 3] | None, option("0|1|2|3")] = None
    """fsdp shards 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters (3)."""
    attention: Annotated[Attention | None, option("flash|cudnn|scores")] = None
    """flash: a fused kernel, or blockwise if the chip has none. cudnn: cuDNN's kernel. scores: write the matrix of
    scores to memory (on TPUs flash, elsewhere scores).
    """
    sp_method: Annotated[SequenceMethod | None, option("gather|ring|ulysses")] = None
    """How keys reach the queries of a sequence split over sp: gathered, sent round a ring, or (ulysses) exchanged for
    heads (gather). With ring and ulysses, --attention is flash.
    """
    tp_stream: Annotated[TpStream | None, option("split|whole")] = None
    """Between blocks, tp splits the residual stream along the sequence, or replicates it (split).
    """
    collective_matmul: Annotated[bool, option()] = False
    """Run tp's collectives chunk by chunk, overlapped with their matmuls (off)."""
    schedule: Annotated[Literal["gpipe", "1f1b"] | None, option("gpipe|1f1b")] = None
    """Order of microbatches in pipeline stages (1f1b)."""
    virtual_stages: CountText = None
    """Chunks of layers in each stage; several make the schedule interleaved (1)."""
    optimizer: Annotated[Optimizer | None, option("NAME")] = None
    """adamw, lion, adafactor, sgd or muon; adamw-8bit can be planned (adamw)."""
    moment_dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """Dtype of the optimizer's moments (the parameters')."""
    master_weights: Annotated[bool, option()] = False
    """The optimizer updates float32 copies of narrower parameters (off)."""
    gradient_dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """Dtype in which gradients are summed over devices (the matmuls')."""
    matmul_dtype: Annotated[MatmulDtype | None, option("int8|fp8")] = None
    """Quantize the operands of layers' matmuls; needs pip install meshwright[quantized] (off)."""
    dropout: Annotated[float | None, option("SHARE")] = None
    """Dropout of the outputs of attention and MLP (0)."""
    reference_mesh: Mesh = None
    """The mesh of dpo's reference model, over the same devices, as fsdp=2,tp=4 (the policy's)."""
