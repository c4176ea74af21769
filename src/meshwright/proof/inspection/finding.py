"""One mistake in a compiled program: its figures, and the sentences about it."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from meshwright.description.hlo.shapes import Shape
from meshwright.description.hlo.specs import Spec


class FindingKind(StrEnum):
    """The kind of a mistake."""

    REPLICATED_PARAMETER = "replicated parameter"
    REPLICATED_STATES = "replicated optimizer state"
    REPLICATED_BATCH = "replicated batch"
    NOT_DONATED = "not donated"
    CONSTRAINT_WITHOUT_EFFECT = "constraint without effect"
    FULL_REMATERIALIZATION = "full rematerialization"
    UNPLANNED_COLLECTIVE = "unexpected collective"
    SLICED_ALL_REDUCE = "all-reduce for reduce-scatter"
    GATHERED_TWICE = "gathered twice"
    REDUCED_TWICE = "reduced twice"
    MISSING_SUM = "missing sum"
    REDUNDANT_COMPUTE = "repeated work"
    MESH_ORDER = "mesh axes on slow links"
    ACROSS_SLICES = "across slices"
    EXPOSED_COMMUNICATION = "exposed communication"
    PADDING = "padding"
    UNEVEN_STAGES = "uneven stages"
    BRANCHED_COLLECTIVE = "collective in a branch"
    RING_TOO_LONG = "ring too long"
    SENT_COPIES = "exchange of identical copies"
    SUM_IN_LOOP = "sum in every iteration"
    GATHERED_TO_SUM = "gathered to be summed"
    CAPTURED_CONSTANT = "captured constant"
    HOST_CALL_IN_LOOP = "host call in a loop"
    WIDE_PRODUCT = "float32 by accident"
    STATE_CHANGED = "state changes sharding or dtype"
    HOISTED_GATHER = "layers gathered before the loop"
    UNSHARDING_CONSTRAINT = "constraint that un-shards"
    SPLIT_CONTRACTION = "product split along its contracting dim"
    MOVED_STATE = "state moved in each step"
    GATHERED_RESULT = "result gathered on every device"
    RECOMPUTED_COLLECTIVE = "collective recomputed"
    WHOLE_BESIDE_BATCH = "mask or table not split"
    UNPARTITIONED_BITS = "random bits not partitioned"
    SAME_RANDOM_BITS = "same random numbers on all devices"
    MISLAID_STATE = "state sharded unlike its parameter"


@dataclass(frozen=True, kw_only=True)
class Finding(ABC):
    """A mistake in a compiled program. Each check has a subclass with its figures.

    In subclasses, array is an array on one device, as `f32[3,4]`; axes are the mesh axes of the mistake, and degree is
    the number of devices along these axes.
    """

    id: ClassVar[str]
    """Name of the mistake in options, files and docs/findings.md: the class name in kebab-case, `gathered-twice`."""

    kind: ClassVar[FindingKind]
    merged_by: ClassVar[tuple[str, ...]] = ()
    """Findings with the same source are merged if these fields are equal."""
    is_merged_across_sources: ClassVar[bool] = False
    """Whether findings with equal `merged_by` fields are merged even if their sources differ."""

    is_share_of_work: ClassVar[bool] = False
    """Whether the check's threshold is a fraction of a step's flops: its findings are reported even if cheap."""

    bytes: int  # Cost per device and step, communicated or stored.
    cost_seconds: float | None  # Cost per step; None if the hardware is unknown.
    source: str  # file:line (scopes); '' if the compiler kept none.
    elsewhere: tuple[str, ...] = ()  # Other places with the same mistake.
    link: str = ""  # The links that it loads, as `x: ring of 4`; '' if it moves nothing, or the hardware is unknown.

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.id = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    @abstractmethod
    def _sentences(self) -> tuple[str, str]:
        """Return the evidence and the fix: what the program does, with figures, and what to change."""

    @property
    def evidence(self) -> str:
        """What the compiled program does, with figures."""
        others = len(self.elsewhere)
        lines = f"; the same at {others} other line{'s' if others > 1 else ''}" if others else ""
        return self._sentences()[0] + (f"; over {self.link}" if self.link else "") + lines

    @property
    def fix(self) -> str:
        """What to change."""
        return self._sentences()[1]

    @property
    def is_wrong(self) -> bool:
        """Whether the result is wrong, not only slow. Such findings are always reported."""
        return False

    def explains(self, other: Finding) -> bool:
        """Whether another finding is only a consequence of this one, and is not reported."""
        del other
        return False

    @property
    def is_at_one_line(self) -> bool:
        """Whether findings at one line are merged even if their scopes differ."""
        return False

    @property
    def line(self) -> str:
        """The file:line of its source, without scopes."""
        return line_of(self.source)

    def to_json(self) -> dict[str, Any]:
        """This finding as plain data."""
        figures = {key: _plain(value) for key, value in vars(self).items()}
        return {"id": self.id, "kind": self.kind} | figures | {"evidence": self.evidence, "fix": self.fix}


def line_of(source: str) -> str:
    """Return the file:line of a finding's source; a source of scopes alone as it is."""
    return source if source.startswith("(") else source.partition(" ")[0]


def num_elements(array: str) -> int:
    """Return the number of elements of an array that is given as text: 12 for `f32[3,4]`."""
    return math.prod(map(int, re.findall(r"\d+", array.partition("[")[2])))


def joined(axes: tuple[str, ...]) -> str:
    """Return mesh axes as text: `fsdp*tp`. axes: () for a collective whose device groups match no mesh axes."""
    return "*".join(axes) or "groups that are no mesh axes"


def _plain(value: Any) -> Any:
    """Convert shapes and shardings to text, axes to lists."""
    if isinstance(value, Shape | Spec):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
