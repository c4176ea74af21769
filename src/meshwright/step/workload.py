"""What one step computes: the model, its batch, its dtypes and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from meshwright.errors import MeshwrightError
from meshwright.field_types import check_fields
from meshwright.step.model import Model, ModelConfig, ProgramModel, largest
from meshwright.step.parameter_tree import Parameter
from meshwright.step.trained import frozen_paths

Dtype = Literal["bf16", "f32"]
Remat = Literal["none", "attention", "matmuls", "block", "offload", "alternate"]
Objective = Literal["next-token", "dpo"]
Reference = Literal["live", "precomputed"]

REMATS: tuple[Remat, ...] = ("none", "attention", "matmuls", "block", "offload")
"""What a layer keeps for backward, from most to least of the device's memory.

none: everything but gathered weights. attention: that without attention's scores (arXiv:2205.05198, section 5).
matmuls: the results of its products. block: its input alone. offload: its input alone, in the host's memory.
"""

FOREIGN_REMATS: tuple[Remat, ...] = ("alternate",)
"""What other frameworks keep, to be planned and not run here.

alternate: the results of every second product and of attention, as torchtitan's selective checkpointing of ops does
(github.com/pytorch/torchtitan, `selective_ac_option = "op"`).
"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step: `batch` sequences of `seq_len` tokens, over all devices.

    Parameters and AdamW's two moments are kept in `param_dtype`; products, activations and what is gathered are in
    `compute_dtype`. frozen: patterns of the paths of parameters that are not trained (`step.trained`). They have no
    gradients and no moments, and weights among them are kept in `compute_dtype`, as products use them.

    objective: what is minimised. `next-token`: the mean loss of all tokens. `dpo`: the loss of `batch` pairs of a
    chosen and a rejected answer, so of twice as many sequences, by their log-probabilities under the model and under a
    frozen reference (arXiv:2305.18290). reference: whether each step runs the reference (`live`), or reads what it made
    of all pairs before the first step (`precomputed`).

    packed: rows hold several documents, or padding; the batch then has each token's position in its document, its
    document's id and its target's weight in the loss. z_loss: the coefficient of the loss that keeps the logits'
    normalizer near 1 (PaLM, arXiv:2204.02311, section 5, has 1e-4).
    """

    model: Model
    batch: int
    seq_len: int
    compute_dtype: Dtype = "bf16"
    param_dtype: Dtype = "f32"
    remat: Remat = "block"
    frozen: tuple[str, ...] = ()
    objective: Objective = "next-token"
    reference: Reference = "live"
    packed: bool = False
    z_loss: float = 0.0

    def __hash__(self) -> int:
        """Of what tells most workloads apart: a search looks them up too often to hash every field."""
        return hash((self.model.name, self.batch, self.seq_len, self.remat))

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.z_loss < 1:
            raise MeshwrightError(f"z_loss is {self.z_loss}; it is a coefficient from 0 to below 1, as 1e-4")
        for field in ("batch", "seq_len"):
            if not 1 <= (value := getattr(self, field)) <= largest(field):
                raise MeshwrightError(f"{field} is {value}; it takes a whole number from 1 to {largest(field):,}")
        frozen_paths(self.model, self.frozen)
        if self.objective != "dpo" and self.reference != "live":
            raise MeshwrightError(f"reference={self.reference!r} is for objective='dpo'; {self.objective} has none")
        if self.objective == "dpo" and (self.packed or self.z_loss):
            wrong = "packed=True" if self.packed else f"z_loss={self.z_loss}"
            raise MeshwrightError(f"objective='dpo' has rows of one answer each, and no {wrong}; leave it out")
        if self.objective == "dpo" and isinstance(self.model, ProgramModel):
            raise MeshwrightError(f"objective='dpo' is for models of text; {self.model.name} is written as ops")

    @property
    def frozen_paths(self) -> frozenset[str]:
        """The paths of the parameters that get no gradient: those of `frozen`, and all but adapters beside any."""
        return frozen_paths(self.model, self.frozen)

    def stored_dtype(self, path: str, parameter: Parameter) -> Dtype:
        """What a parameter is kept in: a weight that is frozen as products use it, which changes no number of a step.

        Vectors, which are used in float32, and what is updated are kept in `param_dtype`.
        """
        is_frozen = path in self.frozen_paths and parameter.role != "vector"
        return self.compute_dtype if is_frozen else self.param_dtype

    @property
    def config(self) -> ModelConfig:
        """The model as sizes and features, as what runs wants it; a model written as ops is an error."""
        if isinstance(self.model, ProgramModel):
            raise MeshwrightError(f"{self.model.name} is written as ops; it can be planned, and does not run")
        return self.model

    @property
    def sequences(self) -> int:
        """The sequences of a step, over all devices: two in each pair of answers."""
        return self.batch * (2 if self.objective == "dpo" else 1)

    @property
    def lora_dropout(self) -> float:
        """The share of what adapters read that a train step drops; 0 without adapters."""
        lora = self.model.lora if isinstance(self.model, ModelConfig) else None
        return lora.dropout if lora else 0.0

    @property
    def task(self) -> str:
        """What is done to the model, in words that follow its name on a screen: `train`, `train LoRA 16`."""
        lora = self.model.lora if isinstance(self.model, ModelConfig) else None
        words = f"train LoRA {lora.rank}" if lora else "train"
        return f"{words}, {', '.join(self.frozen)} frozen" if self.frozen else words

    @property
    def in_pairs(self) -> str:
        """How many pairs the sequences are, in words to be put after their number; nothing where they are none."""
        return f" in {self.batch:,} pairs" if self.objective == "dpo" else ""

    @property
    def tokens(self) -> int:
        """The tokens of a step, over all devices."""
        return self.sequences * self.seq_len


QUERY_CHUNK = 1024
"""Queries whose attention scores are held at once."""


def num_query_chunks(seq_len: int) -> int:
    """The chunks of queries that attention goes through, so that scores grow with the sequence and not its square.

    One where the sequence is short, or cannot be cut into chunks of `QUERY_CHUNK`.
    """
    return 1 if seq_len % QUERY_CHUNK else seq_len // QUERY_CHUNK


def can_halve_queries(seq_len: int) -> bool:
    """Whether attention through scores makes none of the first half's queries for keys of the second half.

    Those are a quarter of all, and behind a causal mask, where a device has the whole sequence. Chunks of queries are
    gone through in a loop, in which all are alike and so have every key.
    """
    return seq_len % 2 == 0 and num_query_chunks(seq_len) == 1


@lru_cache(maxsize=1 << 8)
def with_remat(workload: Workload, remat: Remat) -> Workload:
    """The workload with a remat policy, the same object each time."""
    return replace(workload, remat=remat)
