"""A model on a mesh: logits, text, and its directory for Hugging Face."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, get_args

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.field_types import check_fields, not_a_choice
from meshwright.hardware import System
from meshwright.inference.save import StoredDtype, model_files, write_model
from meshwright.inference.stream import Generated, GenerateOptions, Piece, collect, pieces_of
from meshwright.mesh import MeshShape
from meshwright.models import Sampling, all_logits, generate_tokens
from meshwright.planner import given
from meshwright.runtime import DTYPES
from meshwright.step import Dtype, ModelConfig, Tree, check_positions
from meshwright.text import Tokenizer, apply_chat_template
from meshwright.weights import MAX_FILE_BYTES

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, tokens, or the messages of a chat, each with `role` and `content`."""

GREEDY = Sampling()
"""The likeliest token, always."""


@dataclass(frozen=True)
class _How:
    """`GenerateOptions` with all said, a sampling for each prompt."""

    max_tokens: int
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    sampling: tuple[Sampling, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens < 1:
            raise MeshwrightError(f"max_tokens is {self.max_tokens}; it is 1 or more")
        if "" in self.stop:
            raise MeshwrightError("a text of stop is empty, which every text begins with; leave it out")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with parameters on a mesh, as `meshwright.load` makes it.

    Args:
        params: the tree of sharded arrays, by the paths of `step.parameters`; those of layers are stacked.
        dtype: of products. stored_dtype: of the weights that it came from.
        source: the config.json it came from and files beside it that belong to its tokenizer, by name; empty of a run,
            whose config.json is made when it is saved.
        seq_len: of the sequences that a run was trained on.
    """

    config: ModelConfig
    params: Tree[Array]
    mesh: Mesh
    mesh_shape: MeshShape
    system: System
    dtype: Dtype
    stored_dtype: StoredDtype
    tokenizer: Tokenizer | None
    source: Mapping[str, bytes]
    seq_len: int | None = None

    def logits(self, tokens: Any, lengths: Sequence[int] | None = None) -> Array:
        """The float32 logits [batch, seq, vocab] of tokens [batch, seq], each row a text from its first position.

        Args:
            lengths: the tokens of each row before its padding, by default all. They matter where rotary frequencies
                depend on a text's length (longrope, dynamic); padding changes no other logits.

        Raises:
            MeshwrightError: tokens that are no such array, or are not below the vocabulary's size; lengths that are not
                those of their rows.
        """
        array = _whole_numbers(tokens)
        if array is None or array.ndim != 2:
            raise MeshwrightError(f"tokens are {_short(tokens)}; they are whole numbers [batch, seq]")
        self._check_tokens(array)
        check_positions(self.config, array.shape[1], "sequences of at most {} tokens")
        rows, longest = array.shape
        own = np.full(rows, longest) if lengths is None else _whole_numbers(lengths)
        if own is None or own.shape != (rows,) or own.min() < 1 or own.max() > longest:
            raise MeshwrightError(
                f"lengths are {_short(lengths)}; they are {rows} whole numbers from 1 to {longest}, one a row of tokens"
            )
        with jax.set_mesh(self.mesh):
            return all_logits(
                self.params, array.astype(np.int32), own, self.config, self.mesh_shape, DTYPES[self.dtype]
            )

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[Generated]:
        """What follows each prompt: one or several, which may differ in length; options: see `GenerateOptions`."""
        return collect(self.stream(prompts, **options), has_text=self.tokenizer is not None)

    def stream(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]) -> Iterator[Piece]:
        """As `generate`, a piece for each token as it is made."""
        rows, how = self._read(prompts, options)
        return pieces_of(
            self._steps(rows, how),
            len(rows),
            tokenizer=self.tokenizer,
            max_tokens=how.max_tokens,
            stop=how.stop,
            stop_tokens=how.stop_tokens,
        )

    def compile(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]) -> None:
        """Compile the programs that `generate` runs for these, so that it can be timed without that."""
        for _ in itertools.islice(self._steps(*self._read(prompts, options)), 2):
            pass  # The prompts are read by one program, and the tokens after the first written by another.

    def encode(self, prompt: Prompt) -> np.ndarray:
        """The tokens of a prompt."""
        found: Any = prompt
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
            if self.tokenizer is None:
                raise MeshwrightError(f"{self.config.name} has no tokenizer; give the tokens of the prompt")
            is_text = isinstance(prompt, str)
            found = self.tokenizer.encode(found) if is_text else apply_chat_template(self.tokenizer, found)
        array = _whole_numbers(found)
        if array is None or array.ndim != 1:
            raise MeshwrightError(f"a prompt is {_short(prompt)}; it is text, tokens or messages of at least one token")
        self._check_tokens(array)
        return array.astype(np.int32)

    def save(
        self,
        directory: str | Path,
        *,
        dtype: StoredDtype | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        on_bytes: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Write a directory that Hugging Face's libraries load: weights, config.json, tokenizer.

        It is written beside its place and then renamed: whole or not at all.

        Args:
            dtype: of the weights; by default as they were stored.
            max_file_bytes: weights of more are written in several files, with an index.
            on_bytes: called with the bytes of each tensor that was written.

        Raises:
            MeshwrightError: a directory that holds something, or cannot be written; a model that no config.json
                describes.
        """
        if dtype not in (None, *get_args(StoredDtype)):
            raise MeshwrightError(not_a_choice("dtype", dtype, get_args(StoredDtype)))
        stored = dtype or self.stored_dtype
        files = model_files(self.config, self.source, self.tokenizer, self.seq_len, stored)
        write_model(
            Path(directory), self.config, self.params, files, stored, max_file_bytes=max_file_bytes, on_bytes=on_bytes
        )

    @cached_property
    def num_parameters(self) -> int:
        """The number of its parameters."""
        return sum(array.size for array in jax.tree.leaves(self.params))

    def _check_tokens(self, tokens: np.ndarray) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab:
            raise MeshwrightError(
                f"token {low if low < 0 else high} is not one of {self.config.name}, which has 0 to"
                f" {self.config.vocab - 1}"
            )

    def _rows(self, prompts: Prompt | Sequence[Prompt]) -> list[np.ndarray]:
        """The tokens of each prompt."""
        several: Any = prompts
        if not len(several):
            raise MeshwrightError("there is no prompt; give at least one")
        is_one = isinstance(prompts, str) or isinstance(several[0], int | np.integer | Mapping)
        return [self.encode(prompt) for prompt in ([several] if is_one else several)]

    def _read(self, prompts: Prompt | Sequence[Prompt], options: Mapping[str, Any]) -> tuple[list[np.ndarray], _How]:
        """The tokens of each prompt and how texts are made; raises where these cannot be."""
        rows = self._rows(prompts)
        said: Any = given(options, GenerateOptions.__annotations__)
        sampling, stop = said.get("sampling", GREEDY), said.get("stop", ())
        how = _How(
            max_tokens=said.get("max_tokens", 200),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_tokens=tuple(said.get("stop_tokens", self.tokenizer.stop_tokens if self.tokenizer else ())),
            sampling=(sampling,) * len(rows) if isinstance(sampling, Sampling) else tuple(sampling),
        )
        if how.stop and self.tokenizer is None:
            raise MeshwrightError(f"{self.config.name} has no tokenizer, so no text can stop it; give stop_tokens")
        if "stop_tokens" in said and how.stop_tokens:
            self._check_tokens(np.asarray(how.stop_tokens))
        if len(how.sampling) != len(rows):
            raise MeshwrightError(f"there are {len(how.sampling)} samplings for {len(rows)} prompts; give one for each")
        longest = max(map(len, rows))
        check_positions(
            self.config, longest + how.max_tokens - 1, f"at most {{}} tokens with the prompt, which has {longest}"
        )
        return rows, how

    def _steps(self, rows: list[np.ndarray], how: _How) -> Iterator[np.ndarray]:
        """The next token of every row, [rows] each."""
        steps = generate_tokens(
            self.params, rows, self.config, self.mesh_shape,
            num_tokens=how.max_tokens, sampling=how.sampling, dtype=DTYPES[self.dtype],
        )  # fmt: skip
        while True:
            # Whoever reads the steps is left with the mesh of their own.
            with jax.set_mesh(self.mesh):
                tokens = next(steps, None)
            if tokens is None:
                return
            yield tokens


def check_dtype(dtype: object) -> None:
    """Raise where parameters cannot have a dtype."""
    if dtype not in list(DTYPES):
        raise MeshwrightError(not_a_choice("dtype", dtype, DTYPES))


def _whole_numbers(values: Any) -> np.ndarray | None:
    """An array of at least one whole number; None of anything else, rows of several lengths too."""
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    return array if array.size and np.issubdtype(array.dtype, np.integer) else None


def _short(value: Any) -> str:
    """A value as an error says it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
