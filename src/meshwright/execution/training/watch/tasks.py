"""Multiple-choice questions that a run answers during training, on its own mesh with its own sharded parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.execution.models.inference.tasks import TaskFigures, answer, check_answerable, read_task
from meshwright.execution.text.tokenizer import Tokenizer, byte_tokenizer_for
from meshwright.execution.training.run_directory.run import RunConfig


class Tasks:
    """Answers the same questions at each evaluation. `meshwright eval --task` on that step's checkpoint gives the same.

    Args:
        config: config of the run.
        mesh: mesh of the run's devices.
        tokenizer: tokenizer of the run; None if it reads text as bytes.

    Raises:
        MeshwrightError: a file is not a task, the model cannot read its questions, or the mesh has pipeline stages.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, tokenizer: Tokenizer | None) -> None:
        model, workload = config.workload.config, config.workload
        if config.mesh.pp > 1:
            raise MeshwrightError(
                f"--eval-tasks has every device run all layers, and mesh {config.mesh} has {config.mesh.pp} stages; use"
                f" pp=1, or answer the questions with a checkpoint: `meshwright eval RUN --task FILE`"
            )
        if (reader := tokenizer or byte_tokenizer_for(model.vocab)) is None:
            raise MeshwrightError(
                f"--eval-tasks needs a tokenizer; {model.name} has none, and its vocabulary of {model.vocab} is not the"
                f" 256 bytes"
            )
        # Without parameters: `__call__` gets those of the evaluated step.
        self._model = LoadedModel(
            config=model,
            params={},
            mesh=mesh,
            mesh_shape=config.mesh,
            system=config.system,
            dtype=workload.compute_dtype,
            stored_dtype=workload.param_dtype,
            tokenizer=reader,
            source={},
            seq_len=workload.seq_len,
        )
        self._questions = {}
        for path in (Path(config.data.find_path(task)) for task in config.evaluating.tasks):
            if path.stem in self._questions:
                raise MeshwrightError(
                    f"--eval-tasks has two files called {path.stem}, by which metrics are named; rename one"
                )
            self._questions[path.stem] = read_task(path)
            check_answerable(self._model, self._questions[path.stem])

    def __call__(self, params: Any) -> dict[str, TaskFigures]:
        """Return {name of the task: its scores} for some parameters, which are not copied. All processes call this."""
        model = replace(self._model, params=params)
        return {name: answer(model, questions).figures() for name, questions in self._questions.items()}
