"""The train step as a compiled program, with a note when changed inputs require recompilation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from meshwright.execution.training.run_directory.checkpoint import Note
from meshwright.units import show_seconds

MOST_SAID = 3
"""Maximum number of changed arrays that a note describes; the others are only counted."""


class StepProgram:
    """A jitted step (state, batch) -> (state, metrics), compiled ahead of its first call.

    A compiled program takes arrays of one shape, dtype and sharding. If they change, the step is compiled again and a
    note names the changes, because recompiling takes minutes on a large model and is nearly always a mistake.

    Args:
        step: the jitted function from `train_step`.
        on_note: called with the note.
        prepare: (state, batch of the call) -> the batch that `step` takes.

    Attributes:
        compiled: the compiled step; None before the first call.
        compilations: number of times the step was compiled.
        compile_seconds: time spent compiling in the last call; nearly always 0.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Any, dict[str, Array]]],
        on_note: Note,
        prepare: Callable[[Any, Any], Any] = lambda state, batch: batch,
    ) -> None:
        self._step: Any = step
        self._prepare = prepare
        self._on_note = on_note
        self._signature: dict[str, str] = {}
        self.compiled: jax.stages.Compiled | None = None
        self.compilations = 0
        self.compile_seconds = 0.0

    def __call__(self, state: Any, batch: Any) -> tuple[Any, dict[str, Array]]:
        """Take a step: return the state after it and its metrics. Donates `state`."""
        self.compile_seconds, batch = 0.0, self._prepare(state, batch)
        if self.compiled is None:
            self._compile(state, batch)
        assert self.compiled is not None
        try:
            return self.compiled(state, batch)
        except (TypeError, ValueError):
            before, after = self._signature, _signature(state, batch)
            changes = [
                f"{path} is {after.get(path, 'gone')}, and was {before.get(path, 'not there')}"
                for path in {**before, **after}
                if before.get(path) != after.get(path)
            ]
            if not changes:
                raise
        self._compile(state, batch)
        more = f" and {len(changes) - MOST_SAID} more" if len(changes) > MOST_SAID else ""
        self._on_note(
            f"the step was compiled again, in {show_seconds(self.compile_seconds)}:"
            f" {'; '.join(changes[:MOST_SAID])}{more}"
        )
        return self.compiled(state, batch)

    def _compile(self, state: Any, batch: Any) -> None:
        began = time.perf_counter()
        self.compiled = self._step.lower(state, batch).compile()
        self.compile_seconds = time.perf_counter() - began
        self.compilations += 1
        self._signature = _signature(state, batch)


def _signature(state: Any, batch: Any) -> dict[str, str]:
    """Return {path of an array: its dtype, shape and sharding as text} for every array that a step reads."""
    leaves = jax.tree_util.tree_leaves_with_path({"state": state, "batch": batch})
    return {jax.tree_util.keystr(path, simple=True, separator="."): _description(leaf) for path, leaf in leaves}


def _description(leaf: Array) -> str:
    """Return an array's description, such as `float32[4,8] laid ('x',)`."""
    spec = getattr(leaf.sharding, "spec", ())
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" + (f" laid {tuple(spec)}" if any(spec) else "")
