"""Floating point operations of a step per device, counted from the matmuls and convolutions of the compiled program."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from meshwright.description.hlo.dataflow import VIEWS_AND_CASTS, origin
from meshwright.description.hlo.kernel_cost import cost_of
from meshwright.description.hlo.loops import count_executions
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.phases import describe
from meshwright.errors import MeshwrightError
from meshwright.record import Phase

_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([\d",]*)\]')
_COST_ESTIMATE = re.compile(r'"cost_estimate":\{[^{}]*"flops":"?(\d{1,18})')
_WINDOW_FIELD = re.compile(r"(\w+)=(\S+)")

_LARGEST_WINDOW = 1 << 20  # Limit of a window's size, because its positions are enumerated.

_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
_KERNELS = ("tpu_custom_call", "__gpu$", "__cublas$", "__cudnn$", "__onednn$", "mosaic_gpu", "triton")


@dataclass(frozen=True, kw_only=True)
class ProgramFlops:
    """The flops of a step per device, by phase. notes: kernels and loops whose flops are not known."""

    by_phase: Mapping[Phase, int]
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """The sum over all phases, including recompute."""
        return sum(self.by_phase.values())


def count_flops(module: Module) -> ProgramFlops:
    """Return the flops of one device in a step, in dots, convolutions, GEMM calls and hand-written kernels.

    The TPU compiler writes dots as convolutions. A multiply-add counts as two flops. A loop's body counts once for each
    iteration, unlike in XLA's own `cost_analysis`. Elementwise ops are not counted. The flops of a kernel are its
    author's estimate (`pl.CostEstimate`, or its scope's `KernelCost`); kernels without one are named in the notes.
    """
    runs = count_executions(module)
    by_phase: Counter[Phase] = Counter()
    unknown: Counter[str] = Counter()
    for instruction in module.instructions():
        times = runs.times[instruction.computation]
        if not times:
            continue
        flops = flops_of(module, instruction)
        if flops is None:
            unknown[instruction.custom_call_target] += times
        elif flops:
            by_phase[describe(module, instruction)[0].phase] += times * flops
    notes = [f"{count} calls a step of {target} have no known flops" for target, count in unknown.items()]
    return ProgramFlops(by_phase=dict(by_phase), notes=(*runs.notes, *notes))


def flops_of(module: Module, instruction: Instruction) -> int | None:
    """Return the flops of one execution of an instruction; None for a kernel without an estimate."""
    if instruction.opcode == "dot":
        return _dot(module, instruction, instruction.attributes.get("lhs_contracting_dims", ""))
    if instruction.opcode == "convolution":
        return _convolution(module, instruction)
    if instruction.opcode != "custom-call":
        return 0
    config = instruction.attributes.get("backend_config", "")
    if instruction.custom_call_target in _GEMMS and (found := _CONTRACTED.search(config)):
        return _dot(module, instruction, found[1])
    if found := _COST_ESTIMATE.search(config):
        return int(found[1])
    if cost := cost_of(instruction):
        return cost.flops
    return None if is_kernel(instruction) else 0


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction calls a hand-written kernel, of which HLO shows only operands and results."""
    target = instruction.custom_call_target
    return instruction.opcode == "custom-call" and target not in _GEMMS and target.startswith(_KERNELS)


def _dot(module: Module, instruction: Instruction, contracting_dims: str) -> int:
    """Return the flops of a dot: two for each element of the result and each index of the contracting dims.

    contracting_dims: the contracting dims of the left operand, printed as `{1,2}` or `"1","2"`.
    """
    left = module.operand(instruction).shape.dims
    contracted = [int(number) for number in re.findall(r"\d{1,9}", contracting_dims)]
    if any(dim >= len(left) for dim in contracted):
        raise MeshwrightError(f"HLO instruction {instruction.name} contracts dims {contracted} of {left}")
    result = next(instruction.shape.arrays())  # A GEMM call returns (result, workspace).
    flops = 2 * result.size * math.prod(left[dim] for dim in contracted)
    # With split-K, XLA:GPU pads the contracting dim of both operands with zeros.
    of_left, of_right = (_unpadded_share(module, operand) for operand in module.operands(instruction)[:2])
    return int(flops * of_left) if of_left == of_right else flops


def _unpadded_share(module: Module, value: Instruction) -> Fraction:
    """Return the fraction of a value's elements that are not padding, if it is a view of a `pad`; else 1."""
    made = origin(module, value, through=VIEWS_AND_CASTS)
    return Fraction(module.operand(made).shape.size, max(1, made.shape.size)) if made.opcode == "pad" else Fraction(1)


def _convolution(module: Module, instruction: Instruction) -> int:
    """Return the flops of a convolution: two for each product of an input and a kernel element.

    As in XLA's HloCostAnalysis, products with padding and with the holes of a dilation do not count. The TPU compiler
    writes batched dots as convolutions whose windows mostly cover padding.
    """
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attributes.get("dim_labels", ""))
    shapes = [operand.shape.dims for operand in module.operands(instruction)]
    if labels is None or any(len(labels[i + 1]) != len(shape) for i, shape in enumerate(shapes)):
        raise MeshwrightError(f"HLO convolution {instruction.name} has no dim_labels that fit its operands")
    size = [dict(zip(labels[i + 1], shape, strict=True)) for i, shape in enumerate((*shapes, instruction.shape.dims))]
    # In `{size=1x8 pad=0_0x7_7}` each field has a value for every spatial dim; that of pad is a pair.
    window = {
        key: tuple(tuple(int(number) for number in part.split("_")) for part in value.split("x"))
        for key, value in _WINDOW_FIELD.findall(instruction.attributes.get("window", "").strip("{}"))
    }
    positions = 1
    for dim in sorted(label for label in size[0] if label.isdigit()):
        positions *= _num_overlaps(
            size[0][dim], size[1][dim], size[2][dim], {k: v[int(dim)] for k, v in window.items()}
        )
    return 2 * size[2]["b"] * size[2]["f"] * size[1]["i"] * positions


def _num_overlaps(inputs: int, kernel: int, outputs: int, window: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many pairs of a kernel index and an output index, along one spatial dim, read an input element.

    Output o and kernel index k read position o * stride + k * rhs_dilate - pad of the dilated input, in which elements
    are lhs_dilate apart.

    Args:
        inputs: the size of the input along the dim.
        kernel: the size of the kernel.
        outputs: the size of the output.
        window: the fields of the window for this dim.
    """
    stride, pad = window.get("stride", (1,))[0], window.get("pad", (0,))[0]
    holes, spread = window.get("lhs_dilate", (1,))[0], window.get("rhs_dilate", (1,))[0]
    if max(kernel, holes) > _LARGEST_WINDOW:
        raise MeshwrightError(
            f"a convolution has a window of {kernel} with holes of {holes}, larger than any program's"
        )
    count = 0
    for k in range(kernel):
        first = k * spread - pad
        # The range of outputs whose position is inside the input.
        low = max(0, -(first // stride))
        high = min(outputs - 1, ((inputs - 1) * holes - first) // stride)
        if holes == 1:
            count += max(0, high - low + 1)
            continue
        # Every `period`-th output reads an element; the others read holes.
        period = holes // math.gcd(holes, stride)
        start = next((o for o in range(low, low + period) if (o * stride + first) % holes == 0), None)
        if start is not None and start <= high:
            count += (high - start) // period + 1
    return count
