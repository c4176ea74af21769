"""Text from the last checkpoint of a run."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.models import Sampling, generate_tokens
from meshwright.runtime import DTYPES, ShardingContext, build_mesh
from meshwright.step import check_positions
from meshwright.training.checkpoint import Checkpoints, Note
from meshwright.training.resume import config_conflict
from meshwright.training.run import MAX_SEED, RunConfig
from meshwright.training.step import abstract_state


def generate(
    directory: Path,
    config: RunConfig,
    mesh_shape: MeshShape,
    *,
    prompt: bytes,
    num_samples: int,
    num_tokens: int,
    temperature: float,
    seed: int,
    on_note: Note = warnings.warn,
) -> Iterator[np.ndarray]:
    """The bytes [samples] that follow the prompt, one position after another; each sample has the next seed.

    The parameters are those of the last checkpoint that has them whole; no checkpoint is an error.
    """
    workload, mesh = config.workload, build_mesh(mesh_shape)
    # The last token that is drawn is not read.
    advice = f"at most {{}} bytes of prompt and tokens together: the prompt has {len(prompt)}"
    check_positions(workload.model, len(prompt) + num_tokens - 1, advice)
    with jax.set_mesh(mesh):
        yield from generate_tokens(
            restore_params(directory, config, mesh_shape, mesh, on_note),
            [np.frombuffer(prompt, np.uint8)] * num_samples,
            workload.config,
            mesh_shape,
            num_tokens=num_tokens,
            sampling=[
                Sampling(temperature=temperature, seed=(seed + number) % (MAX_SEED + 1))
                for number in range(num_samples)
            ],
            dtype=DTYPES[workload.compute_dtype],
        )


def restore_params(directory: Path, config: RunConfig, mesh_shape: MeshShape, mesh: Mesh, on_note: Note) -> Any:
    """The parameters of the last whole checkpoint of a run, on a mesh; nothing else of it is read.

    To be called under `jax.set_mesh`. Raises where there is none, or where it is another model's.
    """
    if mesh_shape.pp > 1:
        raise MeshwrightError(
            f"mesh {mesh_shape} has stages, through which a token goes one by one; generate with pp=1"
        )
    checkpoints = Checkpoints(directory)
    if (step := checkpoints.whole(on_note, parts=("params",))) is None:
        resume = f"meshwright train {shlex.quote(str(directory))} --resume"
        raise MeshwrightError(f"{directory} has no checkpoint yet; `{resume}` makes one")
    if conflict := config_conflict(config, checkpoints.config(step)):
        raise MeshwrightError(f"checkpoint {step} of {directory} is another model's: {conflict}; put it back")
    wanted = abstract_state(config.workload, ShardingContext(mesh_shape), config.optimizer, mesh, config.strategy)
    return checkpoints.restore(step, {"params": wanted["params"]})["params"]
