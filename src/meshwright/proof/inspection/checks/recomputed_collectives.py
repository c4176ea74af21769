"""Collectives of activations that the backward pass repeats under `jax.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.record import Kind
from meshwright.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class RecomputedCollective(Finding):
    """A sum or an exchange of activations that runs again when their layer is recomputed."""

    kind = FindingKind.RECOMPUTED_COLLECTIVE
    merged_by = ("collective", "axes")
    is_one_everywhere = True

    collective: Kind
    array: str
    axes: tuple[str, ...]

    def _sentences(self) -> tuple[str, str]:
        return (
            f"jax.checkpoint runs the {self.collective} of {self.array} over {joined(self.axes)} a second time in the"
            f" backward pass: {show_bytes(self.bytes)} a device and step",
            "keep what it returns: y = jax.ad_checkpoint.checkpoint_name(y, 'summed'), and jax.checkpoint(layer,"
            " policy=jax.checkpoint_policies.save_only_these_names('summed'))",
        )


def recomputed_collectives(context: ProgramContext) -> Iterator[Finding]:
    """Yield all-reduces and all-to-alls in the recomputation of layers. Gathers of weights are meant to be repeated."""
    for move in context.collectives:
        one = move.collective
        if one.phase == "recompute" and one.kind in ("all-reduce", "all-to-all") and one.bytes >= LEAST_BYTES:
            if context.is_expected(one.kind, one.axes, one.phase):
                continue
            yield RecomputedCollective(
                collective=one.kind,
                array=one.array,
                axes=one.axes,
                bytes=one.bytes,
                cost_seconds=one.seconds,
                source=one.source,
            )
