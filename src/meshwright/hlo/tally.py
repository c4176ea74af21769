"""Amounts of a step, flops or bytes, by phase and named scope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.hlo.module import Instruction, Module
from meshwright.hlo.phases import describe, scope_of
from meshwright.record import Phase

PhaseScope = tuple[Phase, str]
"""A phase, and the path of named scopes with the primitive (`phases.scope_of`)."""


def phase_and_scope(module: Module, instruction: Instruction) -> PhaseScope:
    """The phase and the scope of an instruction."""
    said = describe(module, instruction)[0]
    return said.phase, scope_of(said.op_name)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """An amount per step and device, by phase and scope. notes: what is not included."""

    by_phase_scope: Mapping[PhaseScope, int]
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """The sum, including recomputation."""
        return sum(self.by_phase_scope.values())

    @property
    def by_phase(self) -> dict[Phase, int]:
        """The amount of each phase."""
        amounts: Counter[Phase] = Counter()
        for (phase, _), amount in self.by_phase_scope.items():
            amounts[phase] += amount
        return dict(amounts)

    @property
    def by_scope(self) -> dict[str, int]:
        """The amount of each scope, largest first."""
        amounts: Counter[str] = Counter()
        for (_, scope), amount in self.by_phase_scope.items():
            amounts[scope] += amount
        return dict(amounts.most_common())
