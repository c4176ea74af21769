"""Pretrained models: initial parameters, tokenizer, and copies of a Hugging Face directory's files."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.description.families.comparison import differences
from meshwright.description.families.load import load_model
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.model import Model, ModelConfig
from meshwright.errors import MeshwrightError
from meshwright.execution.text.tokenizer import FILES, Tokenizer, read_tokenizer
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.support.files import write_file

MODEL_FILES = ("config.json", "generation_config.json", *FILES)
"""Files of a Hugging Face directory that are copied with its weights."""

PRETRAINED = "pretrained"
"""Folder of a run directory with copies of the pretrained directory's files."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf")
"""Patterns of the files of weights in a directory."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
"""Files of a tokenizer in a directory."""


class Pretrained(NamedTuple):
    """Where a new run takes its initial parameters and its tokenizer from."""

    weights: Path | None = None  # Directory; None to initialise parameters randomly.
    tokenizer: Path | None = None  # Directory; None to read text as bytes.


def find_pretrained(what: Any, weights: str | Path | None, *, from_scratch: bool) -> Pretrained:
    """Find the pretrained model of a new run: `weights`, or `what` if it is the directory of a trained model.

    Args:
        what: the model, as in `train`.
        weights: a Hugging Face directory; None for none.
        from_scratch: initialise new parameters, and use only the tokenizer.

    Raises:
        MeshwrightError: the directory `weights` does not exist or is given with from_scratch, or `what` has a tokenizer
            but no weights and from_scratch is not set.
    """
    if weights is not None:
        if from_scratch:
            raise MeshwrightError(f"--from-scratch draws new parameters, and --weights {weights} are given: leave one")
        if not (directory := Path(weights)).is_dir():
            raise MeshwrightError(
                f"there is no directory {str(weights)!r}; --weights takes one with config.json and safetensors"
            )
    elif (found := _directory(what)) is None:
        return Pretrained()
    else:
        directory = found
    directory = directory.absolute()
    has_weights = any(path for pattern in WEIGHTS for path in directory.glob(pattern))
    tokenizers = [name for name in TOKENIZERS if (directory / name).is_file()]
    tokenizer = directory if tokenizers else None
    if from_scratch:
        return Pretrained(tokenizer=tokenizer)
    if weights is None and not has_weights:
        if tokenizers:
            raise MeshwrightError(
                f"{what} holds {tokenizers[0]} and no weights; --from-scratch (from_scratch=True) draws new parameters"
            )
        return Pretrained()
    return Pretrained(directory, tokenizer)


def check_same_model(model: Model, weights: Path) -> None:
    """Raise a `MeshwrightError` that names the first different field if a config.json describes another model.

    Names and adapters are not compared.
    """
    published = load_model(str(weights))
    if not isinstance(model, ModelConfig):
        raise MeshwrightError(
            f"{model.name} is not the model of {weights}: it is written as ops, without a config.json"
        )
    own = replace(model, name=published.name, lora=published.lora)
    for field, (ours, theirs) in differences(own, published).items():
        raise MeshwrightError(
            f"{model.name} is not the model of {weights}: {field} is {ours}, and {theirs} in its config.json"
        )


def run_tokenizer(config: RunConfig, directory: Path | None = None) -> Tokenizer | None:
    """Return the tokenizer of a run, from the copy in its directory if there is one; None if text is read as bytes.

    Raises:
        MeshwrightError: the tokenizer's file is missing.
    """
    if config.tokenizer is None:
        return None
    source = pretrained_directory(config, directory)
    if (found := read_tokenizer(source, vocab=config.workload.config.vocab)) is None:
        raise MeshwrightError(f"{source} has no tokenizer.json, which this run reads its text with; put it back")
    return found


def tokenizer_checksum(config: RunConfig, directory: Path | None = None) -> str:
    """Return the SHA-256 of the files of a run's tokenizer, or the text `bytes` if the run reads text as bytes."""
    if config.tokenizer is None:
        return "bytes"
    source, found = pretrained_directory(config, directory), hashlib.sha256()
    for name in FILES:
        if (source / name).is_file():
            found.update(name.encode() + b"\0" + (source / name).read_bytes())
    return found.hexdigest()


def pretrained_directory(config: RunConfig, directory: Path | None) -> Path:
    """Return the directory of a run's pretrained files: their copy in the run directory, else the original."""
    if directory is not None and (directory / PRETRAINED).is_dir():
        return directory / PRETRAINED
    return Path(config.tokenizer or config.weights or "")


def copy_pretrained_files(config: RunConfig, directory: Path) -> None:
    """Copy to the run directory those files of the pretrained model that loading and exporting the run needs."""
    source, target = pretrained_directory(config, directory), directory / PRETRAINED
    if (config.weights or config.tokenizer) and source != target:
        partial = directory / f".{PRETRAINED}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name in MODEL_FILES:
            if (source / name).is_file():
                write_file(partial / name, (source / name).read_bytes())
        partial.rename(target)


def _directory(what: Any) -> Path | None:
    """Return the directory of a model if `what` is this directory or the config.json in it; else None."""
    if not isinstance(what, (str, Path)) or str(what) in PRESETS:
        return None
    path = Path(what)
    # A bare `config.json` is in the current directory.
    directory = path if path.is_dir() else path.parent
    is_config = path.is_dir() or path.name == "config.json"
    return directory if is_config and (directory / "config.json").is_file() else None
