"""Checks of a run before anything is compiled or written; each error is one line."""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.execution.training.data.texts import BYTES
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent

ANYWAY = "--anyway (anyway=True) trains it all the same"


class PlanDoesNotFitError(MeshwrightError):
    """The plan does not fit the memory of its devices. Counts as a failed check, not as wrong usage."""


def check_start(config: RunConfig, *, anyway: bool = False) -> Record:
    """Return the prediction of a run's plan, after checking its memory and vocabulary.

    Args:
        anyway: skip both checks.

    Raises:
        PlanDoesNotFitError: the plan does not fit the memory.
        MeshwrightError: text is read as bytes and some tokens of the vocabulary can never occur.
    """
    system = config.system
    predicted = config.plan.predicted
    if not predicted.fits and not anyway:
        kept = f" and {show_percent(system.memory_headroom)} headroom" if system.memory_headroom else ""
        raise PlanDoesNotFitError(
            f"{config.workload.model.name} on mesh {config.mesh} does not fit: a device needs"
            f" {show_bytes(predicted.memory_bytes['peak'])}{kept} of the {show_bytes(system.usable_bytes)} it has;"
            f" `meshwright plan` says what would fit, {ANYWAY}"
        )
    if not anyway:
        vocab = config.workload.config.vocab
        if vocab > BYTES and config.tokenizer is None:
            raise MeshwrightError(
                f"{config.workload.model.name} has a vocabulary of {vocab:,}; text is read and written as bytes, which"
                f" are {BYTES}, and the other {vocab - BYTES:,} tokens would mean nothing; --weights DIRECTORY begins"
                f" with trained weights and their tokenizer, {ANYWAY}"
            )
    return predicted
