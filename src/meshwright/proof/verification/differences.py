"""Causes of differences between a plan and its compiled program, as data. Sentences are in `pictures.words`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshwright.record import Lowering


class Difference(StrEnum):
    """A kind of difference between a plan and a compiled program."""

    # Differences without an explanation.
    NOT_PLANNED = "not planned"
    MISSING = "missing"
    UNEXPLAINED = "unexplained"
    ANOTHER_PROGRAM = "another program"

    # Contents of a program's text beyond its plan.
    DROPLESS_PADDING = "dropless padding"
    """Buffers and matmuls of experts without a capacity: the plan assumes balanced routing."""
    UNTAKEN_BRANCHES = "untaken branches"
    """Branches taken in few pipeline ticks, counted as if taken in every tick."""
    OPAQUE_KERNELS = "opaque kernels"
    """Flops of kernels that declare none."""
    KERNEL_ESTIMATES = "kernel estimates"
    """Flops that attention kernels declare: half of all scores, and more matmuls in backward than are counted."""
    SUMMED_ONCE = "summed once"
    """XLA:GPU sums the last norm's gradient once a step, not once a microbatch."""

    EXPERT_BUFFERS = "expert buffers"
    """Generation sends whole tokens to experts, in buffers for any routing; the plan sends parts, evenly routed."""

    INT8_SCALES = "int8 scales"
    """Scales of int8 arrays, and parameters that a server does not keep in int8: token embeddings and routers."""

    SINGLE_ROWS = "single rows"
    """Matmuls of one row, which compilers run as multiplications and sums that are not counted as flops."""

    PADDED_ROWS = "padded rows"
    """On TPUs a matmul of one row runs with rows of zeros added (`models.generation.stationary.pad_single_row`)."""

    MASKED_SCORES = "masked scores"
    """Attention to prompts in blocks, or through scores, also multiplies queries with keys that a mask leaves out."""

    # Deviations of the compiler, found by exact identities of bytes.
    OTHER_PHASE = "other phase"
    PADDED_SHARDS = "padded shards"
    PADDED_SHARDS_PERMUTED = "padded shards permuted"
    WITHIN_AND_BETWEEN_SLICES = "within and between slices"
    REGISTER_ROWS = "register rows"
    RING_REMAINDER = "ring remainder"
    """The part of a collective that is not done as a ring of permutes."""
    RING_STEPS = "ring steps"
    """Permutes that are steps of other collectives (`Cause.collectives`)."""
    COMBINED_SUMS = "combined sums"
    COMBINED_SUMS_ACROSS_PHASES = "combined sums across phases"
    JOINED_AXES = "joined axes"
    """One all-reduce over several axes, planned as one for each set of axes (`Cause.axes`)."""
    SLICED_FURTHER = "sliced further"
    """XLA:CPU sums whole arrays where the plan has a reduce-scatter whose result is then sliced."""
    LOWERED = "lowered"
    """The compiler lowered a collective as another (`Cause.lowering`)."""

    # Quantities that are not expected to be equal.
    PADDED_ARGUMENTS = "padded arguments"
    ESTIMATED = "estimated"
    READ_AHEAD = "read ahead"
    """Weights in a TPU's fast memory (`Cause.num_bytes`), which its compiler counts as temporaries."""
    DUE_TO_TEMPORARIES = "due to temporaries"
    STEP_TERM = "step term"
    """A part of the step time that differs (`Cause.term`, `Cause.seconds`)."""
    LEAST_OP_TIME = "least op time"
    """The least time that the TPU compiler estimates for any op, times the ops of a step (`Cause.count`)."""
    READ_THEN_MULTIPLIED = "read then multiplied"
    """XLA:TPU reads most of a layer's weight into fast memory before it multiplies; the plan overlaps the two."""
    GATHERED_PAGES = "gathered pages"
    """The engine gathers pages, then computes scores and sums in separate ops; the plan reads the pages once."""


UNNAMED = frozenset({Difference.NOT_PLANNED, Difference.MISSING, Difference.UNEXPLAINED, Difference.ANOTHER_PROGRAM})
"""Differences that no rule explains."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a quantity differs, with the figures that this kind of difference has."""

    difference: Difference
    collectives: tuple[str, ...] = ()
    axes: tuple[tuple[str, ...], ...] = ()
    lowering: Lowering | None = None
    term: str = ""
    seconds: float | None = None
    count: int | None = None
    num_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """This cause as plain data, without empty fields."""
        data = vars(self) | {"lowering": self.lowering.to_json() if self.lowering else None}
        return {key: value for key, value in data.items() if value not in (None, "", ())}
