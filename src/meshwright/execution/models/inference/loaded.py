"""A model loaded on a mesh: logits, text, scores, and saving as a Hugging Face directory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, get_args

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from meshwright.description.hardware.system import System
from meshwright.description.step.legality import check_positions
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import Tree, num_parameters
from meshwright.description.step.rules import RULES
from meshwright.description.step.strategy import SequenceMethod
from meshwright.description.step.weight_formats import WeightDtype
from meshwright.description.step.workload import Dtype
from meshwright.errors import MeshwrightError
from meshwright.execution.models.forward import all_logits, all_losses
from meshwright.execution.models.generation.generate import generate_tokens
from meshwright.execution.models.generation.sampling import GREEDY, Sampling
from meshwright.execution.models.inference.save import StoredDtype, model_files, write_model
from meshwright.execution.models.inference.scoring import Score, batches, text_losses
from meshwright.execution.models.inference.stream import (
    Generated,
    GenerateOptions,
    ReadOptions,
    TokenText,
    collect,
    pieces_of,
)
from meshwright.execution.runtime.arrays import DTYPES
from meshwright.execution.text.chat import apply_chat_template
from meshwright.execution.text.tokenizer import REPLACEMENT, Tokenizer
from meshwright.execution.weights.save import MAX_FILE_BYTES
from meshwright.mesh import MeshShape
from meshwright.options.given import given
from meshwright.support.field_types import not_a_choice
from meshwright.support.files import as_path


@dataclass(frozen=True)
class Chat:
    """The messages of a chat, and the tools that the model may call, both in the format of OpenAI's API."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Chat
"""Text, tokens, or the messages of a chat, each with `role` and `content`."""

LONGEST_WINDOW = 2048
"""Largest default window in scoring, in tokens: longer windows take more time and barely change the score."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with parameters on a mesh, as `meshwright.load` returns it.

    Args:
        params: the tree of sharded arrays, with the paths of `step.parameter_tree.parameters`; parameters of layers are
          stacked.
        dtype: dtype of matmuls.
        stored_dtype: dtype of the weights in the files they were loaded from.
        tokenizer: None if the model has no tokenizer.
        source: contents of the files loaded with the weights, by name: config.json and the tokenizer's files. Empty for
          a model loaded from a run, whose config.json is generated on saving.
        seq_len: length of the sequences that the model was trained on, in tokens; None if not known.
        sp_method: how queries reached keys split over sp in training; the default of `generate`.
        weight_dtype: format in which the weights of layers are stored, which only `generate` and `stream` read.
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
    sp_method: SequenceMethod = "gather"
    weight_dtype: WeightDtype | None = None

    def logits(self, tokens: Any, lengths: Sequence[int] | None = None) -> Array:
        """Return float32 logits [batch, seq, vocab] of tokens [batch, seq]; each row is a text from its first position.

        Args:
            lengths: number of tokens of each row without padding; default: seq. They matter only if rotary frequencies
              depend on a text's length (longrope, dynamic).

        Raises:
            MeshwrightError: tokens are not whole numbers [batch, seq] below the vocabulary's size, or lengths are not
              `batch` whole numbers from 1 to seq.
        """
        self._check_plain("logits")
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
        """Generate text after one or several prompts of any lengths; return a `Generated` for each prompt, in order.

        Options: see `GenerateOptions`.
        """
        return collect(self.stream(prompts, **options), has_text=self.tokenizer is not None)

    def stream(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]) -> Iterator[TokenText]:
        """Like `generate`, but yield a `TokenText` for each token when it is generated."""
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
        """Compile the programs that `generate` runs for these arguments, so that timing it excludes compilation."""
        for _ in itertools.islice(self._steps(*self._read(prompts, options)), 2):
            pass  # One program prefills the prompts, another decodes.

    def losses(self, texts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return, for each text, the loss in nats of every token after the first: float32 [tokens - 1].

        Texts may differ in length; each has at least two tokens.

        Raises:
            MeshwrightError: there are no texts.
        """
        self._check_plain("losses")
        rows = [self.encode(text) for text in texts]
        if not rows:
            raise MeshwrightError("there is no text; give at least one")
        _check_predicted(rows)
        check_positions(self.config, max(map(len, rows)) - 1, "texts of at most {} tokens and one")
        found = [np.empty(0)] * len(rows)
        groups = self.mesh_shape.degree(RULES["batch"])
        for numbers, tokens, targets, lengths in batches(rows, vocab=self.config.vocab, groups=groups):
            with jax.set_mesh(self.mesh):
                each = all_losses(
                    self.params, tokens, targets, lengths, self.config, self.mesh_shape, DTYPES[self.dtype]
                )
            for row, number in enumerate(numbers):
                found[number] = each[row, : lengths[row]]
        return found

    def score(
        self, texts: str | Sequence[Prompt], *, seq_len: int | None = None, stride: int | None = None
    ) -> list[Score]:
        """Return the loss, perplexity and bits per byte of each text. Texts longer than `seq_len` are read in windows.

        Args:
            seq_len: input tokens of a window; default: the trained length, at most 2048.
            stride: tokens from the start of a window to that of the next (see `text_losses`); default: seq_len.

        Raises:
            MeshwrightError: there are no texts, or `seq_len` is below 1.
        """
        several = [texts] if isinstance(texts, str) else texts
        if not isinstance(several, Sequence):
            raise MeshwrightError(f"texts is {texts!r}; it is a text, or a list of texts")
        if not several:
            raise MeshwrightError("there is no text; give at least one")
        rows = [self.encode(text) for text in several]
        _check_predicted(rows)
        longest = self.usual_window if seq_len is None else seq_len
        if longest < 1:
            raise MeshwrightError(f"seq_len is {longest}; it is 1 or more")
        nats = text_losses(self.losses, rows, seq_len=longest, stride=longest if stride is None else stride)
        return [
            Score(tokens=len(row) - 1, nats=each, num_bytes=self._num_bytes(text, row))
            for text, row, each in zip(several, rows, nats, strict=True)
        ]

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the log probability in nats of each continuation after its context, for (context, continuation) pairs.

        As in the LM evaluation harness (https://github.com/EleutherAI/lm-evaluation-harness), spaces at a context's end
        belong to the continuation. Texts of more tokens than `usual_window` + 1 are truncated at the start.
        """
        rows, counts = self.continuations(pairs)
        return [-math.fsum(each[-count:].tolist()) for each, count in zip(self.losses(rows), counts, strict=True)]

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[Any], list[int]]:
        """Return, for each (context, continuation), the tokens [n] of both, and how many the continuation has.

        Raises:
            MeshwrightError: a continuation has no tokens, or no token before it, or more tokens than `usual_window`.
        """
        rows, counts = [], []
        if isinstance(pairs, str) or not all(isinstance(one, tuple | list) and len(one) == 2 for one in pairs):
            raise MeshwrightError(f"pairs are {_short(pairs)}; they are (context, continuation) each, both text")
        for context, continuation in pairs:
            whole = self.encode(context + continuation)
            before = self.encode(context.rstrip()) if context.strip() else whole[:0]
            counts.append(len(whole) - len(before))
            if not 1 <= counts[-1] <= min(len(whole) - 1, self.usual_window):
                raise MeshwrightError(
                    f"{_short(continuation)} after {_short(context)} has {counts[-1]} tokens of {len(whole)}; it is"
                    f" predicted from a token before it at least, and has 1 to {self.usual_window}"
                )
            rows.append(whole[-self.usual_window - 1 :])
        return rows, counts

    @property
    def usual_window(self) -> int:
        """Input tokens of a window in scoring: the trained length, at most 2048."""
        return min(self.seq_len or LONGEST_WINDOW, LONGEST_WINDOW)

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return the tokens [n] of a prompt. Raises if it is empty or no `Prompt`, or text without a tokenizer."""
        found: Any = prompt.messages if isinstance(prompt, Chat) else prompt
        is_messages = isinstance(found, Sequence) and len(found) and isinstance(found[0], Mapping)
        if isinstance(found, str) or is_messages:
            if self.tokenizer is None:
                raise MeshwrightError(f"{self.config.name} has no tokenizer; give the tokens of the prompt")
            if isinstance(found, str):
                found = self.tokenizer.encode(found)
            else:
                for message in found:
                    has_content = isinstance(message, Mapping) and ("content" in message or "tool_calls" in message)
                    if not has_content or not isinstance(message.get("role"), str):
                        raise MeshwrightError(f"a message is {_short(message)}; it has a role and a content")
                tools = prompt.tools if isinstance(prompt, Chat) else ()
                found = apply_chat_template(self.tokenizer, found, tools=tools)
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

        It is written to a temporary directory and then renamed, so it is complete or absent.

        Args:
            dtype: dtype of the weights in the files; default: `stored_dtype`.
            max_file_bytes: largest size of a weights file; larger weights are written to several files, with an index.
            on_bytes: called with the number of bytes of each tensor that is written.

        Raises:
            MeshwrightError: the directory is not empty or cannot be written, or no config.json describes the model.
        """
        self._check_plain("saving")
        if dtype not in (None, *get_args(StoredDtype)):
            raise MeshwrightError(not_a_choice("dtype", dtype, get_args(StoredDtype)))
        stored = dtype or self.stored_dtype
        files = model_files(self.config, self.source, self.tokenizer, self.seq_len, stored)
        write_model(
            as_path(directory),
            self.config,
            self.params,
            files,
            stored,
            max_file_bytes=max_file_bytes,
            on_bytes=on_bytes,
        )

    @cached_property
    def num_parameters(self) -> int:
        """The number of parameters, without padding for the mesh."""
        return num_parameters(self.config)

    def _num_bytes(self, text: Prompt, tokens: np.ndarray) -> int | None:
        """Return the number of UTF-8 bytes of a text after its first token; None without a tokenizer.

        A replacement character in the first token stands for one byte.
        """
        if self.tokenizer is None:
            return None
        whole = text if isinstance(text, str) else self.tokenizer.decode(tokens.tolist())
        first = self.tokenizer.decode(tokens[:1].tolist())
        return len(whole.encode(errors="surrogateescape")) - len(first.replace(REPLACEMENT, "?").encode())

    def _check_plain(self, what: str) -> None:
        """Raise if the weights of layers have scales, which only generation reads."""
        if self.weight_dtype is not None:
            raise MeshwrightError(
                f"{self.config.name} is loaded with weight_dtype {self.weight_dtype}, which only generation reads;"
                f" load it without for {what}"
            )

    def _check_tokens(self, tokens: np.ndarray) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab:
            raise MeshwrightError(
                f"token {low if low < 0 else high} is not one of {self.config.name}, which has 0 to"
                f" {self.config.vocab - 1}"
            )

    def _rows(self, prompts: Prompt | Sequence[Prompt]) -> list[np.ndarray]:
        """Return the tokens [n] of each prompt, given one or several prompts. Raises if there is none."""
        several: Any = prompts
        if isinstance(prompts, Chat):
            return [self.encode(prompts)]
        if not hasattr(several, "__len__"):
            raise MeshwrightError(
                f"prompts are {_short(several)}; they are text, tokens or messages, or a list of them"
            )
        if not len(several):
            raise MeshwrightError("there is no prompt; give at least one")
        is_one = isinstance(prompts, str) or isinstance(several[0], int | np.integer | Mapping)
        return [self.encode(prompt) for prompt in ([several] if is_one else several)]

    def _read(
        self, prompts: Prompt | Sequence[Prompt], options: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], ReadOptions]:
        """Return the tokens [n] of each prompt, and the options with their defaults. Raises if they cannot be run."""
        rows = self._rows(prompts)
        said: Any = given(options, GenerateOptions.__annotations__)
        sampling, stop = said.get("sampling", GREEDY), said.get("stop", ())
        how = ReadOptions(
            max_tokens=said.get("max_tokens", 200),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_tokens=tuple(said.get("stop_tokens", self.tokenizer.stop_tokens if self.tokenizer else ())),
            sampling=(sampling,) * len(rows) if isinstance(sampling, Sampling) else _samplings(sampling),
            sp_method=said.get("sp_method", self.sp_method if self.mesh_shape.sp > 1 else "gather"),
        )
        if "sp_method" in said and self.mesh_shape.sp == 1:
            raise MeshwrightError(f"sp_method has no effect on mesh {self.mesh_shape}, which has sp=1; leave it out")
        if self.config.needs_scores and how.sp_method != "gather":
            raise MeshwrightError(
                f"sp_method is {how.sp_method!r}, and {self.config.name} caps its scores or has sinks, which only"
                f" 'gather' does"
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

    def _steps(self, rows: list[np.ndarray], how: ReadOptions) -> Iterator[np.ndarray]:
        """Yield `how.max_tokens` arrays [rows], each with the next token of every row."""
        steps = generate_tokens(
            self.params, rows, self.config, self.mesh_shape,
            num_tokens=how.max_tokens, sampling=how.sampling, dtype=DTYPES[self.dtype], sp_method=how.sp_method,
        )  # fmt: skip
        while True:
            # The mesh is set only during a step, so that the caller's mesh is current between steps.
            with jax.set_mesh(self.mesh):
                tokens = next(steps, None)
            if tokens is None:
                return
            yield tokens


def _samplings(values: Any) -> tuple[Sampling, ...]:
    """Return `values` as a tuple. Raises if it is not a sequence of `Sampling`."""
    if not isinstance(values, Sequence) or not all(isinstance(one, Sampling) for one in values):
        raise MeshwrightError(
            f"sampling is {_short(values)}; it is a Sampling, as Sampling(temperature=0.5), or one each"
        )
    return tuple(values)


def _check_predicted(rows: Sequence[np.ndarray]) -> None:
    """Raise if a text has only one token, so that no token is predicted."""
    if short := [row for row in rows if len(row) < 2]:
        raise MeshwrightError(f"a text has {len(short[0])} token; its second is the first that is predicted")


def _whole_numbers(values: Any) -> np.ndarray | None:
    """Return `values` as an integer array; None if they are empty, not whole numbers, or rows of several lengths."""
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    return array if array.size and np.issubdtype(array.dtype, np.integer) else None


def _short(value: Any) -> str:
    """Return the `repr` of a value, at most 60 characters of it, for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
