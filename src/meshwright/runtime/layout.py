"""Where values lie: logical axes to PartitionSpecs by the rules, and the moves between layouts, which communicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.mesh import MeshShape
from meshwright.workload import (
    DEFAULT,
    IN_USE,
    Rules,
    Spec,
    check_rules,
    rules_of,
    spec,
)


@dataclass(frozen=True)
class Layout:
    """A mesh shape with its rules: all that a model is told about how its values lie.

    gradient_dtype: in which gradients of weights are summed over devices, where it is not that of the products.
    is_stage: whether what it lays is mapped over the stages of a pipeline, and so has no dim of them.
    """

    mesh: MeshShape
    rules: Rules = field(default_factory=lambda: rules_of(DEFAULT))
    gradient_dtype: Any = None
    is_stage: bool = False

    def __post_init__(self) -> None:
        check_rules(self.rules)

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

    def weight(self, stored: Array, *names: str, dtype: Any = None, along: str = "sequence") -> Array:
        """A parameter as products in `dtype` use it: narrowed, then gathered over axes that merely store it (ZeRO-3).

        Its gradient has to be summed over every axis that splits tokens, but for those that split it too and have other
        tokens brought to them (experts). Backward, the gather becomes a reduce-scatter onto the shards; the sum over
        axes that hold copies comes after it, when a shard is all there is to sum. along: the logical axis of the
        sequence in what it multiplies.
        """
        gather = partial(self._gather, names=names, along=along)
        if self.gradient_dtype is None:
            return gather(stored.astype(dtype or stored.dtype))
        return _transposed_in(self.gradient_dtype, gather, dtype or stored.dtype)(stored)

    def _gather(self, stored: Array, *, names: tuple[str, ...], along: str) -> Array:
        return self._summed(self.shard(stored, *names, along=along), *(IN_USE.get(n, n) for n in names), along=along)

    def shard(self, stored: Array, *names: str, along: str = "sequence") -> Array:
        """A parameter as it is stored, its gradient yet to be summed over the axes that hold copies of a shard."""
        return self._summed(stored, *names, along=along)

    @property
    def gathered(self) -> Layout:
        """The same layout with no axes that merely store parameters: what `weight` returns lies as it says."""
        return replace(self, rules={**self.rules, **dict.fromkeys(IN_USE, ())})

    def _summed(self, x: Array, *names: str, along: str) -> Array:
        """`x` laid as `names` say, its gradient yet to be summed over the axes of tokens that do not split it."""
        tokens = (*self.rules["batch"], *self.rules[along])
        dims = spec(names, mesh=self.mesh, rules=self.rules)
        whole = tuple(axis for axis in tokens if not any(axis in dim for dim in dims))
        return jax.reshard(x, self._partition(dims, (), whole))

    def _partition(self, dims: Spec, unreduced: tuple[str, ...], reduced: tuple[str, ...]) -> P:
        """A PartitionSpec without axes of degree 1, which would give different types to equal layouts."""
        return P(*(dim or None for dim in dims), unreduced=self._live(unreduced), reduced=self._live(reduced))

    def _live(self, axes: tuple[str, ...]) -> frozenset[str]:
        """The axes that have more than one device."""
        return frozenset(axis for axis in axes if self.mesh.degrees[axis] > 1)


def _transposed_in(wide: Any, move: Callable[[Array], Array], dtype: Any) -> Callable[[Array], Array]:
    """What moves an array in one dtype, and its cotangent the way back in another."""

    @jax.custom_vjp
    def moved(x: Array) -> Array:
        return move(x.astype(dtype))

    def backward(x: Array, cotangent: Array) -> tuple[Array]:
        _, back = jax.vjp(move, x.astype(wide))
        return (back(cotangent.astype(wide))[0].astype(x.dtype),)

    moved.defvjp(lambda x: (moved(x), x), backward)
    return moved


def cotangent_spec(x: Array) -> P:
    """The spec of an array's cotangent: where the array is typed reduced, its cotangent is still to be summed."""
    spec = jax.typeof(x).sharding.spec
    return P(*spec.partitions, unreduced=spec.reduced)
