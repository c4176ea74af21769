"""Plan and run train steps of transformers in Equinox and in Haiku, which are no dependencies of meshwright's.

They need a folder of their own beside the environment:

    pip install --no-deps --target /tmp/libraries equinox jaxtyping wadler_lindig dm-haiku jmp tabulate absl-py
    PYTHONPATH=/tmp/libraries python tests/proof/programs/drive_libraries.py

It ends with 0 where, for each, the batch, the MLP and the vocabulary are found; flops and the bytes of collectives that
are predicted for dp and fsdp are those of the compiled program; and the planned step computes what the step does.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from collections import Counter
from dataclasses import replace

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax

import meshwright as mw

WIDTH, VOCAB, BATCH, LENGTH, HEADS = 32, 96, 16, 24, 4
OPTIMIZER = optax.adam(1e-3)
ROWS = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=one)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=two)

    def __call__(self, x):
        normed = jax.vmap(self.norms[0])(x)
        x = x + self.attention(normed, normed, normed, jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class EquinoxTransformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[EquinoxBlock]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.blocks = [EquinoxBlock(one) for one in keys[1:3]]
        self.head = eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=keys[3])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


@eqx.filter_jit(donate="all-except-first")
def equinox_step(rows, model, state):
    """A step with the module itself as an argument: its functions and numbers are no arrays."""

    def loss(model):
        return cross_entropy(jax.vmap(model)(rows[:, :-1]), rows[:, 1:])

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


def equinox_program():
    """The step, and a function that makes the model and the optimizer's state."""

    def make():
        model = EquinoxTransformer(jax.random.key(0))
        return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))

    return equinox_step, make


def haiku_forward(tokens):
    x = hk.Embed(VOCAB, WIDTH)(tokens)
    mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
    initial = hk.initializers.VarianceScaling(0.5)
    for _ in range(2):
        normed = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, model_size=WIDTH, w_init=initial)(
            normed, normed, normed, mask=mask
        )
        normed = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(4 * WIDTH)(normed)))
    return hk.Linear(VOCAB, with_bias=False)(x)


def haiku_program():
    """The same in Haiku: parameters are a dict of dicts, with the modules' paths as keys."""
    model = hk.without_apply_rng(hk.transform(haiku_forward))

    def step(rows, params, state):
        def loss(params):
            return cross_entropy(model.apply(params, rows[:, :-1]), rows[:, 1:])

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = OPTIMIZER.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    def make():
        params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
        return params, OPTIMIZER.init(params)

    return jax.jit(step, donate_argnums=(1, 2)), make


def sent(collectives):
    """The bytes of collectives by kind; XLA:CPU reduces and slices for a reduce-scatter."""
    found = Counter()
    for move in collectives:
        found["all-reduce" if move.kind == "reduce-scatter" else move.kind] += move.bytes
    return found


def check(name, step, make):
    """Plan a step, compare its prediction with the compiled programs, and run it."""
    arrays = eqx.filter_eval_shape(make)
    plan = mw.plan(step, ROWS, *arrays, on="cpu:8", num_compiled=0)
    sizes = {each.size for each in plan.classes if not each.barred}
    assert {BATCH, 4 * WIDTH, VOCAB, HEADS} <= sizes, (name, sizes)
    for axis in ("dp", "fsdp"):
        best = next(
            each
            for each in plan.candidates
            if each.layout and [one.name for one in each.layout.axes if one.degree > 1] == [axis]
        )
        chosen = replace(plan, candidates=(best,))
        program = mw.inspect(chosen.apply().lower(), mesh=chosen.mesh)
        assert sent(best.predicted.collectives) == sent(program.collectives), (name, axis)
        assert abs(best.predicted.flops / program.flops - 1) < 1e-6, (name, axis)
        rows = jax.random.randint(jax.random.key(1), ROWS.shape, 0, VOCAB)
        expected = step(rows, *make())
        found = chosen.apply()(rows, *make())
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            if eqx.is_array(one):
                assert jnp.allclose(one, other, atol=1e-4), (name, axis, one.shape)
    print(f"{name}: {len(plan.classes)} classes; dp and fsdp are compiled as predicted, and compute the same")


def main():
    check("Haiku", *haiku_program())
    check("Equinox", *equinox_program())


if __name__ == "__main__":
    main()
