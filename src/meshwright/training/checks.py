"""What is checked of a run before anything is compiled or written, each mistake in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.families import PRESETS
from meshwright.planner import make_plan
from meshwright.record import Record
from meshwright.training.data import BYTES
from meshwright.training.run import RunConfig
from meshwright.units import show_bytes, show_percent

ANYWAY = "--anyway (anyway=True) trains it all the same"

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""What a folder of a trained model holds beside its config.json."""


class DoesNotFitError(MeshwrightError):
    """A check that failed, not a mistake: the plan does not fit the memory of its devices."""


def check_from_scratch(what: Any) -> None:
    """Raise where a model is the folder of a trained one, whose weights and tokenizer would be ignored."""
    if not isinstance(what, (str, Path)) or str(what) in PRESETS:
        return
    folder = Path(what) if Path(what).is_dir() else Path(what).parent
    # Of the folder that a command is called in, config.json may be named alone.
    if not (folder / "config.json").is_file() or (Path(what).is_file() and Path(what).name != "config.json"):
        return
    found = [path.name for pattern in (*WEIGHTS, *TOKENIZERS) for path in sorted(folder.glob(pattern))]
    if found:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise MeshwrightError(
            f"{folder} holds {found[0]}{others}, which train does not read yet: it draws new parameters and reads text"
            f" as bytes; --from-scratch (from_scratch=True) does that"
        )


def check_vocab(config: RunConfig, *, more: str = "") -> None:
    """Raise where the vocabulary of a model is larger than that of text read as bytes."""
    vocab = config.workload.config.vocab
    if vocab > BYTES:
        raise MeshwrightError(
            f"{config.workload.model.name} has a vocabulary of {vocab:,}; text is read and written as bytes, which are"
            f" {BYTES}, and the other {vocab - BYTES:,} tokens would mean nothing{more}"
        )


def check_start(config: RunConfig, *, anyway: bool = False) -> Record:
    """What is predicted of a run; one that does not fit the memory, or has tokens that no text has, is an error."""
    system = config.system
    predicted = make_plan(config.workload, config.mesh, system, config.strategy).predicted
    if not predicted.fits and not anyway:
        kept = f" and {show_percent(system.memory_headroom)} headroom" if system.memory_headroom else ""
        raise DoesNotFitError(
            f"{config.workload.model.name} on mesh {config.mesh} does not fit: a device needs"
            f" {show_bytes(predicted.memory_bytes['peak'])}{kept} of the {show_bytes(system.usable_bytes)} it has;"
            f" `meshwright plan` says what would fit, {ANYWAY}"
        )
    if not anyway:
        check_vocab(config, more=f"; {ANYWAY}")
    return predicted
