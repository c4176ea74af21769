"""Accidental contents of a function: captured constants, matmuls widened to float32, host callbacks in loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind
from meshwright.units import show_bytes, show_percent


@dataclass(frozen=True, kw_only=True)
class CapturedConstant(Finding):
    """An array that a function closes over: it becomes a constant of the program, replicated on each device."""

    kind = FindingKind.CAPTURED_CONSTANT

    array: str

    def _sentences(self) -> tuple[str, str]:
        return (
            f"{self.array} is captured by the function: a constant of {show_bytes(self.bytes)} in the program, whole on"
            " every device, and a new one means a new compilation",
            "pass it as an argument, with a sharding: step(params, table, batch)",
        )


@dataclass(frozen=True, kw_only=True)
class HostCallInLoop(Finding):
    """A callback to Python in every iteration of a loop.

    op: the primitive. count: calls per step.
    """

    kind = FindingKind.HOST_CALL_IN_LOOP

    op: str
    count: int

    def _sentences(self) -> tuple[str, str]:
        often = f"{self.count} times a step" if self.count > 1 else "in every iteration"
        return (
            f"{self.op} runs in a loop, {often}: each time the devices wait for Python on the host",
            "collect what it needs as a result of the loop and call it once behind it, or leave it out of the step that"
            " trains",
        )


@dataclass(frozen=True, kw_only=True)
class WideProduct(Finding):
    """A matmul that runs in float32 because JAX converted its 16-bit operand to match a float32 one.

    array: the converted operand. narrow: its dtype before. share: the matmul's fraction of the forward flops.
    widened_at: the line on which the other operand became float32; '' if unknown.
    """

    kind = FindingKind.WIDE_PRODUCT
    is_share_of_work = True

    array: str
    narrow: str
    share: float
    widened_at: str

    def _sentences(self) -> tuple[str, str]:
        since = f", since {self.widened_at}" if self.widened_at else ""
        return (
            f"this matmul runs in float32, with {show_percent(self.share)} of the forward flops: one operand is"
            f" {self.narrow}, and the other float32{since}, so JAX widens {self.array}",
            f"cast the float32 operand: x.astype({_NAMES.get(self.narrow, self.narrow)}); scale by Python numbers, not"
            " by NumPy ones or float32 arrays (np.sqrt(d) is one: float(np.sqrt(d))); sums in float32 need only"
            " preferred_element_type=jnp.float32",
        )


_NAMES = {"bf16": "jnp.bfloat16", "f16": "jnp.float16"}


def accidental_values(context: ProgramContext) -> Iterator[Finding]:
    """Yield large captured constants, callbacks in loops, and matmuls widened to float32."""
    for one in context.traced(CapturedConstant.id):
        size = Shape(one.dtype, one.dims)
        cost = context.no_seconds
        yield CapturedConstant(array=str(size), bytes=size.bytes, cost_seconds=cost, source=one.source)
    for one in context.traced(HostCallInLoop.id):
        size, cost = Shape(one.dtype, one.dims).bytes, context.no_seconds
        yield HostCallInLoop(
            op=one.figures["op"], count=one.count, bytes=one.count * size, cost_seconds=cost, source=one.source
        )
    for one in context.traced(WideProduct.id):
        shape = Shape(one.dtype, one.dims)
        yield WideProduct(
            array=str(shape),
            narrow=one.figures["narrow"],
            share=one.figures["share"],
            widened_at=one.figures["widened_at"],
            bytes=one.count * shape.bytes // 2,
            cost_seconds=context.flop_seconds(one.figures["flops"] / context.module.num_devices),
            source=one.source,
        )
