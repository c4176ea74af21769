"""Text from the last checkpoint of a run."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.models import sample, sampling_layout
from meshwright.runtime import DTYPES, ShardingContext, build_mesh
from meshwright.step import check_positions
from meshwright.training.checkpoint import Checkpoints, Note
from meshwright.training.resume import config_conflict
from meshwright.training.run import RunConfig
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
    """The bytes [samples] that follow the prompt, one position after another; no checkpoint is an error.

    The parameters are those of the last checkpoint that has them whole, and nothing else of it is read.
    """
    if mesh_shape.pp > 1:
        raise MeshwrightError(
            f"mesh {mesh_shape} has stages, through which a token goes one by one; generate with pp=1"
        )
    workload, mesh = config.workload, build_mesh(mesh_shape)
    # The last token that is drawn is not read.
    advice = f"at most {{}} bytes of prompt and tokens together: the prompt has {len(prompt)}"
    check_positions(workload.model, len(prompt) + num_tokens - 1, advice)
    with jax.set_mesh(mesh):
        checkpoints = Checkpoints(directory)
        if (step := checkpoints.whole(on_note, parts=("params",))) is None:
            raise MeshwrightError(
                f"{directory} has no checkpoint yet; `meshwright train {shlex.quote(str(directory))} --resume` makes"
                f" one"
            )
        if conflict := config_conflict(config, checkpoints.config(step)):
            raise MeshwrightError(f"checkpoint {step} of {directory} is another model's: {conflict}; put it back")
        wanted = abstract_state(workload, ShardingContext(mesh_shape), config.optimizer, mesh, config.strategy)
        params = checkpoints.restore(step, {"params": wanted["params"]})["params"]
        yield from sample(
            params,
            np.tile(np.frombuffer(prompt, np.uint8).astype(np.int32), (num_samples, 1)),
            workload.config,
            sampling_layout(mesh_shape, num_samples),
            num_tokens=num_tokens,
            temperature=temperature,
            dtype=DTYPES[workload.compute_dtype],
            seed=seed,
        )
