"""Layers of a model as pipeline stages store them: stacked over slots for layers, some of which may be empty.

All stages run one program, so each has the same number of slots for each kind of layer. If layers of several kinds
alternate, stages consist of whole cycles, with one layer of each kind. Slots for the few dense layers before MoE layers
would be empty in all but the first stage, and still take time. So every stage stores these layers, like the embedding,
and runs them on its share of each microbatch's sequences (or on all sequences, if pp does not divide them). These
layers save nothing for backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from meshwright.description.step.blocks import program
from meshwright.description.step.layer import Program, Stack, alternating
from meshwright.description.step.model import Model
from meshwright.description.step.parameter_tree import Parameter, Tree, map_leaves, parameters
from meshwright.description.step.rules import RULES
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import FOREIGN_REMATS, Remat
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape

STAGE_REMATS: Mapping[str, tuple[Remat, ...]] = {"1f1b": ("block",), "gpipe": ("none", "attention", "matmuls", "block")}
"""Remat policies that each schedule supports.

GPipe saves what JAX saves for a scan. 1F1B saves only layer inputs, because its stages store saved values for each
other (`runtime.pipeline.bpipe`): any other value would have to be sent too.
"""


def chunk_slots(num_layers: int, stages: int, virtual_stages: int) -> int:
    """Return the number of layer slots of each chunk.

    It is the number of layers of the longest chunk, because all stages run one program.
    """
    return math.ceil(num_layers / (stages * virtual_stages))


def staged_stacks(found: Program) -> tuple[Stack, ...]:
    """Return the stacks of the layers that the stages share: all but the dense layers before MoE layers.

    There are several if their layers alternate; the layers of a cycle are then on one stage.
    """
    return alternating(found.stacks)[-1]


def num_cycles(model: Model) -> int:
    """Return how many cycles of layers the stages share; if the layers do not alternate, how many layers."""
    return staged_stacks(program(model))[0].num_layers


def most_stages(model: Model) -> int:
    """Return the largest pp: the number of layers or, if layers of several kinds alternate, of their cycles."""
    return num_cycles(model) if len(staged_stacks(program(model))) > 1 else model.num_layers


def counted_layers(model: Model, count: int) -> str:
    """Return `count` layers in words: "4 layers", or "4 cycles of 2 layers" if layers of several kinds alternate."""
    cycle = len(staged_stacks(program(model)))
    return f"{count} layers" if cycle == 1 else f"{count} cycle{'s' * (count > 1)} of {cycle} layers"


def batch_before_stages(batch: int, mesh: MeshShape, strategy: Strategy) -> tuple[str, ...]:
    """Return the mesh axes that split a step's sequences in dense layers before MoE layers.

    They include pp if it divides the sequences of a microbatch on a device.
    """
    axes = (*RULES["batch"], "pp")
    return axes if batch % (mesh.degree(axes) * strategy.num_microbatches) == 0 else RULES["batch"]


def staged_parameters(model: Model, *, stages: int, virtual_stages: int) -> Tree[Parameter]:
    """Return the declarations of a model's parameters, with layers stacked over the layer slots of all stages in order.

    `step.passes.schedule.slot_layers` returns the layer of its stack in each slot. With one stage, there is a slot for
    each layer.
    """
    if stages == 1:
        return parameters(model)

    def staged(_: str, parameter: Parameter) -> Parameter:
        if "layers" not in parameter.axes:
            return parameter
        slots = stages * virtual_stages * chunk_slots(parameter.num_layers, stages, virtual_stages)
        return replace(parameter, shape=(slots, *parameter.shape[1:]))

    return map_leaves(staged, parameters(model))


def check_stages(model: Model, mesh: MeshShape, strategy: Strategy) -> None:
    """Raise an error if a strategy cannot cut a model into the mesh's stages with at least one layer in each chunk.

    If layers of several kinds alternate, chunks have whole cycles of them.
    """
    stages, virtual, layers = mesh.pp, strategy.virtual_stages, num_cycles(model)
    if stages == 1:
        return
    if stages * virtual > layers:
        most = layers // stages
        nearest = {0: f"pp up to {layers}", 1: "virtual_stages 1"}.get(most, f"virtual_stages 1 to {most}")
        raise MeshwrightError(
            f"{virtual} virtual stages on pp={stages} cut the {counted_layers(model, layers)} of {model.name} into"
            f" {stages * virtual} chunks, so that some would have none; use {nearest}"
        )
    if virtual > 1 and (rest := strategy.num_microbatches % stages):
        count = strategy.num_microbatches
        around = " or ".join(str(number) for number in (count - rest, count - rest + stages) if number)
        raise MeshwrightError(
            f"{virtual} virtual stages take microbatches in groups of pp={stages}: {count} % {stages} = {rest};"
            f" use num_microbatches {around}, or virtual_stages 1"
        )
    if strategy.optimizer == "adafactor" and layers % (stages * virtual):
        raise MeshwrightError(
            f"adafactor scales an array by its mean, and {counted_layers(model, layers)} leave slots of pp={stages}"
            f" with virtual_stages {virtual} empty: {layers} % {stages * virtual} = {layers % (stages * virtual)}; use"
            f" adamw, lion or sgd, or stages that divide the layers"
        )


def check_stage_remat(remat: Remat, mesh: MeshShape, strategy: Strategy) -> None:
    """Raise an error if a remat policy cannot run at all, or not with the strategy's pipeline schedule."""
    if remat in FOREIGN_REMATS:
        raise MeshwrightError(f"remat {remat} is what other frameworks keep; it can be planned, and does not run")
    kept = STAGE_REMATS[strategy.schedule]
    if mesh.pp > 1 and remat not in kept:
        raise MeshwrightError(
            f"remat {remat} can be planned with the schedule {strategy.schedule}, but what runs keeps with it"
            f" {' or '.join(kept)}; gpipe keeps {', '.join(STAGE_REMATS['gpipe'])}"
        )
