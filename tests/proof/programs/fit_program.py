"""A step with momentum and dropout, its state and batches; run as a script, a run of it: OUT STEPS [PORT ID].

With a port and a number it is one of two processes, each with half of the devices and of every batch.
"""

import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw

WIDTH, BATCH = 32, 16


class Mlp(NamedTuple):
    """The state of the step: two layers with momentum, and the key of its dropout."""

    params: dict[str, jax.Array]
    momentum: dict[str, jax.Array]
    key: jax.Array


def first_state(scale=0.3):
    up, down = jax.random.split(jax.random.key(0))
    params = {
        "up": scale * jax.random.normal(up, (WIDTH, 2 * WIDTH)),
        "down": scale * jax.random.normal(down, (2 * WIDTH, WIDTH)),
    }
    return Mlp(params, jax.tree.map(jnp.zeros_like, params), jax.random.key(1))


def step(state, batch):
    key, dropout = jax.random.split(state.key)

    def loss(params):
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        kept = jax.random.bernoulli(dropout, 0.9, hidden.shape)
        return jnp.mean((jnp.where(kept, hidden, 0.0) @ params["down"] - batch["y"]) ** 2)

    found, gradients = jax.value_and_grad(loss)(state.params)
    momentum = jax.tree.map(lambda one, gradient: 0.9 * one + gradient, state.momentum, gradients)
    params = jax.tree.map(lambda one, change: one - 0.1 * change, state.params, momentum)
    return Mlp(params, momentum, key), {"loss": found, "accuracy": 1 - found}


def batches(number):
    draw = np.random.default_rng(number)
    return {name: draw.normal(size=(BATCH, WIDTH)).astype(np.float32) for name in "xy"}


def planned(on="cpu:8", mesh="fsdp=4,tp=2"):
    return mw.plan(step, jax.eval_shape(first_state), batches(0), on=on, mesh=mesh, num_compiled=0)


def by_table(*degrees):
    """The step laid out by a table, on a mesh of two axes."""
    mesh = jax.make_mesh(degrees, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    table = {"batch": "data", "up:1": "model"}
    return mw.apply(step, table, mesh, jax.eval_shape(first_state), batches(0), store="data")


class Numbered:
    """Batches with a position, as grain's iterators have; `part` is the rows that this process has of each."""

    def __init__(self, is_bytes=False, part=slice(None)):
        self.next, self.read, self.is_bytes, self.part = 0, [], is_bytes, part

    def __iter__(self):
        return self

    def __next__(self):
        self.read.append(self.next)
        self.next += 1
        return {name: one[self.part] for name, one in batches(self.next - 1).items()}

    def get_state(self):
        return str(self.next).encode() if self.is_bytes else {"next": self.next}

    def set_state(self, state):
        self.next = int(state) if self.is_bytes else state["next"]


def main(out, steps, port="", number="0"):
    """Take the steps, with a checkpoint every 20, slowly enough to be killed between."""
    part = slice(None)
    if port:
        jax.distributed.initialize(f"localhost:{port}", 2, int(number))
        part = slice(BATCH // 2) if number == "0" else slice(BATCH // 2, None)
    state = first_state() if port else first_state
    mw.fit(
        step, state, Numbered(part=part), plan=by_table(4, 2), out=out, steps=int(steps), save_every=20, resume=True,
        on_step=lambda row: time.sleep(0.005),
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
