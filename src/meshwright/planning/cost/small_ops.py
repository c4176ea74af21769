"""The time that the ops of a server's decode step add to it because no op is shorter than a microsecond.

Most ops of such a step have a few rows, and take the least time of an op: `Chip.small_ops` on TPUs, on GPUs that of a
kernel (`small_kernel_seconds`). Numbers of ops are those of the decode steps of eight models, as libtpu 0.0.42.1
compiles them (`benchmarks/decode_programs.py --ops`) and as they ran on an H200 (`benchmarks/gpu_decode.py`, JAX
0.11.2). Other ops run inside these: casts and biases, on TPUs activations and residual additions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from meshwright.description.hardware.system import System
from meshwright.description.step.blocks import program
from meshwright.description.step.ir import Step
from meshwright.description.step.layer import Add, Attention, Block, Dispatch, Gated, LayerOp, Linear, Norm, Rotary
from meshwright.description.step.model import ModelConfig
from meshwright.planning.cost.rates.efficiency import small_kernel_seconds

STEP_OPS = 60
"""Ops outside the layers: lookup, rotary and page tables, last norm, logits, and the choice of a token."""

STEP_KERNELS = 11
"""Kernels of a GPU outside the layers, besides that of the logits."""

EXCHANGE_OPS = 2
"""Ops that bring an array into the order that a collective sends, and out of that in which it arrives.

An all-reduce needs none.
"""


def small_op_seconds(step: Step, model: ModelConfig, system: System, read_seconds: float) -> float:
    """Return the seconds that the least time of ops adds to a decode step; 0 on hardware without such a time.

    On GPUs it is that of all kernels but those of matmuls and attention. The TPU compiler reads weights ahead while
    small ops run, so their time counts only as far as it is longer than that of the weights that it reads ahead.

    read_seconds: the time of reading the weights of which some are read ahead.
    """
    if system.chip.kind == "gpu":
        return (STEP_KERNELS + _kernels_of_layers(model)) * small_kernel_seconds(system)
    small = system.chip.small_ops
    if small is None:
        return 0.0
    exchanges = sum(step.repeats[op.region.name].useful for op in step.communication if op.kind != "all-reduce")
    count = STEP_OPS + _ops_of_layers(model, step.extents.mesh.ep > 1) + EXCHANGE_OPS * exchanges
    return max(0.0, count * small.least_seconds - small.read_ahead * read_seconds)


@cache
def _kernels_of_layers(model: ModelConfig) -> int:
    """Return the number of small kernels of all layers on a GPU."""
    return _over_layers(model, lambda block: sum(map(_num_kernels, block.ops)))


def _num_kernels(op: LayerOp) -> int:
    """Return the number of small kernels of a GPU that one op of a layer is compiled to."""
    match op:
        case Norm() | Add():
            return 1
        case Gated() if len(op.sources) > 1:
            return 1
        case Attention():
            return 3  # Queries are padded, new tokens are put into pages, and results are divided by sums.
        case Dispatch():
            return 15
        case Linear() if op.num_experts and op.has_bias:
            return 2
        case _:
            return 0


@cache
def _ops_of_layers(model: ModelConfig, splits_experts: bool) -> int:
    """Return the number of ops of all layers. splits_experts: whether devices have different experts."""
    return _over_layers(model, lambda block: _ops_of_block(block, splits_experts))


def _over_layers(model: ModelConfig, count: Callable[[Block], int]) -> int:
    """Return the sum over the blocks of all layers of what `count` returns."""
    return sum(stack.num_layers * count(block) for stack in program(model).stacks for block in stack.blocks)


def _ops_of_block(block: Block, splits_experts: bool) -> int:
    """Return the number of ops of a block. The matmuls of a gated activation, of gate and up, are one op."""
    dense = {op.target for op in block.ops if isinstance(op, Linear) and not op.num_experts}
    gated = (op for op in block.ops if isinstance(op, Gated) and len(op.sources) > 1)
    return sum(_num_ops(op, splits_experts) for op in block.ops) - sum(dense >= {*op.sources} for op in gated)


def _num_ops(op: LayerOp, splits_experts: bool) -> int:
    """Return the number of ops that one op of a layer is compiled to, besides kernels, whose time is that of bytes."""
    match op:
        case Norm():
            return 2  # The sum of squares, and the inverse of its root; matmuls multiply with them.
        case Linear() if op.num_experts:
            return 2 if op.has_bias else 0  # The bias of each row's expert.
        case Linear():
            return 1
        case Rotary():
            return 2 * len(op.values)
        case Attention():
            # Before the kernel, queries are padded and new tokens are put into pages; after it, sums divide results.
            return 7
        case Dispatch():
            # The choice of experts, two sorts, and the gathers of rows into their order and back; with experts on other
            # devices also the numbers of rows that are exchanged, and the sort of those that arrive.
            return 25 if splits_experts else 15
        case _:
            return 0
