"""Trees with functions and texts among their leaves, as modules of Equinox are (`drive_libraries.py` has real ones)."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw
from meshwright.proof.programs.trace import trace


class Layer(NamedTuple):
    """A module whose activation function and scale are leaves."""

    up: Any
    down: Any
    activation: Any
    scale: float


def step(layer: Layer, x: Any, mode: str) -> tuple[Layer, Any]:
    def loss(weights: Any) -> Any:
        assert mode == "train"
        up, down = weights
        hidden = layer.activation(x @ up) * (layer.scale if layer.scale else 1.0)
        return ((hidden @ down) ** 2).mean()

    found, (up, down) = jax.value_and_grad(loss)((layer.up, layer.down))
    return layer._replace(up=layer.up - up, down=layer.down - down), found


def made():
    draw = np.random.default_rng(0)
    up, down, x = (jnp.asarray(draw.normal(0, 0.1, shape), jnp.float32) for shape in ((16, 64), (64, 16), (8, 16)))
    return Layer(up, down, jax.nn.gelu, 2.0), x


def test_leaves_that_are_no_arrays_are_bound_and_returned():
    layer, x = made()
    plan = mw.plan(step, layer, x, "train", on="cpu:8", mesh="fsdp=2,tp=4", num_compiled=0)
    assert [path for path, _ in plan.program.arguments] == ["layer.up", "layer.down", "x"]
    found, value = plan.apply()(*made(), "train")
    expected, expected_value = step(*made(), "train")
    assert found.activation is jax.nn.gelu
    assert found.scale == 2.0
    assert jnp.allclose(value, expected_value)
    assert jnp.allclose(found.up, expected.up, atol=1e-5)


def test_what_a_jitted_function_inside_donates_stays_donated():
    def outer(layer: Layer, x: Any) -> Any:
        arrays = jax.jit(lambda up, down, x: (up + x.sum(), down + 1.0), donate_argnums=(0, 1))
        return arrays(layer.up, layer.down, x)

    layer, x = made()
    donated = [one.donated for one in jax.tree.leaves(trace(outer, layer, x).traced.args_info)]
    assert donated == [True, True, False]


def test_fit_trains_a_module_whose_leaves_are_not_all_arrays(tmp_path: Path):
    def train(layer: Layer, x: Any) -> tuple[Layer, Any]:
        return step(layer, x, "train")

    layer, x = made()
    plan = mw.plan(train, layer, x, on="cpu:8", mesh="fsdp=8", num_compiled=0)
    run = mw.fit(train, layer, lambda _: np.asarray(x), plan=plan, out=tmp_path, steps=2)
    expected = layer
    for _ in range(2):
        expected, _ = train(expected, x)
    assert run.state.activation is jax.nn.gelu
    assert jnp.allclose(run.state.up, expected.up, atol=1e-5)
