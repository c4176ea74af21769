"""The batch of a step: rows in an order that depends only on the seed, sharded over the mesh, and read in advance."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import MeshwrightError
from meshwright.execution.training.data.mixture import Mixture
from meshwright.execution.training.data.rows import Rows, empty_row
from meshwright.execution.training.data.run_data import RunData

AHEAD = 2
"""Number of batches read in advance; all of them are in memory."""


class Batches:
    """The batch of any step, by the step's number; it does not depend on which steps were read before.

    Args:
        data: the rows of the run's sources.
        sharding: sharding of a batch [rows, seq_len]; each process reads only the rows of its own devices.
        shape: shape of a batch, (rows, seq_len).
        seed: determines the order of the rows.
        order: for each place in a stored row, the position of its token (`runtime.attention.sequence.token_order`);
            None if tokens are stored in order.
        draws: whether a batch contains the PRNG key of its step.

    Attributes:
        held_out: the batches of the held-out rows.
    """

    def __init__(
        self,
        data: RunData,
        sharding: NamedSharding,
        shape: tuple[int, int],
        *,
        seed: int,
        order: np.ndarray | None = None,
        draws: bool = False,
    ) -> None:
        self._data, self._arrangement = data, (sharding, shape, order)
        self._mixture = Mixture(data.training, data.weights, seed)
        self._layout = _Layout(data.training, sharding, shape, order)
        self._names = [rows.name for rows in data.training]
        self._key = NamedSharding(sharding.mesh, PartitionSpec())
        self._seed = seed if draws else None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: dict[int, Future[dict[str, Array]]] = {}
        self.held_out = self.in_order(data.held_out)

    def __getitem__(self, step: int) -> dict[str, Array]:
        """Return the arrays of a step's batch, {name: array}.

        `tokens` and `targets` [rows, seq_len] always. `positions` of the tokens if rows have documents or tokens are
        reordered. If rows have documents, `segments`, the number of a token's document in its row, from 1 (0 for
        padding), and `weights` of the targets, with mean 1. `draws` [2], the PRNG key of the step, with `draws`.
        """
        wanted = range(step, step + 1 + AHEAD)
        self._ahead = {at: batch for at, batch in self._ahead.items() if at in wanted}
        for at in wanted:
            if at not in self._ahead:
                self._ahead[at] = self._reader.submit(self._make, at)
        return self._ahead.pop(step).result()

    def row(self, step: int) -> dict[str, Any]:
        """Return the data fields of a step's metrics: `sources`, `loss_tokens` and, if there are any, `bad_data`.

        `sources` has, for each source in the batch, its tokens, its documents, and `epoch`: how often all its rows have
        been read after the step. `loss_tokens` is the number of targets with a loss. `bad_data` has, for each source,
        the numbers of bad records and of documents split, cut or left out, by kind.
        """
        sources, items = self._items(step)
        epochs = dict(zip(self._names, self._mixture.epochs((step + 1) * self._arrangement[1][0]), strict=True))
        sizes = {
            rows.name: rows.sizes(items[sources == number])
            for number, rows in enumerate(self._data.training)
            if (sources == number).any()
        }
        row: dict[str, Any] = {
            "sources": {
                name: {"tokens": size.tokens, "epoch": round(epochs[name], 6)}
                | ({} if size.documents is None else {"documents": size.documents})
                for name, size in sizes.items()
            },
            "loss_tokens": sum(size.loss_tokens for size in sizes.values()),
        }
        left_out = {
            rows.name: self._data.bad.get(rows.name, {}) | rows.notes
            for rows in self._data.training
            if rows.notes or rows.name in self._data.bad
        }
        return row | ({"bad_data": left_out} if left_out else {})

    def sizes(self, steps: int) -> dict[str, dict[str, float]]:
        """Return {source: {"rows": its number of rows, "epochs": how often they are read in `steps` steps}}."""
        epochs = self._mixture.epochs(steps * self._arrangement[1][0])
        return {
            rows.name: {"rows": rows.count, "epochs": round(each, 6)}
            for rows, each in zip(self._data.training, epochs, strict=True)
        }

    def items(self, step: int) -> dict[str, list[int]]:
        """Return {name of a source: the row numbers, in this source, of its rows in a step's batch, in batch order}."""
        sources, items = self._items(step)
        return {
            rows.name: items[sources == number].tolist()
            for number, rows in enumerate(self._data.training)
            if (sources == number).any()
        }

    def in_order(self, rows: Sequence[Rows]) -> HeldOut:
        """Return the batches of other rows, in the given order, with the same sharding and shape."""
        return HeldOut(rows, *self._arrangement)

    def close(self) -> None:
        """Stop reading."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _items(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each row of a step's batch, the number of its source and its row number in that source."""
        count = self._arrangement[1][0]
        return self._mixture.at(np.arange(step * count, (step + 1) * count))

    def _make(self, step: int) -> dict[str, Array]:
        batch = self._layout.place(*self._items(step))
        if self._seed is not None:
            key = np.array([self._seed % 2**32, step], np.uint32)
            batch["draws"] = jax.make_array_from_callback(key.shape, self._key, lambda index: key[index])
        return batch


class HeldOut:
    """The batches of some rows in order; the last batch is completed with rows of padding.

    Windows have no weights and cannot be padded: the last ones are left out if they do not fill a batch.

    Args:
        rows: the rows of each source.
        sharding: sharding of a batch.
        shape: shape of a batch, (rows, seq_len).
        order: as in `Batches`.
    """

    def __init__(
        self, rows: Sequence[Rows], sharding: NamedSharding, shape: tuple[int, int], order: np.ndarray | None
    ) -> None:
        self._layout = _Layout(rows, sharding, shape, order)
        self._ends = np.cumsum([one.count for one in rows], dtype=np.int64)
        self._count = int(self._ends[-1]) if rows else 0
        self._rows, self._num_rows = rows, shape[0]
        if rows and not len(self):
            raise MeshwrightError(
                f"{self._count} windows are held out, and a batch has {shape[0]}; give a larger --held-out or a"
                " smaller --batch"
            )

    def __len__(self) -> int:
        """Return the number of batches; 0 if nothing is held out."""
        full, rest = divmod(self._count, self._num_rows)
        return full + (rest > 0 and self._layout.can_pad)

    def __getitem__(self, number: int) -> dict[str, Array]:
        """Return a batch in the format of `Batches`."""
        return self._layout.place(*self._part(number))

    def loss_tokens(self, number: int) -> int:
        """Return the number of targets with a loss in a batch: the batch's weight in a mean over batches."""
        sources, items = self._part(number)
        return sum(
            rows.sizes(items[sources == source]).loss_tokens
            for source, rows in enumerate(self._rows)
            if (sources == source).any()
        )

    def _part(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        numbers = np.arange(number * self._num_rows, min((number + 1) * self._num_rows, self._count))
        sources = np.searchsorted(self._ends, numbers, side="right")
        return sources, numbers - np.concatenate([[0], self._ends])[sources]


class _Layout:
    """Converts rows to the arrays of a batch on a mesh.

    Attributes:
        can_pad: whether a batch may be completed with rows of padding; only if rows have weights.
    """

    def __init__(
        self, rows: Sequence[Rows], sharding: NamedSharding, shape: tuple[int, int], order: np.ndarray | None
    ) -> None:
        self._rows, self._sharding, self._shape, self._order = rows, sharding, shape, order
        self._names = rows[0].names if rows else ()
        self.can_pad = "weights" in self._names
        indices: Any = sharding.addressable_devices_indices_map(shape).values()
        self._here = sorted({row for index in indices for row in range(*index[0].indices(shape[0]))})

    def place(self, sources: np.ndarray, items: np.ndarray) -> dict[str, Array]:
        """Return the batch of some rows, completed with rows of padding.

        Args:
            sources: for each row, the number of its source.
            items: for each row, its number in its source.
        """
        read = [
            self._rows[sources[row]].read(int(items[row])) if row < len(items) else empty_row(self._shape[1])
            for row in self._here
        ]
        arrays = {name: np.stack([row[name] for row in read]) for name in self._names}
        if self.can_pad:
            # Scale weights to a mean of 1 over the batch, so that the mean over microbatches is the mean over tokens.
            losses = sum(
                self._rows[source].sizes(items[sources == source]).loss_tokens for source in np.unique(sources)
            )
            arrays["weights"] *= np.float32(self._shape[0] * self._shape[1] / losses)
        if self._order is not None:
            if "positions" not in arrays:
                in_order = np.arange(self._shape[1], dtype=np.int32)
                arrays["positions"] = np.broadcast_to(in_order, arrays["tokens"].shape)
            arrays = {name: array[:, self._order] for name, array in arrays.items()}
        return {name: self._place(array) for name, array in arrays.items()}

    def _place(self, array: np.ndarray) -> Array:
        def part(index: Any) -> np.ndarray:
            rows = range(*index[0].indices(self._shape[0]))
            first = self._here.index(rows.start)
            return array[first : first + len(rows), index[1]]

        return jax.make_array_from_callback(self._shape, self._sharding, part)
