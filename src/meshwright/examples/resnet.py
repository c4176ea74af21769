"""ResNets (arXiv:1512.03385, table 1): the train step that `meshwright plan resnet50` plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

BLOCKS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
"""The number of residual blocks in each of the four stages. From resnet50 on, a block is a bottleneck."""

SIZE, CLASSES, MOMENTUM, RATE = 224, 1000, 0.9, 0.1

Params = dict[str, Any]


def make(name: str, batch: int, dtype: str = "bfloat16") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step of a ResNet and its abstract arguments: (state, images, labels).

    name: a key of `BLOCKS`. batch: images of a step, 224 x 224 pixels each. dtype: of images, activations and matmuls;
    parameters and momentum are float32. Batch norms take their statistics over the whole batch.
    """
    params = jax.eval_shape(lambda: _parameters(name))
    state = {"params": params, "momentum": params}
    images = jax.ShapeDtypeStruct((batch, SIZE, SIZE, 3), dtype)

    def step(state: Params, images: Array, labels: Array) -> tuple[Params, Array]:
        loss, gradients = jax.value_and_grad(_loss)(state["params"], images, labels, name)
        momentum = jax.tree.map(lambda old, new: MOMENTUM * old + new, state["momentum"], gradients)
        params = jax.tree.map(lambda value, change: value - RATE * change, state["params"], momentum)
        return {"params": params, "momentum": momentum}, loss

    return jax.jit(step, donate_argnums=0), (state, images, jax.ShapeDtypeStruct((batch,), jnp.int32))


def _parameters(name: str) -> Params:
    """Return the initial parameters: of a convolution its kernel and the scale and shift of its norm."""
    keys = iter(jax.random.split(jax.random.key(0), 512))

    def convolution(inputs: int, outputs: int, size: int) -> Params:
        spread = jnp.sqrt(2 / (size * size * outputs)).astype(jnp.float32)
        kernel = spread * jax.random.normal(next(keys), (size, size, inputs, outputs), jnp.float32)
        return {"kernel": kernel, "scale": jnp.ones(outputs, jnp.float32), "shift": jnp.zeros(outputs, jnp.float32)}

    params: Params = {"stem": convolution(3, 64, 7)}
    width, is_bottleneck = 64, _is_bottleneck(name)
    for stage, count in enumerate(BLOCKS[name]):
        inner = 64 * 2**stage
        outer = 4 * inner if is_bottleneck else inner
        sizes = [(inner, 1), (inner, 3), (outer, 1)] if is_bottleneck else [(inner, 3), (outer, 3)]
        for number in range(count):
            block, inputs = {}, width
            for place, (outputs, size) in enumerate(sizes):
                block[f"conv{place}"] = convolution(inputs, outputs, size)
                inputs = outputs
            if width != outer:
                block["shortcut"] = convolution(width, outer, 1)
            params[f"stage{stage}_{number}"], width = block, outer
    kernel = 0.01 * jax.random.normal(next(keys), (width, CLASSES), jnp.float32)
    return params | {"classes": {"kernel": kernel, "bias": jnp.zeros(CLASSES, jnp.float32)}}


def _is_bottleneck(name: str) -> bool:
    """Whether a block has convolutions of 1, 3 and 1 pixels instead of two of 3 pixels."""
    return name not in ("resnet18", "resnet34")


def _loss(params: Params, images: Array, labels: Array, name: str) -> Array:
    """Return the mean cross-entropy of the classes."""
    x = jax.nn.relu(_convolved(params["stem"], images, 2))
    x = lax.reduce_window(x, x.dtype.type(-jnp.inf), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    strided = 1 if _is_bottleneck(name) else 0
    for stage, count in enumerate(BLOCKS[name]):
        for number in range(count):
            block, stride = params[f"stage{stage}_{number}"], 2 if stage and not number else 1
            convolutions = [block[key] for key in sorted(block) if key != "shortcut"]
            y = x
            for place, one in enumerate(convolutions):
                y = _convolved(one, y, stride if place == strided else 1)
                y = jax.nn.relu(y) if place < len(convolutions) - 1 else y
            x = jax.nn.relu(y + (_convolved(block["shortcut"], x, stride) if "shortcut" in block else x))
    x = x.astype(jnp.float32).mean((1, 2)).astype(x.dtype)
    logits = x @ params["classes"]["kernel"].astype(x.dtype) + params["classes"]["bias"].astype(x.dtype)[None]
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(chances, labels[:, None], 1).mean()


def _convolved(params: Params, x: Array, stride: int) -> Array:
    """Return a convolution of [batch, height, width, channels] and its batch norm."""
    kernel = params["kernel"].astype(x.dtype)
    y = lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    wide = y.astype(jnp.float32)
    mean = wide.mean((0, 1, 2), keepdims=True)
    variance = (wide * wide).mean((0, 1, 2), keepdims=True) - mean * mean
    scale, shift = (params[name][None, None, None] for name in ("scale", "shift"))
    return ((wide - mean) * lax.rsqrt(variance + 1e-5) * scale + shift).astype(x.dtype)
