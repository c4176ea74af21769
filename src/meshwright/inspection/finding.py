"""One mistake in a compiled program, as data. Sentences about it are in `inspection.words`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from meshwright.hlo import Shape, Spec


class FindingKind(StrEnum):
    """What is wrong."""

    REPLICATED_PARAMETER = "replicated parameter"
    REPLICATED_STATES = "replicated optimizer state"
    REPLICATED_BATCH = "replicated batch"
    NOT_DONATED = "not donated"
    CONSTRAINT_WITHOUT_EFFECT = "constraint without effect"
    FULL_REMATERIALIZATION = "full rematerialization"
    UNPLANNED_COLLECTIVE = "unplanned collective"
    SLICED_ALL_REDUCE = "all-reduce for reduce-scatter"
    GATHERED_TWICE = "gathered twice"
    REDUCED_TWICE = "reduced twice"
    MISSING_SUM = "missing sum"
    REDUNDANT_COMPUTE = "repeated work"
    MESH_ORDER = "mesh against the fabric"
    EXPOSED_COMMUNICATION = "exposed communication"
    PADDING = "padding"
    UNEVEN_STAGES = "uneven stages"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake that a compiled program shows; each check has a subclass with its figures.

    bytes: its cost per device and step, communicated or stored. seconds: its cost per step; None where the hardware is
    not known. source: file:line (scopes), '' where the compiler kept none.
    """

    kind: ClassVar[FindingKind]
    merged_by: ClassVar[tuple[str, ...]] = ()
    """Fields that are equal in findings that are one mistake, if they also have a source in common."""

    bytes: int
    seconds: float | None
    source: str

    def to_json(self) -> dict[str, Any]:
        """This finding as plain data."""
        return {"kind": self.kind} | {key: _plain(value) for key, value in vars(self).items()}


def _plain(value: Any) -> Any:
    """Shapes and shardings as text, axes as lists."""
    if isinstance(value, Shape | Spec):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
