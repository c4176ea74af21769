"""What one step computes: the model, its batch, its dtypes and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import MeshwrightError
from meshwright.workload.config import ModelConfig, model_from_data

Dtype = Literal["bf16", "f32"]
Remat = Literal["none", "matmuls", "block"]

REMATS: tuple[Remat, ...] = ("none", "matmuls", "block")
"""What a layer keeps for backward: everything but gathered weights, the results of its products, or its input alone."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step: `batch` sequences of `seq_len` tokens, over all devices.

    Parameters and AdamW's two moments are kept in `param_dtype`; products, activations and what is gathered are in
    `compute_dtype`.
    """

    model: ModelConfig
    batch: int
    seq_len: int
    compute_dtype: Dtype = "bf16"
    param_dtype: Dtype = "f32"
    remat: Remat = "block"

    def __post_init__(self) -> None:
        for field in ("batch", "seq_len"):
            if getattr(self, field) < 1:
                raise MeshwrightError(f"{field} is {getattr(self, field)}; it takes a whole number from 1")
        if self.remat not in REMATS:
            raise MeshwrightError(f"remat is {self.remat!r}; it is one of {', '.join(REMATS)}")

    @property
    def tokens(self) -> int:
        """The tokens of a step, over all devices."""
        return self.batch * self.seq_len


QUERY_CHUNK = 1024
"""Queries whose attention scores are held at once."""


def num_query_chunks(seq_len: int) -> int:
    """The chunks of queries that attention goes through, so that scores grow with the sequence and not its square.

    One where the sequence is short, or cannot be cut into chunks of `QUERY_CHUNK`.
    """
    return 1 if seq_len % QUERY_CHUNK else seq_len // QUERY_CHUNK


def workload_from_data(data: dict[str, Any]) -> Workload:
    """The workload that `dataclasses.asdict` took apart."""
    rest = {key: value for key, value in data.items() if key != "model"}
    return Workload(model=model_from_data(data["model"]), **rest)
