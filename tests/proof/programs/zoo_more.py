"""More steps of other people's programs: diffusion, a GAN, actor-critic, image and text, a state-space model."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from zoo import Built, abstract, cross_entropy, floats, ints, trained

KEY = jax.eval_shape(lambda: jax.random.key(0))


class PixelAttention(nn.Module):
    """Attention over all pixels, with one weight for queries, keys and values."""

    heads: int = 4

    @nn.compact
    def __call__(self, x):
        rows, height, width, features = x.shape
        found = nn.Dense(3 * features)(nn.GroupNorm(4)(x).reshape(rows, height * width, features))
        query, key, value = (one.reshape(rows, height * width, self.heads, -1) for one in jnp.split(found, 3, axis=-1))
        chances = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
        found = jnp.einsum("bhqk,bkhd->bqhd", chances, value).reshape(rows, height * width, features)
        return x + nn.Dense(features)(found).reshape(x.shape)


class Conditioned(nn.Module):
    """A residual block that a time and a class scale and shift."""

    features: int

    @nn.compact
    def __call__(self, x, condition):
        y = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))
        scale, shift = jnp.split(nn.Dense(2 * self.features)(nn.silu(condition)), 2, axis=-1)
        y = nn.GroupNorm(4)(y) * (1 + scale[:, None, None]) + shift[:, None, None]
        y = nn.Conv(self.features, (3, 3))(nn.silu(y))
        return y + (x if x.shape == y.shape else nn.Conv(self.features, (1, 1))(x))


class Denoiser(nn.Module):
    """A U-Net with attention, a time and a class."""

    width: int

    @nn.compact
    def __call__(self, x, time, label):
        angles = jnp.exp(-jnp.arange(self.width // 2) / self.width) * time[:, None]
        condition = nn.Dense(4 * self.width)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))
        condition = condition + nn.Embed(64, 4 * self.width)(label)
        x, before = nn.Conv(self.width, (3, 3))(x), []
        for level in range(2):
            x = Conditioned(self.width * 2**level)(x, condition)
            before.append(x)
            x = nn.Conv(x.shape[-1], (3, 3), (2, 2))(x)
        x = PixelAttention()(Conditioned(4 * self.width)(x, condition))
        for level in reversed(range(2)):
            x = jax.image.resize(x, before[level].shape[:3] + x.shape[3:], "nearest")
            x = Conditioned(self.width * 2**level)(jnp.concatenate([x, before[level]], axis=-1), condition)
        return nn.Conv(3, (3, 3))(x)


def diffusion(width=16, batch=16, side=16) -> Built:
    """A step of diffusion, with clipped gradients, a moving average and classes that are dropped at random."""
    model, optimizer = Denoiser(width), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    images = floats(batch, side, side, 3)
    params = abstract(model.init, KEY, images, floats(batch), ints(batch))

    def diffusion_step(params, average, moments, key, images, labels):
        of_time, of_noise, of_drop, key = jax.random.split(key, 4)
        angle = jax.random.uniform(of_time, (batch, 1, 1, 1)) * jnp.pi / 2
        noise = jax.random.normal(of_noise, images.shape)
        labels = jnp.where(jax.random.bernoulli(of_drop, 0.1, labels.shape), 0, labels)

        def loss(params):
            mixed = jnp.cos(angle) * images + jnp.sin(angle) * noise
            return ((model.apply(params, mixed, angle.reshape(-1), labels) - noise) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda one, new: 0.999 * one + 0.001 * new, average, params)
        return params, average, moments, key, value

    step = jax.jit(diffusion_step, donate_argnums=(0, 1, 2))
    return step, (params, params, abstract(optimizer.init, params), KEY, images, ints(batch))


class Generator(nn.Module):
    @nn.compact
    def __call__(self, noise):
        x = nn.relu(nn.Dense(4 * 4 * 32)(noise)).reshape(-1, 4, 4, 32)
        x = nn.relu(nn.ConvTranspose(16, (4, 4), (2, 2))(x))
        return jnp.tanh(nn.ConvTranspose(3, (4, 4), (2, 2))(x))


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.leaky_relu(nn.Conv(16, (4, 4), (2, 2))(x))
        x = nn.leaky_relu(nn.Conv(32, (4, 4), (2, 2))(x))
        return nn.Dense(1)(x.reshape(x.shape[0], -1))[:, 0]


def gan(batch=16) -> Built:
    """A GAN, whose discriminator sees real and false images as one batch of twice the size, with two optimizers."""
    models = {"maker": Generator(), "judge": Discriminator()}
    optimizers = {"maker": optax.adam(1e-4), "judge": optax.rmsprop(1e-4)}
    params = {
        "maker": abstract(models["maker"].init, KEY, floats(batch, 32)),
        "judge": abstract(models["judge"].init, KEY, floats(batch, 16, 16, 3)),
    }
    moments = {name: abstract(one.init, params[name]) for name, one in optimizers.items()}

    def error(logits, wanted):
        return optax.sigmoid_binary_cross_entropy(logits, wanted).mean()

    def gan_step(state, images, key):
        params, moments = state
        noise = jax.random.normal(key, (batch, 32))

        def of_judge(judge):
            false = models["maker"].apply(params["maker"], noise)
            logits = models["judge"].apply(judge, jnp.concatenate([images, false]))
            return error(logits, jnp.concatenate([jnp.ones(batch), jnp.zeros(batch)]))

        def of_maker(maker):
            return error(models["judge"].apply(params["judge"], models["maker"].apply(maker, noise)), jnp.ones(batch))

        values, after, kept = {}, {}, {}
        for name, loss in (("judge", of_judge), ("maker", of_maker)):
            values[name], gradients = jax.value_and_grad(loss)(params[name])
            updates, kept[name] = optimizers[name].update(gradients, moments[name])
            after[name] = optax.apply_updates(params[name], updates)
        return (after, kept), values

    return jax.jit(gan_step, donate_argnums=0), ((params, moments), floats(batch, 16, 16, 3), KEY)


class Policy(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x))))
        return nn.Dense(8)(x), nn.Dense(1)(x)[..., 0]


def actor_critic(batch=16, turns=32, width=24) -> Built:
    """PPO: a scan over the turns of games, then epochs of minibatches that are drawn from all of them."""
    model, optimizer = Policy(), optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))
    params = abstract(model.init, KEY, floats(batch, width))

    def chance(logits, action):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]

    def update(state, minibatch):
        params, moments = state
        seen, action, before, gain = minibatch

        def loss(params):
            logits, value = model.apply(params, seen)
            ratio = jnp.exp(chance(logits, action) - before)
            return ((value - gain) ** 2).mean() - jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2) * gain).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, updates), moments), value

    def actor_critic_step(state, games, key):
        def turn(games, key):
            logits, value = model.apply(state[0], games)
            action = jax.random.categorical(key, logits)
            after = jnp.tanh(games + 0.1 * jax.nn.one_hot(action, width))
            return after, (games, action, chance(logits, action), after.sum(-1) - value)

        games, played = jax.lax.scan(turn, games, jax.random.split(key, turns))
        order = jax.random.permutation(key, turns * batch)
        drawn = jax.tree.map(lambda one: one.reshape(turns * batch, *one.shape[2:])[order], played)
        minibatches = jax.tree.map(lambda one: one.reshape(4, -1, *one.shape[1:]), drawn)
        state, values = jax.lax.scan(update, state, minibatches)
        return state, games, values.mean()

    return jax.jit(actor_critic_step), ((params, abstract(optimizer.init, params)), floats(batch, width), KEY)


def image_text(width=32, batch=64, side=16, length=12) -> Built:
    """Contrastive images and texts: logits of each image of the batch with each text."""

    class Towers(nn.Module):
        @nn.compact
        def __call__(self, images, tokens):
            patches = nn.Conv(width, (4, 4), (4, 4))(images).reshape(batch, -1, width)
            found = []
            for x in (patches, nn.Embed(3 * width, width)(tokens)):
                normed = nn.LayerNorm()(x)
                x = x + nn.MultiHeadDotProductAttention(4)(normed, normed)
                x = x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
                x = nn.Dense(width)(x.mean(1))
                found.append(x / jnp.linalg.norm(x, axis=-1, keepdims=True))
            return found[0] @ found[1].T * jnp.exp(self.param("scale", nn.initializers.ones, ()))

    model = Towers()

    def image_text_loss(params, images, tokens):
        logits, labels = model.apply(params, images, tokens), jnp.arange(batch)
        return cross_entropy(logits, labels) + cross_entropy(logits.T, labels)

    arrays = floats(batch, side, side, 3), ints(batch, length)
    return trained(image_text_loss, abstract(model.init, KEY, *arrays), *arrays)


def state_space(width=32, batch=16, length=64, size=8, layers=2) -> Built:
    """A selective state-space model: an associative scan along the sequence, layers scanned and recomputed."""
    shapes = {
        "in": (width, 2 * width), "decay": (width, size), "write": (width, size), "read": (width, size),
        "rate": (width, width), "mix": (4, width), "out": (width, width),
    }  # fmt: skip
    params = {
        "embed": floats(3 * width, width),
        "layers": {name: floats(layers, *shape) for name, shape in shapes.items()},
    }

    def block(x, one):
        hidden, gate = jnp.split(x @ one["in"], 2, axis=-1)
        shifted = (jnp.pad(hidden, ((0, 0), (back, 0), (0, 0)))[:, :length] for back in range(4))
        hidden = jax.nn.silu(sum(one["mix"][back] * rows for back, rows in enumerate(shifted)))
        rate = jax.nn.softplus(hidden @ one["rate"])
        kept = jnp.exp(-rate[..., None] * jnp.exp(one["decay"]))
        new = (rate * hidden)[..., None] * (hidden @ one["write"])[:, :, None]
        _, states = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (kept, new), axis=1)
        found = jnp.einsum("bldn,bln->bld", states, hidden @ one["read"])
        return x + (found * jax.nn.silu(gate)) @ one["out"], None

    def state_space_loss(params, tokens):
        x, _ = jax.lax.scan(jax.checkpoint(block), params["embed"][tokens[:, :-1]], params["layers"])
        return cross_entropy(x @ params["embed"].T, tokens[:, 1:])

    return trained(state_space_loss, params, ints(batch, length + 1))


PROGRAMS: dict[str, Callable[[], Built]] = {
    "diffusion": diffusion, "gan": gan, "actor_critic": actor_critic, "image_text": image_text,
    "state_space": state_space,
}  # fmt: skip
