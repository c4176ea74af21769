"""Advise a mesh, from a serving plan, for a model that is loaded without a chosen mesh."""

from __future__ import annotations

from meshwright.description.families.load import usual_seq_len
from meshwright.errors import MeshwrightError
from meshwright.execution.loading.library import Found
from meshwright.planning.options import OUTPUT_LEN, PROMPT_LEN
from meshwright.planning.serving.search import best_serving_plan
from meshwright.units import show_count, show_seconds


def advised_mesh(found: Found, batch: int) -> str | None:
    """Return a note for the user if a decode plan predicts a faster mesh than the default mesh of `found`; else None.

    batch: number of sequences that are decoded at once.
    """
    if found.run is not None and found.mesh == found.run.mesh:
        return None  # A run stays on the mesh that it was given.
    longest = usual_seq_len(found.model)
    options = {
        "on": found.system,
        "batch": batch,
        "prompt_len": min(PROMPT_LEN, longest * 4 // 5),
        "output_len": min(OUTPUT_LEN, longest // 5),
        "dtype": found.dtype,
        "weight_dtype": found.weight_dtype or found.params_dtype,
        "kv_dtype": found.dtype,
    }
    try:
        taken = best_serving_plan(found.model, "decode", options, mesh=found.mesh).predicted.step_seconds
        best = best_serving_plan(found.model, "decode", options)
    except MeshwrightError:
        return None  # A model that cannot be planned may still run.
    advised = best.predicted.step_seconds
    if advised is None or taken is None or best.mesh == found.mesh or advised >= taken:
        return None
    return (
        f"no mesh was given, so that all devices are along fsdp; for {show_count(batch, 'sequence')} at once"
        f" `meshwright plan --serve decode` advises --mesh {best.mesh}: {show_seconds(advised)} a token, and"
        f" {found.mesh} takes {show_seconds(taken)}"
    )
