"""The time that one run of an instruction keeps a device's arithmetic or memory busy.

What the compiler itself estimates where it says so (the TPU compiler, of most fusions), else the roofline: products at
the efficiency of their size, the rest at the bandwidth of memory.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from meshwright.cost import product_efficiency
from meshwright.cost.achieved import HBM_SHARE
from meshwright.cost.attention import TPU_PRODUCTS, TpuKernel, attention_share, tpu_kernel_share
from meshwright.cost.efficiency import DATA, gpu_figures
from meshwright.hardware import System
from meshwright.hlo import Instruction, Module, count_executions, flops_of
from meshwright.hlo.flops import is_kernel
from meshwright.simulate.hbm import hbm_bytes, is_free

Basis = Literal["compiler", "roofline", "kernel"]

_CYCLES = re.compile(r'"estimated_cycles":"?(\d{1,15})(?!\d)')  # 2^63 - 1 where there is none

_ATTENTION = re.compile(r"(?:splash|flash)\w*?_(fwd|dkv|dq)(?![a-z])")
_BLOCK = re.compile(r'\\?"block_q(?:_dkv|_dq)?\\?":\s*(\d{1,9})')


@dataclass(frozen=True)
class OpSeconds:
    """The time of one run, and where it comes from: the compiler's estimate, the roofline, or the flops of a kernel."""

    seconds: float
    basis: Basis


def op_seconds(module: Module, instruction: Instruction, system: System) -> OpSeconds:
    """The time of one run of an instruction on a device of a system, nothing beside it; 0 of one that does nothing.

    The longer of the compiler's cycles, where it gives them, and the time its bytes take at the peak of the memory. On
    a GPU no op is shorter than its launch.
    """
    if is_free(instruction):
        return OpSeconds(0.0, "roofline")
    moved = hbm_bytes(module, instruction) / system.hbm_bytes_per_second
    cycles = _CYCLES.search(instruction.attributes.get("backend_config", ""))
    if cycles and system.chip.kind == "tpu":
        return OpSeconds(max(int(cycles[1]) / clock_hertz(system), moved), "compiler")
    moved /= HBM_SHARE
    if (worked := kernel_seconds(module, instruction, system)) is not None:
        return OpSeconds(max(worked, moved), "kernel")
    worked = sum(_product_seconds(module, product, system) for product in _inside(module, instruction))
    launch = gpu_figures(system.chip.name).launch_seconds if system.chip.kind == "gpu" else 0.0
    return OpSeconds(max(worked, moved, launch), "roofline")


@cache
def clock_hertz(system: System) -> float:
    """The clock that a TPU's estimated cycles are of: the peak over the flops of a cycle (benchmarks/tpu_products.py).

    A chip of which no products were compiled has the flops a cycle of v5p, so that its share of the peak is v5p's.
    """
    chips = json.loads((DATA / "tpu_products.json").read_text(encoding="utf-8"))["chips"]
    return system.peak("bf16") / chips.get(system.chip.name, chips["v5p"])["flops_per_cycle"]


def kernel_seconds(module: Module, instruction: Instruction, system: System) -> float | None:
    """The time of a kernel by its flops: those its author estimated, or of attention by its name; None of all else.

    Attention is taken as causal: of n x n blocks of scores (n + 1) / 2n are made.
    """
    if not is_kernel(instruction):
        return None
    flops = flops_of(module, instruction)
    found = _ATTENTION.search(f"{instruction.name} {instruction.op_name}")
    operands = [operand.shape for operand in module.operands(instruction)]
    # One of blocks that are masked is of integers; a batch of one has no dim.
    shapes = [shape.dims for shape in operands if "f" in shape.dtype and len(shape.dims) in (3, 4)]
    if found is None or len(shapes) < 2:
        return None if flops is None else flops / (system.peak() * attention_share(system))
    kernel: TpuKernel = found[1]  # type: ignore[assignment]
    (*batch, heads, queries, head_dim), keys = shapes[0], shapes[1][-2]
    if flops is None:
        block = _BLOCK.search(" ".join(instruction.attributes.values()))
        blocks = max(1, queries // int(block[1])) if block else queries
        products = TPU_PRODUCTS[kernel] * 2 * math.prod(batch) * heads * queries * keys * head_dim
        flops = products * (blocks + 1) // (2 * blocks)
    is_tpu = system.chip.kind == "tpu"
    return flops / (system.peak() * (tpu_kernel_share(system, kernel, head_dim) if is_tpu else attention_share(system)))


def main_dtype(module: Module, system: System) -> str:
    """The dtype, of those a chip has a peak for, in which most flops of a program's products are made; bf16 of none."""
    times, flops = count_executions(module).times, Counter({"bf16": 0})
    for instruction in module.instructions():
        runs = times[instruction.computation]
        if runs and instruction.operands and (worked := flops_of(module, instruction)):
            flops[_peak_of(module.operand(instruction).shape.dtype, system)] += runs * worked
    return flops.most_common(1)[0][0]


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The instruction, or all those a fusion stands for."""
    if instruction.opcode != "fusion":
        yield instruction
        return
    for inner in module.computations[instruction.called("calls")[0]].instructions.values():
        yield from _inside(module, inner)


def _product_seconds(module: Module, product: Instruction, system: System) -> float:
    """The time of a dot, a convolution or a call of a GEMM at the efficiency of its size; 0 of all else.

    [m, k] @ [k, n] with n the elements that only the second operand has, and k from the flops: 2 m k n.
    """
    flops = flops_of(module, product)
    if not flops:
        return 0.0
    result, right = next(product.shape.arrays()), module.operand(product, 1).shape
    k = max(1, flops // (2 * result.size)) if result.size else 1
    n = min(result.size, max(1, right.size // k))
    dtype = _peak_of(module.operand(product).shape.dtype, system)
    return flops / (system.peak(dtype) * product_efficiency(system, math.ceil(result.size / n), k, n, dtype=dtype))


def _peak_of(dtype: str, system: System) -> str:
    """The dtype whose peak a product of HLO arrays of a dtype has; bf16 where the chip has none of its own for it."""
    name = "fp8" if dtype.startswith("f8") else {"s8": "int8", "u8": "int8"}.get(dtype, dtype)
    return name if name in system.chip.peak_flops else "bf16"
