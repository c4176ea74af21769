"""How a step is run on a mesh, beyond the degrees of its axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from meshwright.errors import MeshwrightError
from meshwright.field_types import check_fields, from_data
from meshwright.mesh import MeshShape
from meshwright.step.workload import Dtype

Attention = Literal["scores", "flash", "cudnn"]
SequenceMethod = Literal["gather", "ring", "ulysses"]
TpStream = Literal["split", "whole"]
MatmulDtype = Literal["int8", "fp8"]
Optimizer = Literal["adamw", "adamw-8bit", "lion", "adafactor", "sgd", "muon"]
OnBadStep = Literal["stop", "skip"]
RateSchedule = Literal["cosine", "linear", "wsd", "constant"]
"""What the learning rate does after its warm-up (`training.Optimizer`)."""


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """What a framework does otherwise than XLA with the same strategy: planned to be compared, never run here.

    Those of PyTorch, Megatron-LM and DeepSpeed stand in `benchmarks/published_rows.py`.

    Args:
        flat_buffers: weights are gathered into one buffer and copied out of it, gradients copied into one, as PyTorch's
            FSDP does.
        shard_lists: weights and gradients are copied into and from lists of shards, as DeepSpeed of 2021 does.
        fused_elementwise: elementwise ops are compiled into few passes over memory; else each is a kernel.
        fused_loss: the loss has the float32 logits once; else an array for each op.
        recomputes_whole_blocks: a block is recomputed to its end, as PyTorch's checkpoints do unless told to stop
            early, where a compiler leaves out what nothing needs.
    """

    flat_buffers: bool = False
    shard_lists: bool = False
    fused_elementwise: bool = True
    fused_loss: bool = True
    recomputes_whole_blocks: bool = False

    def __str__(self) -> str:
        """What differs from XLA: `flat_buffers=True`."""
        changed = {name: value for name, value in vars(self).items() if value != getattr(XLA, name)}
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "XLA"


XLA = FrameworkProfile()
"""What XLA compiles."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a step is run; the defaults are how `meshwright train` does it. What does not run can be planned.

    Parts of a batch, and stages:

    - num_microbatches: parts of a device's batch that run one after the other, through the stages of pp where there are
      several.
    - schedule, virtual_stages: in which order stages work on them; the parts of each stage in an interleaved schedule
      (arXiv:2104.04473).
    - spmd_pipeline: all stages are one program and go through every tick together, those that have nothing to do on
      zeros, and share the tables before and after the layers; else each runs a program of its own, as Megatron-LM's do.

    What is split, and what hides behind products:

    - zero_stage: what fsdp shards, of ZeRO's stages (arXiv:1910.02054): 1 optimizer state, 2 gradients too, 3
      parameters too, 0 nothing, so that it is another dp.
    - tp_stream: between products the residual stream is split over tp along the sequence (Megatron's sequence
      parallelism), or whole on each device of tp.
    - collective_matmul: collectives over tp run chunk by chunk beside the products that need them.
    - overlaps_gradients: sums of gradients over copies of weights run behind backward, and not after each layer's.
    - overlaps_weights: weights are gathered, and their gradients scattered, beside products.

    Attention, and what is recomputed:

    - attention: scores that go through memory, or a fused kernel that keeps them on the chip and skips the masked half:
      FlashAttention-2 (arXiv:2307.08691) or cuDNN's.
    - sp_method: how queries meet the keys of a sequence that sp splits: keys and values gathered, sent round a ring, or
      heads exchanged for tokens; only gathered ones give scores that go through memory (see `sequence_method`).
    - dropout: the share that is dropped at random of what joins the residual stream, and of attention's weights where
      scores go through memory.

    Formats, and the update:

    - gradient_dtype: in which gradients are summed over devices, where that is not the compute dtype.
    - matmul_dtype: to what operands of the layers' products with weights are rounded (`models.quantised`); but for
      those of a router.
    - optimizer: what keeps moments beside the parameters. moment_dtype: of these, where it is not the parameters'.
    - master_weights: the optimizer updates float32 copies that it keeps of narrower parameters.
    - on_bad_step: what becomes of a step whose loss or gradients are no numbers or too large: with skip the compiled
      step leaves the state as it was.
    - profile: the framework whose step is planned, where it is not XLA.

    The frozen reference of `objective="dpo"`:

    - reference_mesh: the mesh of all devices that its weights and its pass are laid over; None for the policy's.
    """

    num_microbatches: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 3
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    virtual_stages: int = 1
    spmd_pipeline: bool = True
    tp_stream: TpStream = "split"
    collective_matmul: bool = False
    overlaps_gradients: bool = True
    overlaps_weights: bool = True
    gradient_dtype: Dtype | None = None
    attention: Attention = "scores"
    sp_method: SequenceMethod = "gather"
    matmul_dtype: MatmulDtype | None = None
    dropout: float = 0.0
    optimizer: Optimizer = "adamw"
    moment_dtype: Dtype | None = None
    master_weights: bool = False
    on_bad_step: OnBadStep = "stop"
    profile: FrameworkProfile = XLA
    reference_mesh: MeshShape | None = None

    def __hash__(self) -> int:
        """Of what tells most strategies apart: a search looks them up too often to hash every field."""
        return hash((self.num_microbatches, self.zero_stage, self.schedule, self.virtual_stages, self.attention))

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("num_microbatches", "virtual_stages"):
            if getattr(self, field) < 1:
                raise MeshwrightError(f"{field} is {getattr(self, field)}; it takes a whole number from 1")
        if not 0 <= self.dropout < 1:
            raise MeshwrightError(f"dropout is {self.dropout}; it takes a share from 0 to below 1")


DEFAULT = Strategy()
"""What `meshwright train` does."""


_FORMER_NAMES = {"sequence": "sp_method", "overlaps_tp": "collective_matmul", "lockstep": "spmd_pipeline"}


def strategy_from_data(data: Any, path: str = "") -> Strategy:
    """The strategy that `dataclasses.asdict` made plain data of; a file may have the fields' former names.

    path: see `from_data`.
    """
    if not isinstance(data, dict):
        return from_data(Strategy, data, path)
    fields = {_FORMER_NAMES.get(name, name): value for name, value in cast(dict[str, Any], data).items()}
    if isinstance(is_split := fields.get("sequence_parallel"), bool):
        del fields["sequence_parallel"]
        fields["tp_stream"] = "split" if is_split else "whole"
    return from_data(Strategy, fields, path)
