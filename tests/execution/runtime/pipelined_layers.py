"""A small stack of layers with tables before and after it, on one device and as a pipeline."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.step.passes.schedule import Schedule, slot_layers
from meshwright.description.step.rules import RULES
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.pipeline.gpipe import pipelined_loss, wait_for_input
from meshwright.execution.runtime.pipeline.one_forward_one_backward import pipelined_loss_1f1b
from meshwright.execution.runtime.pipeline.stages import LayerOutput, Pipeline
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape

BATCH, LENGTH, EMBED, MLP, VOCAB = 4, 4, 16, 32, 24
RULES_OF_STAGES = {**RULES, "layers": ("pp",)}
TABLE = ("positions", "embed")
LAYER = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
RESIDUAL, GATHERED = ("batch", "residual_sequence", "activation"), ("batch", "sequence", "activation")
STREAM_BYTES = BATCH * LENGTH * EMBED * 4


def functions(layout, num_kinds):
    """The first, the layers of a cycle and the last of a `Pipeline`, sharded over every axis but pp."""

    def first(ends, tokens):
        table = layout.weight(ends["table"], *TABLE)
        return layout.place(table.at[tokens["tokens"]].get(out_sharding=layout.spec(*GATHERED)), *RESIDUAL)

    def layer(weights, x, tokens, number, *, activation):
        h = layout.place(jnp.tanh(x), *GATHERED, reduced=layout.axes("mlp"))
        h = activation(jnp.einsum("bsd,df->bsf", h, layout.weight(weights["up"], *LAYER["up"])))
        out = layout.spec(*GATHERED, unreduced=layout.axes("mlp"))
        y = jnp.einsum("bsf,fd->bsd", h, layout.weight(weights["down"], *LAYER["down"]), out_sharding=out)
        return LayerOutput(x + layout.place(y, *RESIDUAL))

    def last(ends, x, tokens):
        scores = jnp.einsum("bsd,vd->bsv", layout.place(x, *GATHERED), layout.weight(ends["table"], *TABLE))
        logs = jax.nn.log_softmax(scores)
        is_target = jnp.arange(VOCAB)[None, None, :] == tokens["targets"][..., None]
        return -jnp.mean(jnp.sum(jnp.where(is_target, logs, 0.0), axis=-1))

    return first, tuple(partial(layer, activation=each) for each in (jnp.sin, jnp.tanh)[:num_kinds]), last


def values(num_cycles, microbatches, num_kinds):
    """The ends, the layers of each kind in their order, and the inputs."""
    draw = np.random.default_rng(0)
    ends = {"table": draw.standard_normal((VOCAB, EMBED), np.float32)}
    layers = tuple(
        {
            "up": draw.standard_normal((num_cycles, EMBED, MLP), np.float32) / np.float32(EMBED**0.5),
            "down": draw.standard_normal((num_cycles, MLP, EMBED), np.float32) / np.float32(MLP**0.5),
        }
        for _ in range(num_kinds)
    )
    shape = (microbatches, BATCH, LENGTH)
    inputs = {name: draw.integers(0, VOCAB, shape, np.int32) for name in ("tokens", "targets")}
    return ends, layers, inputs


def on_one_device(num_cycles, microbatches, num_kinds=1):
    """The loss and the gradients of ends and layers, without a pipeline."""
    first, of_cycle, last = functions(ShardingContext(MeshShape(), RULES_OF_STAGES), num_kinds)

    def loss(ends, layers, inputs):
        def one(tokens):
            def cycle(x, weights):
                for layer, own in zip(of_cycle, weights, strict=True):
                    x = layer(own, x, tokens, None).x
                return x, None

            x, _ = jax.lax.scan(cycle, first(ends, tokens), layers)
            return last(ends, x, tokens)

        return jnp.mean(jax.lax.map(one, inputs))

    with jax.set_mesh(build_mesh(MeshShape(), jax.devices()[:1])):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*values(num_cycles, microbatches, num_kinds))


def compiled_pipeline(shape, schedule, num_cycles, num_kinds=1):
    """The compiled loss and gradients of a pipeline, and its arguments."""
    layout, mesh = ShardingContext(shape, RULES_OF_STAGES), build_mesh(shape, jax.devices()[: shape.num_devices])
    first, of_cycle, last = functions(layout, num_kinds)
    of_cycle = tuple(jax.checkpoint(wait_for_input(layer)) for layer in of_cycle)
    pipeline = Pipeline(first, of_cycle, last, schedule, num_cycles)
    run = pipelined_loss_1f1b if schedule.kind == "1f1b" else pipelined_loss

    def put(x, spec):
        return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))

    ends, layers, inputs = values(num_cycles, schedule.microbatches, num_kinds)
    with jax.set_mesh(mesh):
        arguments = (
            {"table": put(ends["table"], layout.spec(*TABLE))},
            tuple(
                {name: put(in_slots(own[name], schedule), layout.spec("layers", *LAYER[name])) for name in LAYER}
                for own in layers
            ),
            {name: put(x, P(None, *layout.spec("batch", "sequence"))) for name, x in inputs.items()},
        )
        step = jax.jit(jax.value_and_grad(lambda *given: run(pipeline, *given)[0], argnums=(0, 1)))
        return step.lower(*arguments).compile(), arguments


def in_slots(array, schedule):
    """An array stacked over layers as one stacked over the slots of stages, the empty ones zero."""
    slots = slot_layers(len(array), schedule.stages, schedule.virtual_stages)
    return np.stack([np.zeros_like(array[0]) if layer is None else np.asarray(array[layer]) for layer in slots])


def run_schedule(shape, kind, virtual_stages, microbatches, num_cycles, num_kinds=1):
    """The loss and gradients of a pipeline, the gradients of layers as they lie in slots."""
    schedule = Schedule(stages=shape.pp, microbatches=microbatches, kind=kind, virtual_stages=virtual_stages)
    compiled, arguments = compiled_pipeline(shape, schedule, num_cycles, num_kinds)
    return compiled(*arguments), schedule
