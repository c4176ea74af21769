"""The time of one execution of an instruction.

It is the compiler's own estimate if there is one (the TPU compiler has one for most fusions), else the roofline time:
matmuls at the efficiency that their size reaches, everything else at memory bandwidth.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from meshwright.description.hardware.dtypes import canonical_dtype
from meshwright.description.hardware.system import System
from meshwright.description.hlo.dataflow import VIEWS_AND_CASTS, forwarded_from
from meshwright.description.hlo.flops import flops_of, is_kernel
from meshwright.description.hlo.kernel_cost import cost_of
from meshwright.description.hlo.loops import count_executions
from meshwright.description.hlo.module import Instruction, Module
from meshwright.planning.cost.rates.achieved import HBM_SHARE
from meshwright.planning.cost.rates.attention import (
    TpuKernel,
    attention_share,
    fused_attention_time,
    tpu_kernel_share,
    tpu_kernel_width,
)
from meshwright.planning.cost.rates.data_files import tpu_products
from meshwright.planning.cost.rates.efficiency import launch_seconds, product_efficiency, small_kernel_seconds
from meshwright.planning.cost.rates.narrow_values import cached_seconds, weight_conversion_seconds
from meshwright.proof.simulate.hbm import hbm_bytes, is_free

Basis = Literal["compiler", "roofline", "kernel"]

_CYCLES = re.compile(r'"estimated_cycles":"?(\d{1,15})(?!\d)')  # 2^63 - 1 where there is none

_CUDNN = re.compile(r"__cudnn\$fmha\w*?(Backward)?(?![A-Za-z])")
_ATTENTION = re.compile(r"(?:splash|flash)\w*?_(fwd|dkv|dq)(?![a-z])")
_BLOCK = re.compile(r'\\?"block_q(?:_dkv|_dq)?\\?":\s*(\d{1,9})')


@dataclass(frozen=True)
class OpSeconds:
    """The time of one execution, and its source: the compiler's estimate, the roofline, or a kernel's flops."""

    seconds: float
    basis: Basis


def op_seconds(module: Module, instruction: Instruction, system: System) -> OpSeconds:
    """Return the time of one execution of an instruction on an otherwise idle device; 0 if it does nothing.

    If the TPU compiler estimated its cycles: the time of these cycles, at least that of its bytes at peak bandwidth.
    Else: the time of its flops, at least that of its bytes at achieved bandwidth. On a GPU it is also at least that of
    converting a narrow weight or cache, of launching a matmul, or of another kernel with little to compute (but not of
    hand-written kernels, except those of matmuls).
    """
    if is_free(instruction):
        return OpSeconds(0.0, "roofline")
    moved = hbm_bytes(module, instruction) / system.hbm_bytes_per_second
    cycles = _CYCLES.search(instruction.attributes.get("backend_config", ""))
    if cycles and system.chip.kind == "tpu":
        return OpSeconds(max(int(cycles[1]) / clock_hertz(system), moved), "compiler")
    moved /= HBM_SHARE
    if (worked := kernel_seconds(module, instruction, system)) is not None:
        return OpSeconds(_with_conversion(module, instruction, max(worked, moved), system), "kernel")
    worked = sum(_product_seconds(module, product, instruction, system) for product in _inside(module, instruction))
    least = launch_seconds(system) if worked else small_kernel_seconds(system)
    return OpSeconds(max(worked, moved, least), "roofline")


@cache
def clock_hertz(system: System) -> float:
    """Return the clock that turns the TPU compiler's estimated cycles into seconds.

    It is peak flops/s divided by the flops per cycle of compiled matmuls (benchmarks/tpu_products.py). A chip for which
    none were compiled gets v5p's flops per cycle, so that its matmuls reach the same fraction of the peak as v5p's.
    """
    chips = tpu_products()["chips"]
    return system.peak("bf16") / chips.get(system.chip.name, chips["v5p"])["flops_per_cycle"]


def kernel_seconds(module: Module, instruction: Instruction, system: System) -> float | None:
    """Return the time of a hand-written kernel from its flops, in seconds; None for other ops and for unknown flops.

    The flops are those that the kernel declares, or follow from the shapes of attention. Attention is taken as causal:
    a fraction (n + 1) / 2n of the n x n blocks of scores is computed.
    """
    if not is_kernel(instruction):
        return None
    if cudnn := _CUDNN.search(" ".join(instruction.attributes.values())):
        # Queries are [batch, seq, heads, head_dim].
        query, key, value = (operand.shape.dims for operand in module.operands(instruction)[:3])
        batch, queries, heads, qk_dim = query
        is_causal = re.search(r'"mask_type":\s*"CAUSAL"', instruction.attributes.get("backend_config", ""))
        flops = 2 * batch * heads * queries * key[1] * (qk_dim + value[3]) / (2 if is_causal else 1)
        time = fused_attention_time(flops, key[1], qk_dim, value[3], "cudnn", system)
        return time.backward if cudnn[1] else time.forward
    flops = flops_of(module, instruction)
    found = _ATTENTION.search(f"{instruction.name} {instruction.op_name}")
    operands = [operand.shape for operand in module.operands(instruction)]
    # Float operands (block masks are integers) have 3 dims with a batch of one. Splash attention's first three are
    # queries, keys and values; the last two of flash attention, which declares its flops, are keys and values.
    shapes = [shape.dims for shape in operands if "f" in shape.dtype and len(shape.dims) in (3, 4)]
    if found is None or len(shapes) < 3:
        return None if flops is None else flops / (system.peak() * attention_share(system))
    kernel: TpuKernel = found[1]  # type: ignore[assignment]
    (*batch, heads, queries, _), (*_, keys, qk_dim), (*_, value_dim) = (
        shapes[0],
        *(shapes[-2:] if flops else shapes[1:3]),
    )
    if flops is None:
        block = _BLOCK.search(" ".join(instruction.attributes.values()))
        blocks = max(1, queries // int(block[1])) if block else queries
        scores = math.prod(batch) * heads * queries * keys
        flops = 2 * scores * tpu_kernel_width(kernel, qk_dim, value_dim) * (blocks + 1) // (2 * blocks)
    is_tpu = system.chip.kind == "tpu"
    share = tpu_kernel_share(system, kernel, qk_dim, value_dim) if is_tpu else attention_share(system)
    return flops / (system.peak() * share)


def _with_conversion(module: Module, kernel: Instruction, seconds: float, system: System) -> float:
    """Return the time of a hand-written kernel that takes `seconds` for its flops and bytes.

    A GPU's kernel converts the weight or the cache that it states to read (`KernelCost`), which is its largest operand;
    that of a matmul is launched.
    """
    cost = cost_of(kernel)
    if cost is None or system.chip.kind != "gpu":
        return seconds
    stored = max((operand.shape for operand in module.operands(kernel)), key=lambda shape: shape.hbm_bytes).dtype
    dtype = "int4" if stored == "u8" else canonical_dtype(stored)  # Two 4-bit values share a byte.
    if cost.cached:
        seconds = max(seconds, cached_seconds(dtype, cost.cached, system))
    if cost.weights:
        rows = cost.flops / (2 * cost.weights)
        seconds = launch_seconds(system) + max(seconds, weight_conversion_seconds(dtype, cost.weights, rows))
    return seconds


def main_dtype(module: Module, system: System) -> str:
    """Return the dtype with most flops in a program's matmuls, of those the chip has a peak for; default bf16."""
    times, flops = count_executions(module).times, Counter({"bf16": 0})
    for instruction in module.instructions():
        runs = times[instruction.computation]
        if runs and instruction.operands and (worked := flops_of(module, instruction)):
            flops[_peak_dtype(module.operand(instruction).shape.dtype, system)] += runs * worked
    return flops.most_common(1)[0][0]


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yield the instruction itself, or all instructions inside a fusion."""
    if instruction.opcode != "fusion":
        yield instruction
        return
    for inner in module.computations[instruction.called("calls")[0]].instructions.values():
        yield from _inside(module, inner)


def _product_seconds(module: Module, product: Instruction, op: Instruction, system: System) -> float:
    """Return the time of a dot, convolution or GEMM call at the efficiency that its size reaches; 0 for other ops.

    As [m, k] @ [k, n], k follows from flops = 2 m k n, and n is the second operand's elements divided by k. On GPUs an
    operand that is converted as it is multiplied is read in the dtype in which it is stored.

    op: the product itself, or the fusion that it is inside.
    """
    flops = flops_of(module, product)
    if not flops:
        return 0.0
    result, right = next(product.shape.arrays()), module.operand(product, 1).shape
    k = max(1, flops // (2 * result.size)) if result.size else 1
    n = min(result.size, max(1, right.size // k))
    dtype, moved, converting = _peak_dtype(module.operand(product).shape.dtype, system), None, 0.0
    operands = module.operands(product)[:2]
    stored = [_stored(module, operand, op).shape for operand in operands]
    if system.chip.kind == "gpu" and [shape.dtype for shape in stored] != [each.shape.dtype for each in operands]:
        moved = sum(shape.hbm_bytes for shape in (result, *stored))
        converting = launch_seconds(system) + sum(
            weight_conversion_seconds(canonical_dtype(shape.dtype), shape.size, flops / (2 * shape.size))
            for shape in stored
        )
    share = product_efficiency(system, math.ceil(result.size / n), k, n, dtype=dtype, moved_bytes=moved)
    return max(flops / (system.peak(dtype) * share), converting)


def _stored(module: Module, operand: Instruction, op: Instruction) -> Instruction:
    """Return the value that a matmul's operand is a view or cast of, followed back to an operand of the fusion `op`."""
    value, before = operand, operand
    while before is not None and before.computation != op.computation:
        value, before = before, forwarded_from(module, before, VIEWS_AND_CASTS)
    return value


def _peak_dtype(dtype: str, system: System) -> str:
    """Return the dtype whose peak applies to matmuls of an HLO dtype; bf16 if the chip has no peak for it."""
    name = "fp8" if dtype.startswith("f8") else {"s8": "int8", "u8": "int8"}.get(dtype, dtype)
    return name if name in system.chip.peak_flops else "bf16"
