"""What several commands take: the workload, the hardware, and the words of the command line that mean them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.errors import MeshwrightError
from meshwright.hardware import System, parse_system
from meshwright.mesh import MeshShape, parse_mesh
from meshwright.planner import Plan, make_plan, rank, read_plan
from meshwright.units import parse_count
from meshwright.workload import Dtype, ModelConfig, Remat, Workload, load_model

SAID_BY_PLANS = ("on", "batch", "batch_tokens", "seq_len", "dtype", "num_layers")
"""What a plan's file says, so that nothing else may."""

SEQ_LEN = 2048
"""The sequence length where none is said."""


@dataclass(frozen=True)
class Subject:
    """What a command is about; the model may be a plan's file, which then says all the rest."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A preset (tiny, llama3-8b, …), the path of a Hugging Face config.json, or a plan.yaml."""
    on: str | None = None
    """The hardware: a chip and a slice shape or a device count, as v5p:4x4x4, h100:64 or cpu:8."""
    batch: int | None = None
    """Sequences of the global batch."""
    batch_tokens: str | None = None
    """The same in tokens, as 4M; instead of --batch."""
    seq_len: int | None = None
    """Tokens of a sequence (2048 where nothing is said)."""
    dtype: Dtype | None = None
    """What products are computed in: bf16, on simulated CPU devices f32. Parameters and moments are f32."""
    remat: Remat = "block"
    """What a layer keeps for backward: none recomputes nothing, matmuls keeps the products, block only its input."""
    num_layers: int | None = None
    """As many layers instead of the model's own, to look at a part of it."""


def read_subject(subject: Subject) -> tuple[Workload, System]:
    """The workload and the system that the arguments mean."""
    if subject.on is None or (subject.batch is None) == (subject.batch_tokens is None):
        missing = "--on, as --on v5p:4x4x4" if subject.on is None else "one of --batch and --batch-tokens"
        raise MeshwrightError(f"{subject.model} wants {missing}")
    system = parse_system(subject.on)
    seq_len = subject.seq_len or SEQ_LEN
    workload = Workload(
        model=_model(subject),
        batch=subject.batch if subject.batch is not None else _sequences(subject.batch_tokens or "", seq_len),
        seq_len=seq_len,
        compute_dtype=subject.dtype or ("f32" if system.chip.kind == "cpu" else "bf16"),
        remat=subject.remat,
    )
    return workload, system


def choose_plan(subject: Subject, mesh_dim: str | None) -> Plan:
    """The plan that the arguments mean: the one in a file, that of a mesh, or the best there is."""
    if subject.model.endswith((".yaml", ".yml")):
        said = [name for name in SAID_BY_PLANS if getattr(subject, name) is not None]
        if said or mesh_dim is not None:
            raise MeshwrightError(
                f"{subject.model} is a plan and says {', '.join([*said, 'mesh'])} itself; leave it out"
            )
        return read_plan(Path(subject.model))
    workload, system = read_subject(subject)
    if mesh_dim is not None:
        return make_plan(workload, parse_mesh(mesh_dim, num_devices=system.num_devices), system)
    best = rank(workload, system).candidates[0]
    return Plan(workload=workload, hardware=str(system), mesh=MeshShape(**best.mesh), predicted=best)


def _model(subject: Subject) -> ModelConfig:
    """The model, cut to --num-layers."""
    model = load_model(subject.model)
    return model if subject.num_layers is None else replace(model, num_layers=subject.num_layers)


def _sequences(batch_tokens: str, seq_len: int) -> int:
    """The sequences in so many tokens."""
    tokens = parse_count(batch_tokens)
    if tokens % seq_len:
        raise MeshwrightError(
            f"--batch-tokens {batch_tokens} is {tokens} tokens, not a multiple of --seq-len {seq_len}"
        )
    return tokens // seq_len
