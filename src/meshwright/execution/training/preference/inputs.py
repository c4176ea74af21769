"""The inputs of a run on preference pairs: its batches, and the log-probabilities of its reference model.

A live reference runs in each step; a precomputed one runs before the first step. The folder `reference/` of the run
directory has the parameters of a live reference, in the compute dtype, as a checkpoint for any mesh; or
`log_probabilities.npz` of a precomputed one. So a run can resume even if its initial weights are gone or changed. The
live reference of a policy with adapters is the policy's own frozen parameters; nothing is stored for it.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding

from meshwright.description.step.parameter_tree import drop_paths, is_adapter, leaves
from meshwright.description.step.reference import ReferencePass, reference_pass, shares_base
from meshwright.description.step.rules import rules_of
from meshwright.description.step.trained import BaseFormat
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.arrays import DTYPES
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.data.pair_batches import REFERENCE_BATCH, BatchPlacement, PairBatches
from meshwright.execution.training.data.pairs import PairData, RunPairs
from meshwright.execution.training.inputs import StepInputs
from meshwright.execution.training.preference.reference import (
    abstract_reference,
    reference_step,
    text_batch,
    to_reference,
    to_saved,
)
from meshwright.execution.training.run_directory.checkpoint import Checkpoints, Note
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.step import State, first_parameters
from meshwright.execution.training.watch.evaluation import HeldOutPairs
from meshwright.support.files import write_file

FOLDER, FILE = "reference", "log_probabilities.npz"


def pair_inputs(
    config: RunConfig,
    directory: Path,
    pairs: RunPairs,
    mesh: Mesh,
    start: int,
    on_note: Note,
    on_bytes: Callable[[int], None],
) -> StepInputs:
    """Return the inputs of a run on preference pairs from step `start`: pairs, and their reference log-probabilities.

    The reference model is the initial policy. A resumed run reads what its directory has of it: the parameters of a
    live reference, or the log-probabilities of a precomputed one.

    Args:
        mesh: the devices of the policy.
        on_bytes: called with the number of bytes of each part of weights that is read.

    Raises:
        MeshwrightError: these files are gone or damaged, or the log-probabilities are of other pairs.
    """
    layout, seq_len = ShardingContext(config.mesh, rules_of(config.strategy)), config.workload.seq_len
    policy = BatchPlacement.of(mesh, layout, seq_len, config.strategy)
    more = {"seed": config.seed, "draws": config.draws}
    data = pairs.data
    epochs = config.steps * config.workload.batch / len(pairs.training)
    counts = {"pairs": len(pairs.training), "epochs": round(epochs, 6)} | data.counts
    if words := data.describe():
        on_note(words)
    # A precomputed reference runs like a live one, on the policy's mesh.
    reference = reference_pass(replace(config.workload, reference="live"), config.mesh, config.strategy)
    assert reference is not None
    if config.workload.reference == "precomputed":
        log_probabilities = (
            _read(directory, data) if start else _log_probabilities(config, reference, mesh, data, on_bytes)
        )
        batches = PairBatches(pairs, config.workload, policy, None, log_probabilities=log_probabilities, **more)
        held_out = HeldOutPairs(batches.num_held_out, lambda _, number: batches.held_out(number))
        return StepInputs(batches, held_out, keep=lambda: _write(directory, log_probabilities, data), counts=counts)
    there = build_mesh(reference.mesh)
    has_adapters = config.workload.config.lora is not None
    if shares_base(config.workload, config.mesh, config.strategy):
        params = None
    elif start and not has_adapters:
        params = _restored(directory, reference, there)
    else:
        params = _first(config, reference, there, on_bytes)
    run, rows = _compiled(reference, there, config.workload.quantize_base), NamedSharding(mesh, layout.spec("batch"))

    def prepare(state: State, batch: Mapping[str, Any]) -> Mapping[str, Array]:
        text = {name: array for name, array in batch.items() if name != REFERENCE_BATCH}
        base = _without_adapters(state["params"]) if params is None else params
        with jax.set_mesh(there):
            made = run(base, batch[REFERENCE_BATCH])
        return text | {"reference": jax.device_put(made, rows)}

    def keep() -> None:
        # With adapters, the base weights are read or initialised again on resume, and checked (`run_directory.frozen`).
        if not has_adapters:
            with jax.set_mesh(there):
                _save(directory, config, to_saved(params, reference, there))

    place = BatchPlacement.of(
        there, ShardingContext(reference.mesh, rules_of(reference.strategy)), seq_len, reference.strategy
    )
    batches = PairBatches(pairs, config.workload, policy, place, **more)
    held_out = HeldOutPairs(
        batches.num_held_out, lambda params, number: prepare({"params": params}, batches.held_out(number))
    )
    return StepInputs(batches, held_out, prepare, keep, counts)


def _without_adapters(params: Any) -> Any:
    """Return the parameters of a model without its adapters; the arrays are not copied."""
    return drop_paths(params, [path for path, _ in leaves(params) if is_adapter(path)])


def _compiled(reference: ReferencePass, mesh: Mesh, base: BaseFormat | None = None) -> Callable[..., Array]:
    """Return the reference's forward pass, compiled for its mesh: (params, batch) -> log-probability [b] of each row.

    base: the format of the policy's quantised weights, if the reference reads these.
    """
    with jax.set_mesh(mesh):
        return (
            reference_step(reference)
            .lower(abstract_reference(reference, mesh, base=base), text_batch(reference, mesh))
            .compile()
        )


def _first(config: RunConfig, reference: ReferencePass, mesh: Mesh, on_bytes: Callable[[int], None]) -> Any:
    """Return the policy's initial parameters, on the reference's mesh in the compute dtype.

    They are first rounded to the policy's parameter dtype, so that both models start with the same values.
    """
    weights, layout = config.weights, ShardingContext(reference.mesh, rules_of(reference.strategy))
    wanted, dtype = abstract_reference(reference, mesh, is_saved=True), DTYPES[config.workload.param_dtype]
    with jax.set_mesh(mesh):
        drawn = first_parameters(
            reference.workload, layout, mesh, config.strategy,
            seed=config.seed, weights=Path(weights) if weights else None, on_bytes=on_bytes,
        )  # fmt: skip
        round_as = jax.jit(lambda drawn: jax.tree.map(lambda a, to: a.astype(dtype).astype(to.dtype), drawn, wanted))
        return to_reference(round_as(drawn), reference, mesh)


def _save(directory: Path, config: RunConfig, params: Any) -> None:
    """Write the parameters of a live reference into the run directory, if they are not there yet."""
    with Checkpoints(directory / FOLDER) as checkpoints:
        if checkpoints.latest is None:
            checkpoints.save(0, {"params": params}, {"config": config.to_json()})
            checkpoints.commit()


def _restored(directory: Path, reference: ReferencePass, mesh: Mesh) -> Any:
    """Return the parameters of a run's live reference from the run directory, on `mesh`."""
    checkpoints = Checkpoints(directory / FOLDER)
    if checkpoints.whole(lambda line: None) is None:
        raise MeshwrightError(
            f"{directory} has lost its {FOLDER}/, the frozen model that it trains against; put it back"
        )
    with jax.set_mesh(mesh):
        saved = checkpoints.restore(0, {"params": abstract_reference(reference, mesh, is_saved=True)})["params"]
        return to_reference(saved, reference, mesh)


def _log_probabilities(
    config: RunConfig, reference: ReferencePass, mesh: Mesh, data: PairData, on_bytes: Callable[[int], None]
) -> np.ndarray:
    """Return the log-probabilities of all pairs' answers under the reference, [pairs, 2]: chosen, rejected.

    The reference's parameters are freed afterwards.
    """
    size, run = reference.workload.batch, _compiled(reference, mesh)
    params = _first(config, reference, mesh, on_bytes)
    layout = ShardingContext(reference.mesh, rules_of(reference.strategy))
    place = BatchPlacement.of(mesh, layout, reference.workload.seq_len, reference.strategy)
    batches: list[np.ndarray] = []
    for at in range(0, len(data), size):
        # The last batch is completed with the first pairs.
        numbers = np.arange(at, at + size) % len(data)
        tokens, weights = data.rows(numbers)
        with jax.set_mesh(mesh):
            batches.append(np.asarray(process_allgather(run(params, place.rows(tokens, weights)), tiled=True)))
    return np.concatenate(batches).reshape(-1, 2)[: len(data)]


def _write(directory: Path, log_probabilities: np.ndarray, data: PairData) -> None:
    """Write the log-probabilities and the fingerprint of their pairs into the run directory, if not there yet."""
    if jax.process_index() or (directory / FOLDER / FILE).is_file():
        return
    out = io.BytesIO()
    np.savez(out, log_probabilities=log_probabilities, pairs=np.array(data.fingerprint))
    (directory / FOLDER).mkdir(exist_ok=True)
    write_file(directory / FOLDER / FILE, out.getvalue())


def _read(directory: Path, data: PairData) -> np.ndarray:
    """Return the precomputed log-probabilities [pairs, 2]; a `MeshwrightError` if they are gone or of other pairs."""
    path = directory / FOLDER / FILE
    try:
        with np.load(path) as kept:
            log_probabilities, pairs = kept["log_probabilities"], str(kept["pairs"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise MeshwrightError(
            f"cannot read {path}, what the reference made of all pairs: {error}; put it back"
        ) from None
    if pairs != data.fingerprint:
        raise MeshwrightError(
            f"{path} is of other pairs than --data, --seq-len and the tokenizer give now; a run whose reference is"
            f" precomputed continues with its own alone"
        )
    return log_probabilities
