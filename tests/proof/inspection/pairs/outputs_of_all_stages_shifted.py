"""What a pipeline's stages return is stacked: the last one's is taken, which one device sends; a roll moves it all."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "unexpected-collective", {"pipe": 4, "dp": 2}


def program(mesh, rolled):
    def stages(weights, x):
        def tick(carry, number):
            made = jnp.tanh(jnp.where(jax.lax.axis_index("pipe") == 0, x[number % 4], carry) @ weights[0])
            return jax.lax.ppermute(made, "pipe", [(i, i + 1) for i in range(3)]), made

        return jax.lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(7))[1][3:][None]

    mapped = jax.shard_map(
        stages, mesh=mesh, in_specs=(P("pipe"), P(None, "dp")), out_specs=P("pipe", None, "dp"), check_vma=False
    )

    def forward(weights, x):
        made = mapped(weights, x)
        return jnp.roll(made, 1, axis=0) if rolled else made[-1]

    return jax.jit(forward), (array(mesh, (4, 128, 128), "pipe"), array(mesh, (4, 64, 128), None, "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
