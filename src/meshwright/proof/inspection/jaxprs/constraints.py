"""Sharding constraints that JAX drops when it lowers a function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.proof.compiler.program import TracedMistake
from meshwright.proof.inspection.jaxprs.blocks import hlo_dtype
from meshwright.proof.inspection.jaxprs.places import place


def constraint_mistakes(jaxpr: Any) -> Iterator[TracedMistake]:
    """Yield the constraints of a jaxpr and its inner ones that JAX drops: unused ones, and `device_put`s in `jit`."""
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | {id(var) for var in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint" and id(eqn.outvars[0]) not in used:
            yield _dropped(eqn, eqn.outvars[0].aval, "")
        if eqn.primitive.name == "device_put":
            for old, var, device in zip(eqn.invars, eqn.outvars, eqn.params["devices"], strict=True):
                if isinstance(device, jax.Device) or _is_dropped(old.aval, device):
                    yield _dropped(eqn, var.aval, str(getattr(device, "spec", device)).replace("PartitionSpec", "P"))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda one: hasattr(one, "eqns")):
            if hasattr(inner, "eqns"):
                yield from constraint_mistakes(getattr(inner, "jaxpr", inner))


def _dropped(eqn: Any, aval: Any, device: str) -> TracedMistake:
    dtype = hlo_dtype(aval.dtype.name)
    return TracedMistake("dropped-constraint", dtype, tuple(aval.shape), place(eqn), figures={"device": device})


def _is_dropped(aval: Any, target: Any) -> bool:
    """Whether a `device_put` inside `jit` only asks to reshard an array, which JAX ignores there.

    Moves between memories are not ignored.
    """
    if not isinstance(target, NamedSharding) or target.is_fully_replicated:
        return False
    is_device = target.memory_kind in (None, "device", "unpinned_host")
    return is_device and "host" not in str(getattr(aval, "memory_space", "")).lower()
