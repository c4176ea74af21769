"""A solver exchanges rows with its neighbours until its own rows change little: others still wait for them."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "branched-collective", {"x": 8}


def program(mesh, own):
    up, down = [(i, (i + 1) % 8) for i in range(8)], [(i, (i - 1) % 8) for i in range(8)]

    def solve(rows):
        def relax(carry):
            rows, _, count = carry
            above, below = jax.lax.ppermute(rows[-1:], "x", up), jax.lax.ppermute(rows[:1], "x", down)
            wide = jnp.concatenate([above, rows, below])
            new = (wide[:-2] + wide[2:]) / 2
            change = jnp.abs(new - rows).max()
            return new, change if own else jax.lax.pmax(change, "x"), count + 1

        def goes_on(carry):
            return (carry[1] > 1e-4) & (carry[2] < 1000)

        return jax.lax.while_loop(goes_on, relax, (rows, jnp.float32(1), 0))[0]

    mapped = jax.shard_map(solve, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (1024, 64), "x"),)


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
