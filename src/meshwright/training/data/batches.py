"""A step's batch: windows of the corpus in an order that only the seed decides, laid over the mesh."""

from __future__ import annotations

import grain
import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.step import Workload
from meshwright.training.data.corpus import check_corpus


class Batches:
    """The batch of any step: windows of the corpus in a shuffled order that only the seed decides.

    A step's batch does not depend on the steps before it, so a resumed run reads what an unbroken one would have.
    order: token positions in storage order, from `runtime.token_order`; part of the batch where it is not None.
    draws: whether a part of it is the key of what a step draws at random.
    """

    def __init__(
        self,
        corpus: np.ndarray,
        workload: Workload,
        sharding: NamedSharding,
        *,
        seed: int,
        order: np.ndarray | None = None,
        draws: bool = False,
    ) -> None:
        window = workload.seq_len + 1
        check_corpus(corpus, workload)
        # Each window overlaps the next by one token: the last target is the next window's first token.
        count = (len(corpus) - 1) // workload.seq_len
        windows = grain.MapDataset.range(count).seed(seed).shuffle().repeat()
        self._batches = windows.map(lambda i: corpus[i * workload.seq_len :][:window]).batch(workload.batch)
        self._sharding = sharding
        self._order = order
        self._seed = seed if draws else None

    def __getitem__(self, step: int) -> dict[str, Array]:
        """`tokens` and `targets` [batch, sequence] of a step, `positions` of tokens that lie in no order, `draws` [2].

        Each process makes the shards of its own devices.
        """
        windows = np.asarray(self._batches[step]).astype(np.int32)
        halves = {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
        if self._order is not None:
            positions = np.broadcast_to(self._order.astype(np.int32), halves["tokens"].shape)
            halves = {name: half[:, self._order] for name, half in halves.items()} | {"positions": positions}
        batch = {name: self._place(half, self._sharding) for name, half in halves.items()}
        if self._seed is not None:
            whole = NamedSharding(self._sharding.mesh, PartitionSpec())
            batch["draws"] = self._place(np.array([self._seed % 2**32, step], np.uint32), whole)
        return batch

    def _place(self, array: np.ndarray, sharding: NamedSharding) -> Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
