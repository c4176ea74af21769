"""Find accidental values in a function: large constants, float32 matmuls, host callbacks in loops."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.proof.compiler.program import TracedMistake
from meshwright.proof.inspection.jaxprs.blocks import Op, OpBlock, Value, hlo_dtype
from meshwright.proof.inspection.jaxprs.places import is_explicit_cast, is_promoted

_LEAST_CONSTANT = 1 << 16
"""In bytes. Smaller constants, e.g. tables of positions, cost nothing, and are not reported."""

_LEAST_SHARE = 0.01
"""The smallest float32 matmul reported, as a fraction of all matmul flops."""

_NARROW = ("bfloat16", "float16")
_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")
_KEEPS_DTYPE = frozenset(
    {"transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "sharding_constraint", "mul", "add", "sub"}
    | {"div", "select_n", "pvary", "dynamic_slice", "slice", "neg", "all_gather", "reshard", "max", "exp", "reduce_sum"}
)


def constant_mistakes(block: OpBlock) -> Iterator[TracedMistake]:
    """Yield large arrays that a function closes over."""
    for value in {id(one.array): one for one in block.constants if one.num_bytes >= _LEAST_CONSTANT}.values():
        user = next((op for _, op in block.everything() if any(one is value for one in op.operands)), None)
        source = user.place if user else ""
        yield TracedMistake("captured-constant", *value.text, source)


def callback_mistakes(block: OpBlock, count: int = 1, is_in_loop: bool = False) -> Iterator[TracedMistake]:
    """Yield host callbacks in loops. count: executions of the block per step. is_in_loop: whether a loop runs it."""
    for op in block.ops:
        if is_in_loop and op.name in _CALLBACKS:
            value = max(op.operands, key=lambda one: one.num_bytes, default=None)
            text = value.text if value else ("f32", ())
            yield TracedMistake("host-call-in-loop", *text, op.place, (), count, {"op": op.name})
        for body in op.bodies:
            yield from callback_mistakes(body, count * op.iterations, is_in_loop or op.name in ("scan", "while"))


def wide_product_mistakes(block: OpBlock) -> Iterator[TracedMistake]:
    """Yield float32 matmuls with an operand that JAX widened from 16 bits because the other was float32.

    A cast by which Flax matches the dtypes of a layer's operands counts only if no matmul of the function runs in 16
    bits; else the layer may be float32 on purpose, by its `dtype`.
    """
    products = list(_products(block, 1))
    total = sum(flops for _, flops, _ in products)
    is_wide = not any(one.dtype in _NARROW for op, _, _ in products for one in op.operands)
    for op, flops, count in products:
        if "transpose(" in op.scope or flops < _LEAST_SHARE * total:
            continue
        for value, other in (op.operands, op.operands[::-1]):
            narrow = _narrow_dtype(value, is_wide=is_wide)
            if narrow and other.dtype == "float32":
                figures = {"flops": flops, "share": flops / total, "narrow": hlo_dtype(narrow)}
                figures["widened_at"] = _widened_at(other)
                yield TracedMistake("wide-product", *value.text, op.place, (), count, figures)
                break


def _narrow_dtype(value: Value, *, is_wide: bool) -> str:
    """Return the 16-bit dtype of a matmul's operand before it is widened for the matmul; '' if it had none.

    JAX widens it by a cast before the matmul, or XLA in the matmul. is_wide: whether casts of Flax count too.
    """
    if value.dtype in _NARROW:
        return value.dtype
    if value.op is None or value.op.name != "convert_element_type":
        return ""
    if is_explicit_cast(value.op.equation) and not (is_wide and is_promoted(value.op.equation)):
        return ""
    before = value.op.operands[0].dtype
    return before if before in _NARROW else ""


def _widened_at(value: Value) -> str:
    """Return the line on which a 16-bit value became float32 by type promotion; '' if not found."""
    waiting, seen = [value], set()
    while waiting:
        held = waiting.pop(0)
        op = held.op
        if id(held) in seen or op is None or held.dtype != "float32":
            continue
        seen.add(id(held))
        if op.name == "convert_element_type" and op.operands[0].dtype in _NARROW:
            return op.place
        if op.name in _KEEPS_DTYPE:
            waiting += op.operands
    return ""


def _products(block: OpBlock, count: int) -> Iterator[tuple[Op, float, int]]:
    """Yield (op, flops, executions), both per step, for each matmul or convolution. count: executions of the block."""
    for op in block.ops:
        if op.name in ("dot_general", "conv_general_dilated"):
            left, right = (one.dims for one in op.operands)
            if op.name == "dot_general":
                (contracted, _), _ = op.params["dimension_numbers"]
                summed = np.prod([left[dim] for dim in contracted], initial=1.0)
            else:
                summed = np.prod(right, initial=1.0) / right[op.params["dimension_numbers"].rhs_spec[0]]
            yield op, float(2 * count * summed * np.prod(op.results[0].dims, initial=1.0)), count
        for body in op.bodies:
            yield from _products(body, count * op.iterations)
