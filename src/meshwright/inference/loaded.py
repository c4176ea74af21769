"""A model on a mesh: logits, text, and its directory for Hugging Face."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.families import hugging_face_config
from meshwright.files import check_new_directory, write_error, write_file
from meshwright.mesh import MeshShape
from meshwright.models import Sampling, all_logits, generate_tokens
from meshwright.runtime import DTYPES
from meshwright.step import Dtype, ModelConfig, Tree, check_positions
from meshwright.text import Tokenizer, TokenStream, apply_chat_template
from meshwright.weights import save_weights

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, tokens, or the messages of a chat, each with `role` and `content`."""

GREEDY = Sampling()
"""The likeliest token, always."""

StoppedBy = Literal["length", "token", "text"]


@dataclass(frozen=True)
class Generated:
    """What was made of one prompt: its tokens, the text they stand for (None without a tokenizer), and why it ended.

    The token that ended it is not among the tokens, nor is what ended it in the text.
    """

    tokens: tuple[int, ...]
    text: str | None
    stopped_by: StoppedBy


class Piece(NamedTuple):
    """What one prompt's text grows by: `row` is the prompt's number; done where nothing follows."""

    row: int
    text: str
    done: StoppedBy | None


@dataclass
class _Growing:
    """One text while it is made."""

    stream: TokenStream | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    shown: int = 0
    done: StoppedBy | None = None


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with parameters on a mesh, as `meshwright.load` makes it.

    Args:
        params: the tree of sharded arrays, by the paths of `step.parameters`; those of layers are stacked.
        dtype: of the parameters and of products.
        source: the config.json it came from and files beside it that belong to its tokenizer, by name; empty of a run,
            whose config.json is made when it is saved.
        seq_len: of the sequences that a run was trained on.
    """

    config: ModelConfig
    params: Tree[Array]
    mesh: Mesh
    mesh_shape: MeshShape
    dtype: Dtype
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
        array = np.asarray(tokens)
        if array.ndim != 2 or not array.size or not np.issubdtype(array.dtype, np.integer):
            raise MeshwrightError(f"tokens are {array.dtype} {list(array.shape)}; they are whole numbers [batch, seq]")
        self._check_tokens(array)
        check_positions(self.config, array.shape[1], "sequences of at most {} tokens")
        rows, longest = array.shape
        own = np.full(rows, longest) if lengths is None else np.asarray(lengths)
        if own.shape != (rows,) or not np.issubdtype(own.dtype, np.integer) or own.min() < 1 or own.max() > longest:
            raise MeshwrightError(
                f"lengths are {own.tolist()}; they are {rows} whole numbers from 1 to {longest}, one a row of tokens"
            )
        with jax.set_mesh(self.mesh):
            return all_logits(
                self.params, array.astype(np.int32), own, self.config, self.mesh_shape, DTYPES[self.dtype]
            )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 200,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
    ) -> list[Generated]:
        """What follows each prompt.

        Args:
            prompts: one or several; they may differ in length.
            max_tokens: the most tokens of each. stop: texts that end it. stop_tokens: tokens that do; by default those
                of the model's own files.
            sampling: of all, or of each prompt.
        """
        rows: dict[int, _Growing] = {}
        for _ in self._grow(self._rows(prompts), rows, max_tokens, stop, stop_tokens, sampling):
            pass
        return [
            Generated(tuple(row.tokens), row.text if row.stream else None, row.done or "length")
            for row in rows.values()
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 200,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
    ) -> Iterator[Piece]:
        """As `generate`, the text in pieces as it is made; a piece ends with a whole character."""
        yield from self._grow(self._rows(prompts), {}, max_tokens, stop, stop_tokens, sampling)

    def encode(self, prompt: Prompt) -> np.ndarray:
        """The tokens of a prompt."""
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
            if self.tokenizer is None:
                raise MeshwrightError(f"{self.config.name} has no tokenizer; give the tokens of the prompt")
            messages: Any = prompt
            found = (
                self.tokenizer.encode(prompt)
                if isinstance(prompt, str)
                else apply_chat_template(self.tokenizer, messages)
            )
        else:
            found = list(prompt)
        array = np.asarray(found)
        if not array.size or array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise MeshwrightError(f"a prompt is {prompt!r}; it is text, tokens or messages of at least one token")
        self._check_tokens(array)
        return array.astype(np.int32)

    def save(self, directory: str | Path, *, dtype: Dtype | None = None) -> None:
        """Write a directory that Hugging Face's libraries load: weights, config.json, tokenizer.

        It is written beside its place and then renamed: whole or not at all.

        Args:
            dtype: of the weights; by default that of the parameters.

        Raises:
            MeshwrightError: a directory that holds something, or cannot be written; a model that no config.json
                describes.
        """
        files = dict(self.source)
        if "config.json" not in files:
            found = {"max_position_embeddings": self.seq_len} | hugging_face_config(self.config)
            files["config.json"] = (json.dumps(found, indent=2) + "\n").encode()
        stored = dtype or next(
            name for name, kind in DTYPES.items() if np.dtype(kind) == jax.tree.leaves(self.params)[0].dtype
        )
        target = Path(directory)
        check_new_directory(target)
        if target.is_dir() and any(target.iterdir()):
            raise MeshwrightError(f"{target} is not empty; give a directory that is new")
        partial_ = target.absolute().with_name(f".{secrets.token_hex(4)}.partial")
        try:
            partial_.mkdir(parents=True)
            for name, data in files.items():
                write_file(partial_ / name, data)
            save_weights(partial_, self.config, self.params, stored.upper())
            if target.is_dir():
                target.rmdir()
            os.replace(partial_, target)
        except OSError as error:
            raise write_error(target, error) from None
        finally:
            shutil.rmtree(partial_, ignore_errors=True)

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

    def _grow(
        self,
        prompts: list[np.ndarray],
        rows: dict[int, _Growing],
        max_tokens: int,
        stop: Sequence[str],
        stop_tokens: Sequence[int] | None,
        sampling: Sampling | Sequence[Sampling],
    ) -> Iterator[Piece]:
        """The pieces of all texts, which are kept in `rows`."""
        if max_tokens < 1:
            raise MeshwrightError(f"max_tokens is {max_tokens}; it is 1 or more")
        if stop and self.tokenizer is None:
            raise MeshwrightError(f"{self.config.name} has no tokenizer, so no text can stop it; give stop_tokens")
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(each) != len(prompts):
            raise MeshwrightError(f"there are {len(each)} samplings for {len(prompts)} prompts; give one for each")
        longest = max(map(len, prompts))
        check_positions(
            self.config, longest + max_tokens - 1, f"at most {{}} tokens with the prompt, which has {longest}"
        )
        ends = self.tokenizer.stop_tokens if stop_tokens is None and self.tokenizer else stop_tokens or ()
        rows |= {row: _Growing(self.tokenizer and TokenStream(self.tokenizer)) for row in range(len(prompts))}
        with jax.set_mesh(self.mesh):
            chosen = generate_tokens(
                self.params, prompts, self.config, self.mesh_shape,
                num_tokens=max_tokens, sampling=each, dtype=DTYPES[self.dtype],
            )  # fmt: skip
            for number, tokens in enumerate(chosen, start=1):
                for row, token in enumerate(tokens.tolist()):
                    growing = rows[row]
                    if growing.done is None:
                        yield from _grown(row, growing, token, ends, stop, is_last=number == max_tokens)
                if all(row.done for row in rows.values()):
                    return


def _grown(
    row: int, growing: _Growing, token: int, ends: Sequence[int], stop: Sequence[str], *, is_last: bool
) -> Iterator[Piece]:
    """The piece that a token adds to a text, if any; what may be the beginning of a stop text is held back."""
    if token in ends:
        growing.done = "token"
    else:
        growing.tokens.append(token)
        growing.text += growing.stream.add(token) if growing.stream else ""
        growing.done = "length" if is_last else None
    if growing.done and growing.stream:
        growing.text += growing.stream.finish()
    found = [at for text in stop if (at := growing.text.find(text, max(0, growing.shown - len(text)))) >= 0]
    if found:
        growing.text, growing.done = growing.text[: min(found)], "text"
    until = len(growing.text) if growing.done else len(growing.text) - _held_back(growing.text, stop)
    if until > growing.shown or growing.done:
        piece = growing.text[growing.shown : until]
        growing.shown = until
        yield Piece(row, piece, growing.done)


def _held_back(text: str, stop: Sequence[str]) -> int:
    """The characters at the end of a text that may be the beginning of a stop text."""
    return max(
        (length for end in stop for length in range(1, len(end)) if text.endswith(end[:length])),
        default=0,
    )
