"""Where values lie: logical axes to PartitionSpecs by the rules, and the moves between layouts, which communicate."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.mesh import MeshShape
from meshwright.workload import (
    IN_USE,
    RULES,
    Rules,
    Spec,
    spec,
)


@dataclass(frozen=True)
class Layout:
    """A mesh shape with its rules: all that a model is told about how its values lie."""

    mesh: MeshShape
    rules: Rules = field(default_factory=lambda: RULES)

    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes, of more than one device, that split a dim of this logical axis."""
        return spec((name,), mesh=self.mesh, rules=self.rules)[0]

    def spec(self, *names: str, unreduced: tuple[str, ...] = (), reduced: tuple[str, ...] = ()) -> P:
        """The PartitionSpec of an array with these logical axes.

        unreduced: mesh axes over which its values still have to be summed. reduced: mesh axes over which its gradient
        will have to be.
        """
        return self._partition(spec(names, mesh=self.mesh, rules=self.rules), unreduced, reduced)

    def place(self, x: Array, *names: str, reduced: tuple[str, ...] = ()) -> Array:
        """`x` laid as these logical axes say, by the collective that takes it there.

        From axis to no axis it is an all-gather, from unreduced to split a reduce-scatter, from unreduced to whole an
        all-reduce, from dim to dim an all-to-all. `reduced` is as in `spec`.
        """
        return jax.reshard(x, self.spec(*names, reduced=reduced))

    def weight(self, stored: Array, *names: str, along: str = "sequence") -> Array:
        """A parameter as products use it: gathered over the axes that merely store it (ZeRO-3).

        Its gradient has to be summed over every axis that splits tokens, but for those that split it too and have other
        tokens brought to them (experts). Backward, the gather becomes a reduce-scatter onto the shards; the sum over
        axes that hold copies comes after it, when a shard is all there is to sum. along: the logical axis of the
        sequence in what it multiplies.
        """
        tokens = (*self.rules["batch"], *self.rules[along])
        kept = spec(names, mesh=self.mesh, rules=self.rules)
        used = spec(tuple(IN_USE.get(name, name) for name in names), mesh=self.mesh, rules=self.rules)
        copies, summed = (
            tuple(axis for axis in tokens if not any(axis in dim for dim in dims)) for dims in (kept, used)
        )
        shard = jax.reshard(stored, self._partition(kept, (), copies))
        return jax.reshard(shard, self._partition(used, (), summed))

    def _partition(self, dims: Spec, unreduced: tuple[str, ...], reduced: tuple[str, ...]) -> P:
        """A PartitionSpec without axes of degree 1, which would give different types to equal layouts."""
        return P(*(dim or None for dim in dims), unreduced=self._live(unreduced), reduced=self._live(reduced))

    def _live(self, axes: tuple[str, ...]) -> frozenset[str]:
        """The axes that have more than one device."""
        return frozenset(axis for axis in axes if self.mesh.degrees[axis] > 1)
