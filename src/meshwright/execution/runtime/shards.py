"""`shard_map` for layers that may also be mapped over pipeline stages by `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.execution.runtime.sharding_context import ShardingContext

STAGES = "pp"
"""The mesh axis of pipeline stages."""


def on_shards(
    local: Callable[..., Any], layout: ShardingContext, *, in_specs: Any, out_specs: Any, check_vma: bool = True
) -> Callable[..., Any]:
    """Return `jax.shard_map` of `local` in a form that also works under `vmap` over pipeline stages.

    Under `vmap` each device runs its own stage, and no mapped array may be unreduced. JAX 0.10.2 would gather the stage
    dim, sharded by an explicit axis, before the `shard_map`, and rejects `reduced` specs.
    """
    if not layout.is_stage:
        return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)

    @custom_vmap
    def mapped(*args: Any) -> Any:
        """Return arrays with the result types of one stage; this is only traced, and never runs."""
        named = jax.sharding.get_abstract_mesh()
        # Under `vmap` over the axis `pp` JAX would drop it from a `shard_map`, so it gets another name here.
        mesh = named.update(axis_names=tuple("stages" if name == STAGES else name for name in named.axis_names))
        alike = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, jax.typeof(x).sharding.spec)),
            args,
        )
        with jax.sharding.use_abstract_mesh(mesh):
            sharded = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
            made = jax.eval_shape(sharded, *alike)
        return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype, out_sharding=y.sharding.spec), made)

    @mapped.def_vmap
    def _(stages: int, are_staged: list[Any], *args: Any) -> tuple[Any, Any]:
        """Run all stages in one `shard_map`, with a leading dim sharded over stages, of size 1 on each device."""
        is_staged = tuple(are_staged)

        def of_stage(*args: Any) -> Any:
            ours = jax.tree.map(lambda staged, x: x[0] if staged else x, is_staged, args)
            return jax.tree.map(lambda x: x[None], local(*ours))

        specs = jax.tree.broadcast(in_specs, args)
        specs = jax.tree.map(lambda staged, spec: _of_stages(spec) if staged else spec, is_staged, specs)
        outs = jax.tree.map(_of_stages, out_specs)
        made = jax.shard_map(of_stage, in_specs=specs, out_specs=outs, check_vma=check_vma)(*args)
        return made, jax.tree.map(lambda _: True, made)

    return mapped


def match_varying(*values: Array, axes: Iterable[str] = ()) -> list[Array]:
    """Return values inside a `shard_map` cast to vary over the same mesh axes: the union of theirs and `axes`.

    The gradient of each value is then summed over the mesh axes that were added for it.
    """
    every = {*axes}.union(*(jax.typeof(value).manual_axis_type.varying for value in values))
    return [_varying_over(value, every) for value in values]


def _varying_over(value: Array, axes: set[str]) -> Array:
    """Return a value cast to vary over all `axes`, by separate casts for axes that it is `reduced` over and others."""
    found = jax.typeof(value).manual_axis_type
    missing = axes - found.varying
    for over in (missing & found.reduced, missing - found.reduced):
        value = lax.pcast(value, tuple(over), to="varying") if over else value
    return value


def _of_stages(spec: P) -> P:
    return P(STAGES, *spec.partitions, unreduced=spec.unreduced, reduced=spec.reduced)
