"""What `meshwright inspect` is pointed at: functions that take a mesh."""

import jax
import jax.numpy as jnp
from jax import P


def array(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, P(*spec)))


def split(mesh):
    """A tensor parallel MLP, as (function, arguments)."""

    def forward(params, x):
        with jax.named_scope("mlp"):
            return jax.nn.relu(x @ params["w_in"]) @ params["w_out"]

    params = {"w_in": array(mesh, (64, 128), None, "tp"), "w_out": array(mesh, (128, 64), "tp", None)}
    return forward, (params, array(mesh, (32, 64), "dp"))


def whole(mesh):
    """The same with nothing split over tp, lowered."""
    forward, (params, x) = split(mesh)
    params = {name: array(mesh, leaf.shape) for name, leaf in params.items()}
    with jax.set_mesh(mesh):
        return jax.jit(forward).lower(params, x)


def nothing(mesh):
    """No program."""
    return mesh.shape
