"""A step is skipped where a device's own gradient is not finite, with the average inside of the branch."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "branched-collective", {"dp": 8}


def program(mesh, local):
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.square(x @ w).mean())(w)
        finite = jnp.isfinite(jnp.square(gradient).sum())
        if not local:
            finite = jax.lax.pmin(finite.astype(jnp.int32), "dp") > 0
        return jax.lax.cond(finite, lambda: w - 0.1 * jax.lax.pmean(gradient, "dp"), lambda: w)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0), (array(mesh, (64, 64)), array(mesh, (32, 64), "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
