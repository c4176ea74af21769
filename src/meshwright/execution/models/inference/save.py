"""Save a model as a directory that Hugging Face's libraries load: complete or absent."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from jax import Array

from meshwright.description.families.registry import hugging_face_config, model_from_hugging_face
from meshwright.description.families.wrappers import text_config
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import Tree
from meshwright.errors import MeshwrightError
from meshwright.execution.text.byte_files import byte_tokenizer_files
from meshwright.execution.text.tokenizer import Tokenizer
from meshwright.execution.weights.save import save_weights
from meshwright.support.files import check_new_directory, write_error, write_file

StoredDtype = Literal["bf16", "f16", "f32"]

_NAMES: Mapping[StoredDtype, str] = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
"""Names of dtypes in config.json."""

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Byte models have no special tokens; without these entries transformers uses the family's defaults."""


def check_target(directory: str | Path) -> None:
    """Raise if a model cannot be written to a directory, because it is not empty or cannot be created."""
    check_new_directory(directory)
    if Path(directory).is_dir() and any(Path(directory).iterdir()):
        raise MeshwrightError(f"{directory} is not empty; give a directory that is new")


def model_files(
    model: ModelConfig,
    source: Mapping[str, bytes],
    tokenizer: Tokenizer | None,
    seq_len: int | None,
    dtype: StoredDtype,
) -> dict[str, bytes]:
    """Return the contents of the files to store with a model's weights, by name: config.json, tokenizer and others.

    Args:
        source: files that were loaded with the model. Its config.json is kept if it describes this model in this dtype,
          else changed. Without one (a model that was trained from scratch) it is generated.
        tokenizer: if not None and `source` has no config.json, the files of the byte tokenizer are added.
        seq_len: length of the sequences that the model was trained on, in tokens; for a generated config.json.
        dtype: dtype of the stored weights, which config.json names.

    Raises:
        MeshwrightError: no config.json describes the model.
    """
    if "config.json" not in source:
        trained = {} if seq_len is None else {"max_position_embeddings": seq_len}
        config = trained | hugging_face_config(model) | _NO_TOKENS
        files = {"config.json": config | {"dtype": _NAMES[dtype]}, "generation_config.json": _NO_TOKENS}
        own = byte_tokenizer_files(seq_len) if tokenizer else {}
        return {name: _json(data) for name, data in files.items()} | own
    whole = json.loads(source["config.json"])
    config = dict(text_config(whole, name=model.name))
    is_part = config != whole
    said = {name for name in ("dtype", "torch_dtype") if config.get(name, _NAMES[dtype]) != _NAMES[dtype]}
    changes: dict[str, Any] = dict.fromkeys(said, _NAMES[dtype])
    if model_from_hugging_face(config, name=model.name) != model:
        changes |= hugging_face_config(model)  # For example, fewer layers.
    # Weights that were loaded from fp8 blocks are written without quantization.
    kept = {name: value for name, value in config.items() if name != "quantization_config"}
    is_same = not changes and not is_part and len(kept) == len(config)
    return dict(source) if is_same else {**source, "config.json": _json(kept | changes)}


def write_model(
    directory: Path,
    model: ModelConfig,
    params: Tree[Array],
    files: Mapping[str, bytes],
    dtype: StoredDtype,
    *,
    max_file_bytes: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Write weights and files to a temporary directory, then rename it to `directory`.

    files: contents of the other files, by name. Other arguments are those of `save_weights`.
    """
    check_target(directory)
    with whole_directory(directory) as partial:
        for name, data in files.items():
            write_file(partial / name, data)
        save_weights(partial, model, params, dtype.upper(), max_file_bytes=max_file_bytes, on_bytes=on_bytes)


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `directory` once complete, and deleted on failure."""
    partial = directory.absolute().with_name(f".{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        if directory.is_dir():
            directory.rmdir()
        os.replace(partial, directory)
    except OSError as error:
        raise write_error(directory, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()
