"""The batches of a run of `meshwright.fit`: read in order, checked, and sharded over the mesh."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental.multihost_utils import process_allgather

from meshwright.errors import MeshwrightError
from meshwright.proof.program_plans.fit.step import describe, differences, leaf_paths

Batches = Iterable[Any] | Callable[[int], Any]
"""Batches in order, or a function that returns the batch of a step, counted from 0."""


class PlacedBatches:
    """The batches of a run, sharded as planned: `batches[step]`, each step once and in order.

    Args:
        batches: batches of host arrays. With several processes, each yields the rows of its own devices, or all rows.
        planned: the shape, dtype and sharding of each array of a batch.
        start: number of steps taken before. An iterable skips this number of batches, unless it has `set_state` and the
            checkpoint has its position.
        saved: the `position` stored in the checkpoint; None without a checkpoint.

    Raises:
        MeshwrightError: the batches end before step `start`.
    """

    def __init__(self, batches: Batches, planned: Any, start: int, saved: Mapping[str, Any] | None) -> None:
        self._planned = planned
        self._start = start
        self._of_step: Callable[[int], Any] | None = None
        self._iterator: Iterator[Any] = iter(())
        self._before: tuple[int, Any] = (0, None)  # A step, and the position before its batch.
        self._last: Any = None
        self.has_ended = False
        if callable(batches) and not isinstance(batches, Iterable):
            self._of_step = batches
        elif isinstance(batches, Iterable):
            self._iterator = iter(batches)
            self._go_on(saved)
        else:
            raise MeshwrightError(
                f"batches is {type(batches).__name__}; it is an iterable of batches, or a function of the step"
            )

    def __getitem__(self, step: int) -> Any:
        """Return the batch of a step. After the last one, set `has_ended` and return the previous batch again."""
        if self._of_step is not None:
            return self._place(self._of_step(step), step)
        if hasattr(self._iterator, "get_state"):
            # The next batch is read while a step runs, so the checkpoint after the step needs the position before it.
            self._before = (step, self._position())
        try:
            batch = next(self._iterator)
        except StopIteration:
            taken = step - self._start
            if not taken or jax.process_count() > 1:  # Other processes may still have batches.
                raise MeshwrightError(
                    f"batches ended before step {step + 1}" + ("" if step else ": there is none")
                ) from None
            self.has_ended = True
            return self._last
        self._last = self._place(batch, step)
        return self._last

    def position(self, taken: int) -> dict[str, Any]:
        """Return plain data from which reading can resume after `taken` steps. All processes must call it."""
        if not hasattr(self._iterator, "get_state"):
            return {}
        step, before = self._before
        own = np.frombuffer(json.dumps(before if step == taken else self._position()).encode(), np.uint8)
        if jax.process_count() == 1:
            return {"positions": [own.tobytes().decode()]}
        sizes = process_allgather(np.int32(own.size))
        every = process_allgather(np.pad(own, (0, sizes.max() - own.size)))
        return {"positions": [row[:size].tobytes().decode() for row, size in zip(every, sizes, strict=True)]}

    def _position(self) -> Any:
        """Return the iterator's state as plain data; bytes are encoded."""
        state: Any = self._iterator.get_state()  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(state, bytes):
            return {"base64": base64.b64encode(state).decode()}
        try:
            return {"data": json.loads(json.dumps(state))}
        except (TypeError, ValueError):
            raise MeshwrightError(
                f"batches.get_state() returns {type(state).__name__}, which no checkpoint can hold; it is to return"
                " bytes, or what JSON can hold"
            ) from None

    def _go_on(self, saved: Mapping[str, Any] | None) -> None:
        """Advance a new iterator to the batch of step `start`: set its saved state, or skip batches."""
        positions = (saved or {}).get("positions")
        if positions and hasattr(self._iterator, "set_state"):
            if len(positions) != jax.process_count():
                raise MeshwrightError(
                    f"the checkpoint has the positions of {len(positions)} processes' batches, and there are"
                    f" {jax.process_count()} now; batches(step), or batches without set_state, continue with any number"
                )
            state = json.loads(positions[jax.process_index()])
            is_bytes = "base64" in state
            self._iterator.set_state(  # pyright: ignore[reportAttributeAccessIssue]
                base64.b64decode(state["base64"]) if is_bytes else state["data"]
            )
            return
        for number in range(self._start):
            try:
                next(self._iterator)
            except StopIteration:
                raise MeshwrightError(
                    f"batches has {number}, and the run continues after {self._start} steps: begin it at the same batch"
                    " as before"
                ) from None

    def _place(self, batch: Any, step: int) -> Any:
        """Return a batch on the mesh; raise if its arrays differ from the planned ones."""
        if jax.tree.structure(batch) != jax.tree.structure(self._planned):
            lines = differences(jax.tree.map(np.asarray, batch), self._planned)
            how = lines[0] if lines else f"it is a {type(batch).__name__}"
            raise MeshwrightError(f"the batch of step {step + 1} is not the one that the plan was made for: {how}")
        paths = [path for path, _ in leaf_paths(self._planned)]
        leaves = zip(paths, jax.tree.leaves(batch), jax.tree.leaves(self._planned), strict=True)
        return jax.tree.unflatten(
            jax.tree.structure(self._planned), [_placed(path, leaf, planned, step) for path, leaf, planned in leaves]
        )


def _placed(path: str, leaf: Any, planned: jax.ShapeDtypeStruct, step: int) -> Array:
    """Return an array of a batch with its planned sharding; raise if it is not as planned. path: of the array."""
    is_placed = isinstance(leaf, Array)
    array = leaf if is_placed else np.asarray(leaf)
    is_whole = jax.process_count() == 1 or (is_placed and not leaf.is_fully_addressable)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)  # NumPy's integers are int64, JAX's int32.
    if dtype != planned.dtype or array.ndim != len(planned.shape) or (is_whole and array.shape != planned.shape):
        found = describe(jax.ShapeDtypeStruct(array.shape, dtype))
        raise MeshwrightError(
            f"the batch of step {step + 1} is not the one that the plan was made for: {path} is {found}, and is to be"
            f" {describe(planned)}"
        )
    assert planned.sharding is not None
    if is_whole and is_placed:
        return jax.device_put(array, planned.sharding)
    try:
        return jax.make_array_from_process_local_data(planned.sharding, np.asarray(array, dtype), planned.shape)
    except ValueError as error:
        raise MeshwrightError(
            f"the batch of step {step + 1} is not this process's part of {path}, {describe(planned)}:"
            f" {str(error).splitlines()[0][:200]}"
        ) from None
