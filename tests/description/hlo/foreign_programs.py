"""Programs as others write them, with meshes and axes of their own; each function returns a `jax.stages.Lowered`."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding


def auto_mesh(**degrees: int) -> Mesh:
    """A mesh of axes that the partitioner decides over, as most programs have them."""
    types = (AxisType.Auto,) * len(degrees)
    return jax.make_mesh(tuple(degrees.values()), tuple(degrees), axis_types=types)


def array(mesh: Mesh, spec: Any, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An abstract array on a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


ROWS, WIDTHS = 32, (16, 64, 32, 8)
"""Rows of the MLP's batch, and the widths of its layers."""


def mlp() -> Any:
    """An MLP with biases, its batch over `data`, a step of plain gradient descent."""
    mesh = auto_mesh(data=8)

    def loss(params: Any, x: Any, y: Any) -> Any:
        for weight, bias in params:
            x = jnp.tanh(x @ weight + bias)
        return ((x - y) ** 2).mean()

    def step(params: Any, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x, y))

    pairs = list(pairwise(WIDTHS))
    params = [(array(mesh, P(), a, b), array(mesh, P(), b)) for a, b in pairs]
    return jax.jit(step).lower(
        params, array(mesh, P("data"), ROWS, WIDTHS[0]), array(mesh, P("data"), ROWS, WIDTHS[-1])
    )


IMAGES, SIDE, CHANNELS, BLOCKS, CLASSES = 16, 8, 8, 2, 10
"""Of the ResNet: images of the batch, pixels of a side, channels, residual blocks and classes."""


def resnet() -> Any:
    """A ResNet of 3x3 convolutions with a head, its batch over `data`."""
    mesh = auto_mesh(data=8)

    def convolve(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(params: Any, images: Any) -> Any:
        x = convolve(images, params["stem"])
        for first, second in params["blocks"]:
            x = x + convolve(jax.nn.relu(convolve(jax.nn.relu(x), first)), second)
        return jax.nn.logsumexp(x.mean((1, 2)) @ params["head"], axis=-1).mean()

    kernel = array(mesh, P(), 3, 3, CHANNELS, CHANNELS)
    params = {
        "stem": array(mesh, P(), 3, 3, 3, CHANNELS),
        "blocks": [(kernel, kernel)] * BLOCKS,
        "head": array(mesh, P(), CHANNELS, CLASSES),
    }
    return jax.jit(jax.grad(loss)).lower(params, array(mesh, P("data"), IMAGES, SIDE, SIDE, 3))


BATCH, LENGTH, EMBED, HEADS, VOCAB, LAYERS = 4, 16, 32, 4, 64, 2
"""Of the transformer: sequences, tokens of each, width, heads, words and layers; the MLP is 4 EMBED wide."""


class Block(nnx.Module):
    """A layer of flax modules."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(EMBED, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, EMBED, decode=False, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(EMBED, 4 * EMBED, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * EMBED, EMBED, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """A stack of them, with an embedding and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(EMBED, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def transformer() -> Any:
    """Its forward pass: sequences over `data`, the MLP's hidden dim over `model`, all else whole."""
    mesh = auto_mesh(data=2, model=4)
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(nnx.Rngs(0))))

    def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        spec = P(None, "model") if "up" in path else P("model", None) if "down" in path else P()
        return array(mesh, spec, *leaf.shape, dtype=leaf.dtype)

    placed = jax.tree.map_with_path(lambda path, leaf: place([getattr(p, "key", "") for p in path], leaf), state)

    def forward(state: Any, tokens: Any) -> Any:
        return nnx.merge(graph, state)(tokens)

    return jax.jit(forward).lower(placed, array(mesh, P("data"), BATCH, LENGTH, dtype=jnp.int32))


def mapped() -> Any:
    """A `pmap` of 8 devices: a product, the mean of its results, and all rows gathered."""

    def one(x: Any, w: Any) -> Any:
        y = x @ w
        return jax.lax.pmean(y, "i"), jax.lax.all_gather(y, "i")

    x, w = jax.ShapeDtypeStruct((8, 4, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)
    return jax.pmap(one, axis_name="i").lower(x, w)


def partly_manual() -> Any:
    """A `shard_map` whose axis `data` is manual, while the partitioner splits the product over `model`."""
    mesh = auto_mesh(data=2, model=4)

    def body(x: Any, w: Any, v: Any) -> Any:
        h = jax.lax.with_sharding_constraint(x @ w, P(None, "model"))
        return jax.lax.psum(h @ v, "data")

    function = jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P(), axis_names={"data"})
    w, v = array(mesh, P(None, "model"), 16, 64), array(mesh, P("model", None), 64, 16)
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(array(mesh, P("data", None), 8, 16), w, v)


def propagated() -> Any:
    """A program that says where its inputs and its output lie, and leaves all between to the partitioner."""
    mesh = auto_mesh(x=4, y=2)

    def chain(a: Any, b: Any, c: Any) -> Any:
        return jnp.sin(a @ b) @ c

    shardings = [NamedSharding(mesh, spec) for spec in (P("x", None), P(None, "y"), P("y", None))]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 16), (16, 64), (64, 8))]
    return jax.jit(chain, in_shardings=shardings, out_shardings=NamedSharding(mesh, P("x", None))).lower(*arrays)
