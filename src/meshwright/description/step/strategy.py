"""How a step is run on a mesh, beyond the degrees of its axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from meshwright.description.step.workload import Dtype
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.support.field_types import check_fields, from_data

Attention = Literal["scores", "flash", "cudnn"]
SequenceMethod = Literal["gather", "ring", "ulysses"]
TpStream = Literal["split", "whole"]
MatmulDtype = Literal["int8", "fp8"]
Optimizer = Literal["adamw", "adamw-8bit", "lion", "adafactor", "sgd", "muon"]
OnBadStep = Literal["stop", "skip"]
RateSchedule = Literal["cosine", "linear", "wsd", "constant"]
"""The schedule of the learning rate after its warm-up (`training.update.optimizer.Optimizer`)."""


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """Differences of another framework from XLA, for predictions only.

    The profiles of known frameworks are files (`description.frameworks`).
    """

    name: str = ""  # The framework; '' for meshwright.
    # All stages are one SPMD program: idle stages compute on zeros, and embedding and unembedding are shared by all.
    # If False, each stage is a separate program (Megatron-LM).
    spmd_pipeline: bool = True
    overlaps_gradients: bool = True  # Gradient all-reduces overlap with backward; if False, they are exposed.
    overlaps_weights: bool = True  # Weight all-gathers and gradient reduce-scatters overlap with matmuls.
    # Weights are gathered into one buffer and copied out of it, and gradients copied into one (PyTorch FSDP).
    flat_buffers: bool = False
    shard_lists: bool = False  # Weights and gradients are copied into and out of lists of shards (DeepSpeed in 2021).
    fused_elementwise: bool = True  # Elementwise ops are fused into few memory passes; if False, each is a kernel.
    fused_loss: bool = True  # The loss has one array of float32 logits; if False, one for each op.
    # Float32 arrays of the logits' size that such a loss holds at once; 0: 3, or 4 if tp splits the vocabulary.
    loss_arrays: float = 0.0
    # Results of elementwise ops that matmuls read are saved for backward (PyTorch without a compiler); compilers
    # recompute them.
    saves_results: bool = False
    saves_shards: bool = False  # Inputs gathered over tp are saved as shards, and gathered again in backward.
    # Bytes of gradients per parameter that a device of a data-parallel group holds in the whole step; 0: as XLA.
    gradient_bytes: float = 0.0
    # Whether blocks are recomputed to their end, as PyTorch's checkpoints do by default. Compilers drop the last ops of
    # a recomputed block, which no gradient needs.
    recomputes_whole_blocks: bool = False
    # Which ops hide the collectives of weights and gradients that run once per step. `step`: all ops of the same pass.
    # `microbatch`: the forward of the first microbatch, or the backward of the last. `exposed`: none.
    once_collectives: Literal["step", "microbatch", "exposed"] = "step"
    fused_accumulation: bool = False  # Matmuls add weight gradients to those of earlier microbatches themselves.
    fused_casts: bool = False  # Ops write their results directly in the 8-bit format of the matmuls that read them.
    attention_rate: float = 1.0  # Rate of the fused attention kernel relative to FlashAttention-2's.
    # Values that the remat policy `named` saves (`passes.rematerialize.NAMED`), besides each layer's input.
    saved_values: tuple[str, ...] = ()
    balanced_routing: bool = False  # Experts' arrays have the rows of an even load, not of any possible routing.
    overlaps_sends: bool = False  # Sends between interleaved pipeline stages overlap with matmuls.
    memory_bytes: float = 0.0  # Bytes of communication buffers and allocator fragments on each device.
    host_seconds: float = 0.0  # Seconds of each step in which no device works: logging, data, the optimizer's loop.
    # Seconds that a collective over tp takes to start, per device of its group, besides the links' latency.
    tp_start_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.attention_rate < math.inf:
            raise MeshwrightError(f"attention_rate is {self.attention_rate}; it is a number above 0")
        for field in ("loss_arrays", "gradient_bytes", "memory_bytes", "host_seconds", "tp_start_seconds"):
            if not 0 <= (value := getattr(self, field)) < math.inf:
                raise MeshwrightError(f"{field} is {value}; it is a number from 0")

    def __str__(self) -> str:
        """Return the framework's name, or the fields that differ from XLA: `flat_buffers=True`."""
        if self.name:
            return self.name
        changed = {name: value for name, value in vars(self).items() if value != getattr(XLA, name)}
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "XLA"


XLA = FrameworkProfile()
"""The profile of XLA, the only one that can run."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a step runs on a mesh, by default as `meshwright train` runs it; other profiles can only be planned."""

    # Microbatches that a device's batch is split into, run one after the other (with pp, as a pipeline).
    num_microbatches: int = 1
    # ZeRO stage (arXiv:1910.02054) over fsdp: 1 shards optimizer state, 2 also gradients, 3 also parameters. With 0,
    # fsdp is the same as dp.
    zero_stage: Literal[0, 1, 2, 3] = 3
    # Order in which pipeline stages run forward and backward of the microbatches.
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    virtual_stages: int = 1  # Parts of each stage in an interleaved schedule (arXiv:2104.04473).
    # Between matmuls, split the residual stream over tp along the sequence (Megatron's sequence parallelism), or keep
    # it whole on each device.
    tp_stream: TpStream = "split"
    collective_matmul: bool = False  # Run collectives over tp chunk by chunk, overlapped with matmuls.
    gradient_dtype: Dtype | None = None  # Dtype in which gradients are summed over devices; None: the compute dtype.
    # Attention scores go through memory, or a fused kernel keeps them on the chip and skips the masked half:
    # FlashAttention-2 (arXiv:2307.08691) or cuDNN's.
    attention: Attention = "scores"
    # How attention works on a sequence split over sp: gather keys and values, send them round a ring, or exchange
    # heads for tokens. Scores can go through memory only with gathered keys (`sequence_method`).
    sp_method: SequenceMethod = "gather"
    # 8-bit format of the operands of layers' weight matmuls, except routers' (`models.quantised.products`).
    matmul_dtype: MatmulDtype | None = None
    # Dropout probability of outputs added to the residual stream, and of attention weights if scores go through memory.
    dropout: float = 0.0
    optimizer: Optimizer = "adamw"
    moment_dtype: Dtype | None = None  # Dtype of the optimizer's moments; None: the parameters'.
    master_weights: bool = False  # The optimizer keeps and updates float32 copies of narrower parameters.
    # Action if loss or gradients are not finite or too large. With skip, the compiled step leaves the state unchanged.
    on_bad_step: OnBadStep = "stop"
    profile: FrameworkProfile = XLA  # Framework whose step is planned.
    # Mesh of all devices for the frozen reference of `objective="dpo"`; None: the policy's.
    reference_mesh: MeshShape | None = None

    def __hash__(self) -> int:
        """Hash only the fields that differ most: caches of the search hash strategies very often."""
        return hash((self.num_microbatches, self.zero_stage, self.schedule, self.virtual_stages, self.attention))

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("num_microbatches", "virtual_stages"):
            if getattr(self, field) < 1:
                raise MeshwrightError(f"{field} is {getattr(self, field)}; it takes a whole number from 1")
        if not 0 <= self.dropout < 1:
            raise MeshwrightError(f"dropout is {self.dropout}; it takes a share from 0 to below 1")


DEFAULT = Strategy()
"""The strategy of `meshwright train` without options."""

STAGES_APART = replace(DEFAULT, profile=replace(XLA, spmd_pipeline=False))
"""`DEFAULT` with a separate program for each pipeline stage."""


_FORMER_NAMES = {"sequence": "sp_method", "overlaps_tp": "collective_matmul", "lockstep": "spmd_pipeline"}
_IN_PROFILE = ("spmd_pipeline", "overlaps_gradients", "overlaps_weights")
"""Fields of `FrameworkProfile` that data of earlier versions has as fields of `Strategy`."""


def strategy_from_data(data: Any, path: str = "") -> Strategy:
    """Read a strategy from the plain data of `dataclasses.asdict`, also of earlier versions.

    path: the data's location in its file, for error messages.
    """
    if not isinstance(data, dict):
        return from_data(Strategy, data, path)
    fields = {_FORMER_NAMES.get(name, name): value for name, value in cast(dict[str, Any], data).items()}
    if isinstance(is_split := fields.get("sequence_parallel"), bool):
        del fields["sequence_parallel"]
        fields["tp_stream"] = "split" if is_split else "whole"
    if moved := {name: fields.pop(name) for name in _IN_PROFILE if name in fields}:
        fields["profile"] = {**fields.get("profile", {}), **moved}
    return from_data(Strategy, fields, path)
