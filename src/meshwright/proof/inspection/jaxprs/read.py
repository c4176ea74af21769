"""Find all mistakes in the jaxpr of a function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.proof.compiler.program import TracedMistake
from meshwright.proof.inspection.jaxprs.blocks import read_block
from meshwright.proof.inspection.jaxprs.constraints import constraint_mistakes
from meshwright.proof.inspection.jaxprs.replicas import replica_mistakes
from meshwright.proof.inspection.jaxprs.rings import ring_mistakes
from meshwright.proof.inspection.jaxprs.state import state_mistakes
from meshwright.proof.inspection.jaxprs.sums import sum_mistakes
from meshwright.proof.inspection.jaxprs.values import callback_mistakes, constant_mistakes, wide_product_mistakes

_READERS = (
    replica_mistakes,
    ring_mistakes,
    sum_mistakes,
    constant_mistakes,
    callback_mistakes,
    wide_product_mistakes,
)


def read_mistakes(traced: Any) -> Iterator[TracedMistake]:
    """Yield the mistakes in a traced function (`jax.stages.Traced`)."""
    yield from {repr(one): one for one in constraint_mistakes(traced.jaxpr.jaxpr)}.values()  # a call's body may recur
    block = read_block(traced.jaxpr)
    for reader in _READERS:
        yield from reader(block)
    yield from state_mistakes(traced)
