"""Causes of differences between a plan and its compiled program, with figures, and the printed phrase of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshwright.record import Lowering
from meshwright.units import show_bytes, show_seconds


class Difference(StrEnum):
    """A kind of difference between a plan and a compiled program."""

    # Differences without an explanation.
    NOT_PREDICTED = "not predicted"
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
    """Generation sends whole tokens to experts, in buffers for any routing.

    The plan sends parts of tokens and assumes balanced routing.
    """

    INT8_SCALES = "int8 scales"
    """Scales of keys and values in int8, in blocks of a compiler's layout."""

    SINGLE_ROWS = "single rows"
    """Matmuls of one row: compilers emit them as multiply and reduce ops, which are not counted as matmul flops."""

    PADDED_ROWS = "padded rows"
    """On TPUs a matmul of one row runs with rows of zeros added (`models.generation.stationary.pad_single_row`)."""

    MASKED_SCORES = "masked scores"
    """Prefill attention, in blocks or with materialized scores, also multiplies queries with masked keys."""

    # Deviations of the compiler, found by exact identities of bytes.
    OTHER_PHASE = "other phase"
    PADDED_SHARDS = "padded shards"
    PADDED_SHARDS_PERMUTED = "padded shards permuted"
    WITHIN_AND_BETWEEN_SLICES = "within and between slices"
    REGISTER_ROWS = "register rows"
    RING_REMAINDER = "ring remainder"
    """The part of a collective that is not lowered to a ring of permutes."""
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
    """The TPU compiler's smallest estimate for an op (`Cause.least_seconds`), times the number of ops of a step
    (`Cause.count`), less what the plan has for it."""
    READ_THEN_MULTIPLIED = "read then multiplied"
    """XLA:TPU reads most of a layer's weight into fast memory before it multiplies; the plan overlaps the two."""
    GATHERED_PAGES = "gathered pages"
    """The engine gathers pages, then computes scores and sums in separate ops; the plan reads the pages once."""


UNNAMED = frozenset({Difference.NOT_PREDICTED, Difference.MISSING, Difference.UNEXPLAINED, Difference.ANOTHER_PROGRAM})
"""Differences that no rule explains."""


_PHRASES: Mapping[Difference, str] = {
    Difference.NOT_PREDICTED: "not predicted",
    Difference.MISSING: "the compiled program has none",
    Difference.UNEXPLAINED: "differs from the prediction",
    Difference.ANOTHER_PROGRAM: "not the program that was planned",
    Difference.DROPLESS_PADDING: "padded for any routing (experts without a capacity); predicted for balanced routing",
    Difference.UNTAKEN_BRANCHES: "counted in every tick of the HLO text, though few ticks take the branch",
    Difference.OPAQUE_KERNELS: "attention is in kernels that do not state their flops",
    Difference.KERNEL_ESTIMATES: "attention kernels state flops of half the scores, and of two more matmuls backward",
    Difference.SUMMED_ONCE: "the last norm's gradient is summed once, not for each microbatch",
    Difference.EXPERT_BUFFERS: "buffers hold whole tokens for any routing; predicted in parts for balanced routing",
    Difference.INT8_SCALES: "scales are stored beside int8 keys and values",
    Difference.READ_THEN_MULTIPLIED: "as most weights are read before the matmuls begin",
    Difference.GATHERED_PAGES: "as pages are gathered first, and scores are separate ops",
    Difference.PADDED_ROWS: "matmuls of one row run as 8 rows, 7 of them zeros",
    Difference.SINGLE_ROWS: "matmuls of one row or column run element by element, without flops of their own",
    Difference.MASKED_SCORES: "masked scores are computed too; predicted without them",
    Difference.SLICED_FURTHER: "a reduce-scatter and a slice after it, compiled as an all-reduce",
    Difference.OTHER_PHASE: "in another phase; all phases together are as predicted",
    Difference.PADDED_SHARDS: "in shards padded to the compiler's tiles, which collective-permutes put in place",
    Difference.PADDED_SHARDS_PERMUTED: "puts the padded shards of the reduce-scatter in place",
    Difference.WITHIN_AND_BETWEEN_SLICES: ("summed inside slices, then between them; over each axis as predicted"),
    Difference.REGISTER_ROWS: "a few numbers, in whole rows of the compiler's registers",
    Difference.RING_REMAINDER: "the rest is in collective-permutes beside the matmuls that use it",
    Difference.COMBINED_SUMS: "sums over several axes are combined; over each axis the total is as predicted",
    Difference.COMBINED_SUMS_ACROSS_PHASES: (
        "sums over several axes or phases are combined; over each axis the total is as predicted"
    ),
    Difference.PADDED_ARGUMENTS: "small arrays are padded",
    Difference.ESTIMATED: "an estimate",
    Difference.DUE_TO_TEMPORARIES: "by its temporaries",
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a quantity differs. The fields other than `difference` are set for the kinds whose text names them."""

    difference: Difference
    collectives: tuple[str, ...] = ()
    axes: tuple[tuple[str, ...], ...] = ()
    lowering: Lowering | None = None
    term: str = ""
    seconds: float | None = None
    count: int | None = None
    least_seconds: float | None = None
    num_bytes: int | None = None

    def __str__(self) -> str:
        """Return why a figure differs, as a phrase."""
        if self.difference == Difference.RING_STEPS:
            return f"steps of the {' and '.join(self.collectives)}, beside the matmuls that use it"
        if self.difference == Difference.JOINED_AXES:
            return f"predicted over {' and '.join('*'.join(axes) for axes in self.axes)} in turn"
        if self.difference == Difference.READ_AHEAD:
            return f"{show_bytes(self.num_bytes or 0)} of weights read ahead into fast memory"
        if self.seconds is not None:
            amount = f"{'+' if self.seconds > 0 else '-'}{show_seconds(abs(self.seconds))}"
            if self.count and self.least_seconds:
                return f"{self.count:,} ops, most of at least {show_seconds(self.least_seconds)}: {amount}"
            return f"{' '.join(filter(None, (self.term, amount, _PHRASES.get(self.difference))))}"
        if self.lowering is not None:
            return str(self.lowering)
        return _PHRASES[self.difference]

    def to_json(self) -> dict[str, Any]:
        """This cause as plain data, without empty fields."""
        data = vars(self) | {"lowering": self.lowering.to_json() if self.lowering else None}
        return {key: value for key, value in data.items() if value not in (None, "", ())}
