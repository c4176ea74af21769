"""Batches of preference pairs, in an order that depends only on the seed, sharded for the policy and the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.attention.sequence import token_order
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.data.pairs import PairData, RunPairs

REFERENCE_BATCH = "of_reference"
"""Name of the batch entry for a live reference model: the same rows, sharded over the reference's mesh."""


class BatchPlacement(NamedTuple):
    """Where the rows of a batch are stored, and in which order of tokens."""

    mesh: Mesh
    layout: ShardingContext
    order: np.ndarray | None  # For each place in a row, the position of its token; None if tokens are in order.

    @classmethod
    def of(cls, mesh: Mesh, layout: ShardingContext, seq_len: int, strategy: Strategy) -> BatchPlacement:
        """Return the placement of batches on a mesh, with the order of tokens that the strategy uses there."""
        return cls(mesh, layout, token_order(seq_len, layout, strategy))

    def rows(self, tokens: np.ndarray, weights: np.ndarray) -> dict[str, Array]:
        """Return the arrays `tokens`, `targets` and `weights` [b, s], and `positions` if tokens are reordered.

        Each process creates the shards of its own devices.

        Args:
            tokens: the tokens of whole rows [b, s + 1], on every process.
            weights: the weights of the targets [b, s].
        """
        arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        if self.order is not None:
            positions = np.broadcast_to(self.order.astype(np.int32), arrays["tokens"].shape)
            arrays = {name: array[:, self.order] for name, array in arrays.items()} | {"positions": positions}
        sharding = NamedSharding(self.mesh, self.layout.spec("batch", "sequence"))
        return {name: put_in_shards(array, sharding) for name, array in arrays.items()}


def put_in_shards(array: np.ndarray, sharding: NamedSharding) -> Array:
    """Return an array with a sharding, from its whole value, which every process has."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


class PairBatches:
    """The batch of any step: pairs in an order determined by the seed, the two rows of a pair adjacent.

    Args:
        pairs: training and held-out pairs.
        workload: the workload, with the number of pairs in a batch.
        policy: placement of the policy's rows.
        reference: placement of the rows of a live reference; None if the reference is precomputed.
        log_probabilities: log-probabilities of all pairs under a precomputed reference, [pairs, 2]; None if it is live.
        seed: determines the order.
        draws: whether a batch contains the PRNG key of its step.
    """

    def __init__(
        self,
        pairs: RunPairs,
        workload: Workload,
        policy: BatchPlacement,
        reference: BatchPlacement | None,
        *,
        log_probabilities: np.ndarray | None = None,
        seed: int,
        draws: bool,
    ) -> None:
        import grain  # As in `mixture`.

        numbers = grain.MapDataset.range(len(pairs.training)).seed(seed).shuffle().repeat()
        self._numbers, self._size = numbers.batch(workload.batch), workload.batch
        self._training, self._held_out = pairs.training, pairs.held_out
        self._data: PairData = pairs.data
        self._policy, self._reference = policy, reference
        self._log_probabilities = log_probabilities
        self._seed = seed if draws else None

    def row(self, step: int) -> dict[str, Any]:
        """Return the data fields of a step's metrics: `epoch`, how often all pairs were read after the step."""
        return {"epoch": round((step + 1) * self._size / len(self._training), 6)}

    def close(self) -> None:
        """Do nothing: this class reads nothing in advance."""

    def items(self, step: int) -> dict[str, list[int]]:
        """Return {"pairs": numbers}: the number of each pair in a step's batch, in batch order."""
        return {"pairs": self._training[np.asarray(self._numbers[step])].tolist()}

    def __getitem__(self, step: int) -> Mapping[str, Any]:
        """Return the batch of a step, in the format of `training.step.abstract_batch`.

        Without `log_probabilities` it has the entry `REFERENCE_BATCH` instead of `reference`.
        """
        batch = self._of(self._training[np.asarray(self._numbers[step])])
        if self._seed is not None:
            draws = np.array([self._seed % 2**32, step], np.uint32)
            batch["draws"] = put_in_shards(draws, NamedSharding(self._policy.mesh, PartitionSpec()))
        return batch

    @property
    def num_held_out(self) -> int:
        """The number of batches of held-out pairs; pairs that do not fill a batch are left out."""
        return len(self._held_out) // self._size

    def held_out(self, number: int) -> dict[str, Any]:
        """Return batch `number` of the held-out pairs, which are in order."""
        return self._of(self._held_out[number * self._size : (number + 1) * self._size])

    def _of(self, numbers: np.ndarray) -> dict[str, Any]:
        """Return the batch of the pairs with these numbers."""
        tokens, weights = self._data.rows(numbers)
        batch: dict[str, Any] = self._policy.rows(tokens, weights)
        mesh, layout, _ = self._policy
        if self._reference is not None:
            batch[REFERENCE_BATCH] = self._reference.rows(tokens, weights)
        if self._log_probabilities is not None:
            rows = self._log_probabilities[numbers].reshape(-1)
            batch["reference"] = put_in_shards(rows, NamedSharding(mesh, layout.spec("batch")))
        return batch
