"""Random numbers that are equal on devices whose data differ, or not generated on the devices that use them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS, origin
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.proof.inspection.checks.replicated_batches import SPLITS_DATA
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.proof.inspection.slices import ELEMENTWISE
from meshwright.units import show_bytes

RANDOM = re.compile(
    r"jit\(_(?:uniform|randint|normal|normal_real|truncated_normal|bernoulli|gumbel|exponential|laplace|logistic)\)"
    r"|\b(?:random_bits|threefry2x32|rng_bit_generator)\b"
)
"""Matches the op names of JAX's random functions."""

_LEAST_MADE = 1 << 16
"""The fewest bytes of random bits reported; fewer take no time to generate."""


@dataclass(frozen=True, kw_only=True)
class UnpartitionedBits(Finding):
    """Random bits that are sent between devices, or generated in full on each device.

    is_sent: whether they are sent.
    """

    kind = FindingKind.UNPARTITIONED_BITS
    merged_by = ("is_sent",)
    is_merged_across_sources = True

    array: str
    axes: tuple[str, ...]
    is_sent: bool

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        if self.is_sent:
            return (
                f"random numbers are sent over {over}, {show_bytes(self.bytes)} a device and step: without"
                " jax_threefry_partitionable a device cannot make its own part of them",
                "leave jax_threefry_partitionable at True, as JAX has it since 0.5",
            )
        return (
            f"every device along {over} makes all random numbers, {self.array}, and keeps its own part:"
            f" {show_bytes(self.bytes)} a device and step for nothing: the algorithm of this key (rbg) is not"
            " partitionable",
            "make keys as jax.random.key(seed, impl='threefry2x32'), or make the numbers in shard_map from"
            " jax.random.fold_in(key, jax.lax.axis_index(…))",
        )


@dataclass(frozen=True, kw_only=True)
class SameRandomBits(Finding):
    """Random numbers inside `shard_map` that are equal on all devices along axes along which their data differ."""

    kind = FindingKind.SAME_RANDOM_BITS
    merged_by = ("axes",)
    is_merged_across_sources = True

    array: str
    axes: tuple[str, ...]
    degree: int

    @property
    def is_wrong(self) -> bool:
        """Always True: what should be independent is repeated on every device."""
        return True

    def _sentences(self) -> tuple[str, str]:
        index = self.axes[0] if len(self.axes) == 1 else self.axes
        return (
            f"random bits {self.array} come from a key that all {self.degree} devices along {joined(self.axes)} have,"
            " but their data differ: what each drops, adds or starts with is the same",
            f"make the key differ inside of shard_map: key = jax.random.fold_in(key, jax.lax.axis_index({index!r}))",
        )


def same_random_bits(context: ProgramContext) -> Iterator[SameRandomBits]:
    """Yield random numbers that the jaxpr draws from the same key for different data.

    If the key differs along some axes, it may be meant to be the same along others, as tensor parallel ones.
    """
    for one in context.traced(SameRandomBits.id):
        shape, is_folded = Shape(one.dtype, one.dims), one.figures["is_folded"]
        axes = tuple(axis for axis in one.axes if not is_folded or SPLITS_DATA.fullmatch(axis))
        if not axes:
            continue
        yield SameRandomBits(
            array=str(shape),
            axes=axes,
            degree=context.degree(axes),
            bytes=shape.bytes,
            cost_seconds=context.no_seconds,
            source=one.source,
        )


def random_bits(context: ProgramContext) -> Iterator[UnpartitionedBits]:
    """Yield random numbers that collectives move, or that devices generate in full and then slice."""
    for move in context.collectives:
        one = move.collective
        if one.bytes >= LEAST_BYTES and one.axes and RANDOM.search(move.instruction.op_name):
            yield UnpartitionedBits(
                array=one.array,
                axes=one.axes,
                is_sent=True,
                bytes=one.bytes,
                cost_seconds=one.seconds,
                source=one.source,
            )
    for cut in context.module.instructions():
        times = context.execution_counts.times[cut.computation]
        if cut.opcode != "dynamic-slice" or not times:
            continue
        whole, *offsets = context.module.operands(cut)
        if "rng_bit_generator" not in cut.op_name and not _is_of_generator(context.module, whole):
            continue
        axes = frozenset().union(*(context.variance.axes(offset) for offset in offsets))
        if axes and whole.shape.bytes >= _LEAST_MADE:
            yield UnpartitionedBits(
                array=str(whole.shape),
                axes=tuple(axis for axis in context.mesh if axis in axes),
                is_sent=False,
                bytes=times * (whole.shape.bytes - cut.shape.bytes),
                cost_seconds=context.no_seconds,
                source=context.place(cut),
            )


def _is_of_generator(module: Module, value: Instruction) -> bool:
    """Whether a value is computed elementwise from random bits only."""
    made = origin(module, value, frozenset(VIEWS | ELEMENTWISE | {"shift-right-logical", "or", "bitcast-convert"}))
    if made.opcode == "get-tuple-element":
        made = module.operand(made)
    return made.opcode == "rng-bit-generator"
