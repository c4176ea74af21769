"""What a step takes of something, flops or bytes, by phase and by scope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.hlo.module import Instruction, Module
from meshwright.hlo.phases import describe, scope_of
from meshwright.record import Phase

Part = tuple[Phase, str]
"""A phase, and the path of named scopes and the primitive (`phases.scope_of`)."""


def part_of(module: Module, instruction: Instruction) -> Part:
    """The phase and the scope of an instruction."""
    said = describe(module, instruction)[0]
    return said.phase, scope_of(said.op_name)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """An amount a step on one device by phase and scope. notes: what is not in it."""

    by_part: Mapping[Part, int]
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """All of it, recomputation included."""
        return sum(self.by_part.values())

    @property
    def by_phase(self) -> dict[Phase, int]:
        """The amount of each phase; `recompute` is what a forward pass has done before."""
        amounts: Counter[Phase] = Counter()
        for (phase, _), amount in self.by_part.items():
            amounts[phase] += amount
        return dict(amounts)

    @property
    def by_scope(self) -> dict[str, int]:
        """The amount of each scope, most first."""
        amounts: Counter[str] = Counter()
        for (_, scope), amount in self.by_part.items():
            amounts[scope] += amount
        return dict(amounts.most_common())
