"""Inspect gradient functions and train steps of Equinox models, and carry a plan into one.

Equinox is no dependency of meshwright's. It needs a folder of its own beside the environment:

    pip install --no-deps --target /tmp/equinox equinox jaxtyping wadler_lindig
    PYTHONPATH=/tmp/equinox python tests/proof/inspection/drive_equinox.py

It ends with 0 where, of models from 100 kB to 100 MB, gradients are never told to be donated and state always is, from
128 KiB a device; where a donated step has no such finding; and where its collectives are over the axes of the plan.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import meshwright as mw

PLAN = mw.plan("tiny", on="cpu:8", batch=16, seq_len=64, mesh="fsdp=4,tp=2")
MESH = PLAN.mesh(types="auto")
AXES = {r".*up\.weight": ("mlp", "embed"), r".*down\.weight": ("embed", "mlp"), "*": "replicated"}
"""Equinox has the outputs of a layer first."""

WIDTHS = {"100 kB": 112, "1 MB": 352, "10 MB": 1120, "100 MB": 3536}
"""The widths of models of two square weights in float32 that hold so much, over 8 devices."""

OPTIMIZER = optax.adamw(1e-3)


class Mlp(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, key):
        one, two = jax.random.split(key)
        self.up = eqx.nn.Linear(width, width, use_bias=False, key=one)
        self.down = eqx.nn.Linear(width, width, use_bias=False, key=two)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def loss(model, x):
    return (jax.vmap(model)(x) ** 2).mean()


def update(model, state, x):
    """A train step: the loss, and the model and the optimizer's state after it."""
    value, gradients = eqx.filter_value_and_grad(loss)(model, x)
    updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


def placed(width):
    """A model, its optimizer's state and a batch, as the plan lays them. Equinox takes shapes alone for constants."""

    def lay(tree):
        arrays, rest = eqx.partition(tree, eqx.is_array)
        return eqx.combine(jax.device_put(arrays, PLAN.shardings(arrays, AXES, MESH)), rest)

    model = lay(Mlp(width, jax.random.key(0)))
    state = lay(OPTIMIZER.init(eqx.filter(model, eqx.is_array)))
    return model, state, jax.device_put(jnp.ones((16, width)), jax.NamedSharding(MESH, jax.P("fsdp")))


def kinds(function, *arguments):
    """The findings of a function by their kind, and its inspection."""
    report = mw.inspect(function, *arguments)
    return [str(finding.kind) for finding in report.findings], report


def check_gradients(size, model, x):
    """Gradients come back with the model's paths, shapes and shardings, and are no new values of it."""
    ways = {
        "filter_jit of filter_grad": eqx.filter_jit(eqx.filter_grad(loss)),
        "filter_jit of filter_value_and_grad": eqx.filter_jit(eqx.filter_value_and_grad(loss)),
        "jit of value_and_grad": jax.jit(jax.value_and_grad(loss)),
        "filter_jit of grad": eqx.filter_jit(jax.grad(loss)),
    }
    for name, function in ways.items():
        found, _ = kinds(function, model, x)
        assert "not donated" not in found, (size, name, found)


def check_steps(size, model, state, x):
    """State that is not donated is found, where it is worth a word: from 128 KiB a device; donated it is not."""
    found, _ = kinds(eqx.filter_jit(update), model, state, x)
    held = 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))) / 8
    assert ("not donated" in found) == (held >= 1 << 17), (size, found)
    found, report = kinds(eqx.filter_jit(update, donate="all"), model, state, x)
    assert "not donated" not in found, (size, found)
    return report


def main():
    for size, width in WIDTHS.items():
        model, state, x = placed(width)
        check_gradients(size, model, x)
        report = check_steps(size, model, state, x)
        moved = sorted({(move.kind, *move.axes) for move in report.collectives})
        print(f"{size}: right; the step has {', '.join(map(' over '.join, moved))}")
        assert {axis for _, *axes in moved for axis in axes} == {"fsdp", "tp"}


if __name__ == "__main__":
    main()
