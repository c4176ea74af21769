"""What several commands take: the workload, the hardware, and the words of the command line that mean them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from meshwright.errors import MeshwrightError
from meshwright.hardware import System, parse_system
from meshwright.mesh import parse_mesh
from meshwright.planner import Plan, make_plan, plan_stages, rank, read_plan, run_strategy
from meshwright.units import parse_count
from meshwright.workload import REMATS, Dtype, ModelConfig, Remat, Workload, check_positions, load_model, usual_seq_len

SAID_BY_PLANS = ("on", "batch", "batch_tokens", "seq_len", "dtype", "num_layers")
"""What a plan's file says, so that nothing else may."""


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
    """Tokens of a sequence; where nothing is said, what the model was trained on, 8192 at most, or 2048."""
    dtype: Dtype | None = None
    """What products are computed in: bf16, on simulated CPU devices f32. Parameters and moments are f32."""
    remat: Remat | Literal["auto"] | None = None
    """What a layer keeps for backward, from most to least: none recomputes nothing, attention only scores, matmuls
    keeps the products, block its input, offload that in the host's memory. auto: the planner chooses, as plan does
    where nothing is said; train and verify take block."""
    num_layers: int | None = None
    """As many layers instead of the model's own, to look at a part of it."""
    hardware: Path | None = None
    """A TOML file of a chip of your own, in the form of the project's (meshwright/hardware/data), for --on to name."""


def read_subject(subject: Subject) -> tuple[Workload, System]:
    """The workload and the system that the arguments mean."""
    if subject.on is None or (subject.batch is None) == (subject.batch_tokens is None):
        missing = "--on, as --on v5p:4x4x4" if subject.on is None else "one of --batch and --batch-tokens"
        raise MeshwrightError(f"{subject.model} wants {missing}")
    system, model = parse_system(subject.on, hardware_file=subject.hardware), subject_model(subject)
    seq_len = subject.seq_len or usual_seq_len(model)
    check_positions(model, seq_len)
    workload = Workload(
        model=model,
        batch=subject.batch if subject.batch is not None else _sequences(subject.batch_tokens or "", seq_len),
        seq_len=seq_len,
        compute_dtype=subject.dtype or ("f32" if system.chip.kind == "cpu" else "bf16"),
        remat=remats(subject)[0] if remats(subject) else "block",
    )
    return workload, system


def choose_plan(subject: Subject, mesh_dim: str | None) -> Plan:
    """The plan that the arguments mean: the one in a file, that of a mesh, or the best there is.

    How a mesh with stages is run, its microbatches above all, is the planner's to say.
    """
    if subject.model.endswith((".yaml", ".yml")):
        said = [name for name in SAID_BY_PLANS if getattr(subject, name) is not None]
        if said or mesh_dim is not None:
            raise MeshwrightError(
                f"{subject.model} is a plan and says {', '.join([*said, 'mesh'])} itself; leave it out"
            )
        return read_plan(Path(subject.model))
    workload, system = read_subject(subject)
    if mesh_dim is not None:
        mesh = parse_mesh(mesh_dim, num_devices=system.num_devices)
        if mesh.pp > 1:
            return plan_stages(workload, mesh, system)
        return make_plan(workload, mesh, system, run_strategy(workload.model, mesh, system))
    choices = REMATS if subject.remat == "auto" else (workload.remat,)
    return rank(workload, system, remats=choices, top=1, is_runnable=True).plans[0]


def remats(subject: Subject) -> tuple[Remat, ...]:
    """The one policy that is said; none where the planner is to choose."""
    return () if subject.remat in (None, "auto") else (subject.remat,)


def subject_model(subject: Subject) -> ModelConfig:
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
