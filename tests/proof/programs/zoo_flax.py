"""Train steps of other people's models in Flax, Linen and NNX, each with abstract arguments, beside those of `zoo`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import zoo
from flax import linen as nn
from flax import nnx
from zoo import Built, abstract, cross_entropy, floats, ints, trained


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, _=None):
        mask = nn.make_causal_mask(x[..., 0])
        normed = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(normed, normed, mask=mask)
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden), None


class Transformer(nn.Module):
    vocab: int
    width: int
    heads: int
    layers: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.width)(tokens)
        x = x + self.param("positions", nn.initializers.normal(), (tokens.shape[1], self.width))
        block = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        x, _ = block(self.heads)(x, None)
        return nn.Dense(self.vocab, use_bias=False)(nn.LayerNorm()(x))


def linen_transformer(width=32, batch=16, length=24, layers=2) -> Built:
    """A decoder in Flax Linen, its layers scanned and recomputed."""
    model = Transformer(vocab=3 * width, width=width, heads=8, layers=layers)

    def linen_loss(params, tokens):
        return cross_entropy(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    params = abstract(model.init, jax.random.key(0), ints(batch, length))
    return trained(linen_loss, params, ints(batch, length + 1))


class NnxBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, width, rngs=rngs, decode=False)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.relu(self.up(x)))


class NnxModel(nnx.Module):
    def __init__(self, vocab, width, layers, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(width, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_transformer(width=32, batch=16, length=24, layers=2) -> Built:
    """An encoder in Flax NNX, layers one by one."""
    model = nnx.eval_shape(lambda: NnxModel(3 * width, width, layers, nnx.Rngs(0)))
    graph, params = nnx.split(model)

    def nnx_loss(params, tokens, labels):
        return cross_entropy(nnx.merge(graph, params)(tokens), labels)

    return trained(nnx_loss, nnx.to_pure_dict(params), ints(batch, length), ints(batch, length))


class Residual(nn.Module):
    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.GroupNorm(4)(nn.Conv(self.features, (1, 1), use_bias=False)(x)))
        y = nn.relu(nn.GroupNorm(4)(nn.Conv(self.features, (3, 3), (self.stride,) * 2, use_bias=False)(y)))
        y = nn.GroupNorm(4)(nn.Conv(4 * self.features, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.Conv(4 * self.features, (1, 1), (self.stride,) * 2, use_bias=False)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    width: int
    stages: tuple[int, ...]

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.GroupNorm(4)(nn.Conv(self.width, (7, 7), (2, 2), use_bias=False)(images)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.stages):
            for block in range(count):
                x = Residual(self.width * 2**stage, 2 if stage and not block else 1)(x)
        return nn.Dense(128)(x.mean((1, 2)))


def resnet(width=8, batch=16, side=32, stages=(1, 1)) -> Built:
    """A ResNet of bottlenecks; ResNet-50 is width 64, side 224, stages 3, 4, 6, 3."""
    model = ResNet(width, stages)

    def resnet_loss(params, images, labels):
        return cross_entropy(model.apply(params, images), labels)

    params = abstract(model.init, jax.random.key(0), floats(batch, side, side, 3))
    return trained(resnet_loss, params, floats(batch, side, side, 3), ints(batch))


class UNet(nn.Module):
    width: int
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        down = []
        for level in range(self.depth):
            x = nn.relu(nn.Conv(self.width * 2**level, (3, 3))(x))
            down.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(self.width * 2**self.depth, (3, 3))(x))
        for level in reversed(range(self.depth)):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2), (2, 2))(x)
            x = nn.relu(nn.Conv(self.width * 2**level, (3, 3))(jnp.concatenate((x, down[level]), -1)))
        return nn.Conv(3, (1, 1))(x)


def unet(width=8, batch=16, side=16, depth=2) -> Built:
    """A U-Net that removes noise from images."""
    model = UNet(width, depth)

    def unet_loss(params, images, noise):
        return ((model.apply(params, images + noise) - noise) ** 2).mean()

    params = abstract(model.init, jax.random.key(0), floats(batch, side, side, 3))
    return trained(unet_loss, params, *[floats(batch, side, side, 3)] * 2)


class Vit(nn.Module):
    width: int
    layers: int

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.width, (4, 4), (4, 4))(images)
        x = x.reshape(x.shape[0], -1, self.width)
        first = self.param("class", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate((jnp.broadcast_to(first, (x.shape[0], 1, self.width)), x), 1)
        for _ in range(self.layers):
            normed = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(8)(normed, normed)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(32)(x[:, 0])


def vit(width=32, batch=16, side=16, layers=2) -> Built:
    """A vision transformer of patches and a class token."""
    model = Vit(width, layers)

    def vit_loss(params, images, labels):
        return cross_entropy(model.apply(params, images), labels)

    params = abstract(model.init, jax.random.key(0), floats(batch, side, side, 3))
    return trained(vit_loss, params, floats(batch, side, side, 3), ints(batch))


PROGRAMS: dict[str, Callable[..., Built]] = {
    **zoo.PROGRAMS, "linen_transformer": linen_transformer, "nnx_transformer": nnx_transformer, "resnet": resnet,
    "unet": unet, "vit": vit,
}  # fmt: skip
