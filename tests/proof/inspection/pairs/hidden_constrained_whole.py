"""A constraint makes the hidden layer whole that both products want split."""

import jax
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "movement", "unsharding-constraint", {"dp": 2, "tp": 4}


def program(mesh, spec):
    def forward(params, x):
        hidden = jax.nn.relu(x @ params["a"])
        hidden = constrain(hidden, jax.NamedSharding(mesh, spec))
        return hidden @ params["b"]

    params = {"a": array(mesh, (64, 256), None, "tp"), "b": array(mesh, (256, 64), "tp")}
    return jax.jit(forward), (params, array(mesh, (64, 64), "dp"))


def mistake(mesh):
    return program(mesh, P("dp", None))


def clean(mesh):
    return program(mesh, P("dp", "tp"))
