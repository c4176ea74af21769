"""Derive PartitionSpecs from logical axes by the sharding rules, and reshard arrays to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.description.step.parameter_tree import IN_USE
from meshwright.description.step.rules import Rules, Spec, check_rules, rules_of, spec
from meshwright.description.step.serving import CacheSplit
from meshwright.description.step.strategy import DEFAULT
from meshwright.mesh import MeshShape


@dataclass(frozen=True)
class ShardingContext:
    """A mesh shape with its sharding rules, from which a model's values get their shardings.

    Attributes:
        mesh: the degrees of the mesh axes.
        rules: the mesh axes that shard each logical axis.
        gradient_dtype: dtype in which gradients of weights are summed over devices; None for the dtype of the matmuls.
        is_stage: whether values are mapped over pipeline stages (`vmap`) and therefore have no stage dim.
        cache_split: None in training. In generation, where weights are stationary (`models.generation.stationary`), the
            dim of the cache that is split besides heads.
    """

    mesh: MeshShape
    rules: Rules = field(default_factory=lambda: rules_of(DEFAULT))
    gradient_dtype: Any = None
    is_stage: bool = False
    cache_split: CacheSplit | None = None

    def __post_init__(self) -> None:
        check_rules(self.rules)

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes of degree above 1 that shard a logical axis."""
        return spec((name,), mesh=self.mesh, rules=self.rules)[0]

    def spec(self, *names: str, unreduced: tuple[str, ...] = (), reduced: tuple[str, ...] = ()) -> P:
        """Return the PartitionSpec of an array with these logical axes.

        unreduced: mesh axes over which the values are partial sums. reduced: mesh axes over which the gradient will be
        partial sums.
        """
        return self._partition(spec(names, mesh=self.mesh, rules=self.rules), unreduced, reduced)

    def place(self, x: Array, *names: str, reduced: tuple[str, ...] = ()) -> Array:
        """Return `x` resharded to the spec of these logical axes.

        The collective follows from the change: from sharded to replicated an all-gather, from unreduced to sharded a
        reduce-scatter, from unreduced to replicated an all-reduce, from one dim to another an all-to-all. `reduced` is
        as in `spec`.
        """
        return jax.reshard(x, self.spec(*names, reduced=reduced))

    def weight(self, stored: Array, *names: str, dtype: Any = None, along: str = "sequence") -> Array:
        """Return a parameter as matmuls use it: in `dtype`, gathered over the axes that split only storage (ZeRO-3).

        Its gradient is summed over every mesh axis that shards tokens, except those that shard experts, since tokens
        are sent along them. In backward the gather becomes a reduce-scatter onto the shards, followed by an all-reduce
        of each shard over replicas.

        Args:
            names: logical axes of the parameter's dims.
            dtype: default: the parameter's.
            along: logical axis of the sequence dim in the activations that the parameter multiplies.
        """

        def gather(x: Array) -> Array:
            # The all-gather of FSDP (ZeRO-3); its transpose is the reduce-scatter of the gradient.
            in_use = (IN_USE.get(name, name) for name in names)
            return self._resharded(self.shard(x, *names, along=along), *in_use, along=along)

        if self.gradient_dtype is None:
            return gather(stored.astype(dtype or stored.dtype))
        return _transposed_in(self.gradient_dtype, gather, dtype or stored.dtype)(stored)

    def shard(self, stored: Array, *names: str, along: str = "sequence") -> Array:
        """Return a parameter as it is stored; its gradient stays unreduced over the axes that replicate a shard."""
        return self._resharded(stored, *names, along=along)

    @property
    def gathered(self) -> ShardingContext:
        """The same context without the mesh axes that split only storage; it gives the specs of gathered weights."""
        return replace(self, rules={**self.rules, **dict.fromkeys(IN_USE, ())})

    def _resharded(self, x: Array, *names: str, along: str) -> Array:
        """Return `x` resharded to logical axes, typed `reduced` over the mesh axes that shard tokens and not x.

        Its gradient is then summed over these mesh axes.
        """
        tokens = (*self.rules["batch"], *self.rules[along])
        dims = spec(names, mesh=self.mesh, rules=self.rules)
        whole = tuple(axis for axis in tokens if not any(axis in dim for dim in dims))
        return jax.reshard(x, self._partition(dims, (), whole))

    def _partition(self, dims: Spec, unreduced: tuple[str, ...], reduced: tuple[str, ...]) -> P:
        """Return a PartitionSpec without axes of degree 1, so that equal shardings have equal types."""
        return P(*(dim or None for dim in dims), unreduced=self._live(unreduced), reduced=self._live(reduced))

    def _live(self, axes: tuple[str, ...]) -> frozenset[str]:
        return frozenset(axis for axis in axes if self.mesh.degrees[axis] > 1)


def _transposed_in(wide: Any, move: Callable[[Array], Array], dtype: Any) -> Callable[[Array], Array]:
    """Return a function that casts x to `dtype` and applies `move`, a linear reshard.

    In backward, the transpose of `move` is applied to the cotangent in the dtype `wide`.
    """

    @jax.custom_vjp
    def moved(x: Array) -> Array:
        return move(x.astype(dtype))

    def backward(x: Array, cotangent: Array) -> tuple[Array]:
        _, back = jax.vjp(move, x.astype(wide))
        return (back(cotangent.astype(wide))[0].astype(x.dtype),)

    moved.defvjp(lambda x: (moved(x), x), backward)
    return moved


def cotangent_spec(x: Array) -> P:
    """Return the spec of an array's cotangent: unreduced over the axes where the array is typed reduced."""
    spec = jax.typeof(x).sharding.spec
    return P(*spec.partitions, unreduced=spec.reduced)
