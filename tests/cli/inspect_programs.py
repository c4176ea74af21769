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


def gradients(mesh):
    """The gradients of two products by 4 MB of weights each, of which none is an update."""

    def loss(params, x):
        return ((jax.nn.relu(x @ params["w_in"]) @ params["w_out"]) ** 2).mean()

    params = {"w_in": array(mesh, (256, 4096), None, "tp"), "w_out": array(mesh, (4096, 256), "tp", None)}
    return jax.jit(jax.grad(loss)), (params, array(mesh, (16, 256), "dp"))


def nothing(mesh):
    """No program."""
    return mesh.shape


def mistaken(mesh):
    """A train step with momentum in which little is split: two layers whose weights are whole on every device."""

    def loss(params, x, y):
        with jax.named_scope("mlp"):
            for w in params["layers"]:
                x = x + jax.nn.relu(x @ w[0]) @ w[1]
        return ((x @ params["head"] - y) ** 2).mean()

    def step(params, momentum, x, y):
        gradients = jax.grad(loss)(params, x, y)
        with jax.named_scope("update"):
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
            return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    layer = array(mesh, (256, 512)), array(mesh, (512, 256))
    params = {"layers": [layer, layer], "head": array(mesh, (256, 128), None, "tp")}
    momentum = params | {"head": array(mesh, (256, 128))}
    return jax.jit(step), (params, momentum, array(mesh, (64, 256), "dp"), array(mesh, (64, 128), "dp"))


def step():
    """A step that is planned: (step, its arguments)."""

    def update(params, x):
        value, gradients = jax.value_and_grad(lambda params: ((x @ params["w_in"] @ params["w_out"]) ** 2).mean())(
            params
        )
        return jax.tree.map(lambda one, gradient: one - 0.1 * gradient, params, gradients), value

    shapes = {"w_in": (64, 128), "w_out": (128, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return update, (params, jax.ShapeDtypeStruct((32, 64), jnp.float32))
