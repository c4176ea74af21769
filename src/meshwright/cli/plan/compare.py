"""`meshwright plan --compare`: compare meshes term by term."""

from __future__ import annotations

import json
from collections.abc import Sequence

from meshwright.cli.plan.columns import comparison
from meshwright.cli.plan.screen import candidate, notes_of, print_head
from meshwright.pictures.tables import GAP, console, show
from meshwright.pictures.text import folded, next_line
from meshwright.planning.plan import Plan
from meshwright.planning.why.gap import gap_to
from meshwright.planning.why.step import how

NAMES = 25
"""The width in characters of the names of a comparison's rows."""


def print_compared(plans: Sequence[Plan], trained: int) -> None:
    """Print the fastest mesh that fits, a table of all, and for each its strategy and why it loses.

    trained: the sequence length that the model was trained with, 0 if unknown.
    """
    best = min(plans, key=order)
    fits = best.predicted.fits
    print_head(best)
    widest = max(12, *(len(str(plan.mesh)) for plan in plans)) + GAP
    abreast = max(1, (console().width - NAMES) // widest)
    for start in range(0, len(plans), abreast):
        print()
        show(console(), comparison(plans[start : start + abreast]))
    print()
    for plan in plans:
        first = "the best of these" if fits else "none fits; this needs least memory"
        loses = first if plan == best else f"loses because: {gap_to(plan, best)}"
        print(folded(f"{plan.mesh}: {loses}"))
        print(folded(f"       {how(plan)}"))
    for note in notes_of(best, trained):
        print(folded(f"note: {note}"))
    if fits:
        print(next_line(f"--mesh {best.mesh} -o plan.yaml"))


def compare_data(plans: Sequence[Plan]) -> None:
    """Print the meshes as JSON, in the order in which they were named."""
    best = min(plans, key=order)
    print(json.dumps({"compared": [candidate(plan, best) for plan in plans]}, indent=2))


def order(plan: Plan) -> tuple[bool, float, int]:
    """Return the sort key of a plan: plans that fit first, by step time; then the others, by memory."""
    fits, peak = bool(plan.predicted.fits), plan.predicted.memory_bytes["peak"]
    return not fits, (plan.predicted.step_seconds or 0.0) if fits else 0.0, peak
