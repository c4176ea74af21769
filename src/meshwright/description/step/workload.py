"""A training workload: model, batch, dtypes and remat policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from meshwright.description.step.lora import EMBEDDING, UNEMBEDDING
from meshwright.description.step.model import Model, ModelConfig, ProgramModel, largest
from meshwright.description.step.parameter_tree import Parameter, leaves, parameters
from meshwright.description.step.trained import BaseFormat, can_be_quantised, frozen_paths
from meshwright.errors import MeshwrightError
from meshwright.support.field_types import check_fields

Dtype = Literal["bf16", "f32"]
Remat = Literal["none", "attention", "matmuls", "block", "offload", "alternate", "named"]
Objective = Literal["next-token", "dpo"]
Reference = Literal["live", "precomputed"]

REMATS: tuple[Remat, ...] = ("none", "attention", "matmuls", "block", "offload")
"""Remat policies: what a layer saves for backward, from most to least device memory.

none: everything but gathered weights. attention: the same without attention scores (arXiv:2205.05198, section 5).
matmuls: matmul outputs. block: only the layer's input. offload: only the layer's input, in host memory.
"""

FOREIGN_REMATS: tuple[Remat, ...] = ("alternate", "named")
"""Remat policies of other frameworks, which can be planned and do not run here.

alternate: outputs of every second matmul and of attention, as torchtitan's selective checkpointing of ops
(github.com/pytorch/torchtitan, `selective_ac_option = "op"`). named: the layer's input and the values that the
framework's profile names (`FrameworkProfile.saved_values`), as MaxText's `remat_policy: custom`.
"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step of `batch` sequences (pairs of sequences with dpo) of `seq_len` tokens, over all devices."""

    model: Model
    batch: int
    seq_len: int
    compute_dtype: Dtype = "bf16"  # Dtype of matmuls' operands, activations and gathered weights.
    param_dtype: Dtype = "f32"  # Dtype of trained parameters and the optimizer's moments.
    remat: Remat = "block"
    # Path patterns of frozen parameters (`step.trained`): they have no gradients and no moments, and frozen weights are
    # stored in compute_dtype.
    frozen: tuple[str, ...] = ()
    # Format in which the layers' weights under adapters are stored (`step.trained`); None: compute_dtype.
    quantize_base: BaseFormat | None = None
    # `next-token`: mean loss of all tokens. `dpo`: loss of `batch` pairs of a chosen and a rejected answer, so of
    # twice as many sequences, from log-probabilities under the model and a frozen reference (arXiv:2305.18290).
    objective: Objective = "next-token"
    # `live`: run the reference in each step. `precomputed`: compute its results on all pairs before the first step.
    reference: Reference = "live"
    # Whether rows hold several documents, or padding. Batches then include each token's position in its document, the
    # document's id and the target's loss weight.
    packed: bool = False
    # Coefficient of the z-loss, which keeps the softmax normalizer near 1 (PaLM, arXiv:2204.02311, section 5: 1e-4).
    z_loss: float = 0.0

    def __hash__(self) -> int:
        """Hash only the fields that differ most: caches of the search hash workloads very often."""
        return hash((self.model.name, self.batch, self.seq_len, self.remat))

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.z_loss < 1:
            raise MeshwrightError(f"z_loss is {self.z_loss}; it is a coefficient from 0 to below 1, as 1e-4")
        for field in ("batch", "seq_len"):
            if not 1 <= (value := getattr(self, field)) <= largest(field):
                raise MeshwrightError(f"{field} is {value}; it takes a whole number from 1 to {largest(field):,}")
        frozen_paths(self.model, self.frozen)
        lora = self.model.lora if isinstance(self.model, ModelConfig) else None
        if lora and lora.dora and lora.dropout:
            raise MeshwrightError(
                f"lora_dropout is {lora.dropout:g} with DoRA, in which PEFT multiplies dropped inputs by the frozen"
                " weights too; that is not trained here, use lora_dropout=0"
            )
        if lora and lora.dora and (ends := {EMBEDDING, UNEMBEDDING}.intersection(lora.targets)):
            raise MeshwrightError(
                f"DoRA of {' and '.join(sorted(ends))} is read and merged, and not trained here; leave it out of the"
                " targets"
            )
        if self.quantize_base is not None and lora is None:
            raise MeshwrightError(
                f"quantize_base is {self.quantize_base}, of weights under adapters, and {self.model.name} has none;"
                " give lora_rank too, as 16"
            )
        if self.quantize_base is not None and self.reference == "precomputed":
            raise MeshwrightError(
                f"reference='precomputed' is of weights before they are in {self.quantize_base}; use reference='live'"
            )
        if self.objective != "dpo" and self.reference != "live":
            raise MeshwrightError(f"reference={self.reference!r} is for objective='dpo'; {self.objective} has none")
        if self.objective == "dpo" and (self.packed or self.z_loss):
            wrong = "packed=True" if self.packed else f"z_loss={self.z_loss}"
            raise MeshwrightError(f"objective='dpo' has rows of one answer each, and no {wrong}; leave it out")
        if self.objective == "dpo" and isinstance(self.model, ProgramModel):
            raise MeshwrightError(f"objective='dpo' is for models of text; {self.model.name} is written as ops")

    @property
    def frozen_paths(self) -> frozenset[str]:
        """Paths of parameters without gradient (`trained.frozen_paths`)."""
        return frozen_paths(self.model, self.frozen)

    def stored_dtype(self, path: str, parameter: Parameter) -> Dtype:
        """Return the dtype in which a parameter is stored.

        Frozen weights are stored in `compute_dtype`, in which matmuls use them. Trained parameters, and vectors, which
        are used in float32, are stored in `param_dtype`.
        """
        is_frozen = path in self.frozen_paths and parameter.role != "vector"
        return self.compute_dtype if is_frozen else self.param_dtype

    def base_format(self, path: str, parameter: Parameter) -> BaseFormat | None:
        """Return the format in which a parameter is quantised; None if it is stored in `stored_dtype`."""
        is_base = path in self.frozen_paths and can_be_quantised(parameter)
        return self.quantize_base if is_base else None

    @property
    def base_paths(self) -> frozenset[str]:
        """Paths of the parameters that are quantised (`base_format`)."""
        if self.quantize_base is None:
            return frozenset()
        return frozenset(path for path, each in leaves(parameters(self.model)) if self.base_format(path, each))

    @property
    def config(self) -> ModelConfig:
        """The model as a `ModelConfig`, which running requires. Raises for a model written as ops."""
        if isinstance(self.model, ProgramModel):
            raise MeshwrightError(f"{self.model.name} is written as ops; it can be planned, and does not run")
        return self.model

    @property
    def sequences(self) -> int:
        """Number of sequences in a step, over all devices; with dpo each pair of answers is two."""
        return self.batch * (2 if self.objective == "dpo" else 1)

    @property
    def lora_dropout(self) -> float:
        """Probability of dropping an element of the adapters' inputs in a train step; 0 without adapters."""
        lora = self.model.lora if isinstance(self.model, ModelConfig) else None
        return lora.dropout if lora else 0.0

    @property
    def task(self) -> str:
        """The task, as screens show it after the model's name: `train`, `train LoRA 16`."""
        lora = self.model.lora if isinstance(self.model, ModelConfig) else None
        words = f"train {'DoRA' if lora.dora else 'LoRA'} {lora.rank}" if lora else "train"
        words += f" on {self.quantize_base} weights" if self.quantize_base else ""
        return f"{words}, {', '.join(self.frozen)} frozen" if self.frozen else words

    @property
    def in_pairs(self) -> str:
        """Text for screens, after the number of sequences: ` in 512 pairs` with dpo; else ''."""
        return f" in {self.batch:,} pairs" if self.objective == "dpo" else ""

    @property
    def tokens(self) -> int:
        """Number of tokens in a step, over all devices."""
        return self.sequences * self.seq_len


QUERY_CHUNK = 1024
"""Number of queries whose attention scores are in memory at once."""


def num_query_chunks(seq_len: int) -> int:
    """Return how many chunks of queries attention loops over, which keeps score memory linear in the sequence length.

    1 if `QUERY_CHUNK` does not divide the sequence length.
    """
    return 1 if seq_len % QUERY_CHUNK else seq_len // QUERY_CHUNK


def can_halve_queries(seq_len: int) -> bool:
    """Whether attention with scores in memory can skip the scores of first-half queries with second-half keys.

    The causal mask hides this quarter of the scores. A loop over chunks of queries cannot skip it, because all
    iterations have the same shape, with all keys. Callers check that a device has the whole sequence.
    """
    return seq_len % 2 == 0 and num_query_chunks(seq_len) == 1


@lru_cache(maxsize=1 << 8)
def with_remat(workload: Workload, remat: Remat) -> Workload:
    """Return the workload with another remat policy; the result is cached."""
    return replace(workload, remat=remat)
