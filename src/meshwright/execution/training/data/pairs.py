"""Preference pairs: a prompt with a chosen and with a rejected answer, as two rows of one length.

A prompt that leaves too little space for the answers is cut at its beginning, by the same number of tokens in both rows
of the pair. A pair with an answer longer than a row is left out, because the preference is not for a cut answer. Both
cases are counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np

from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import BadData, BadRecordError, Rule, describe_bad
from meshwright.execution.data.document import Document, Pair
from meshwright.execution.data.encoding import find_encoder
from meshwright.execution.data.records import ranges, read_records
from meshwright.execution.data.sources import FileSource, find_source
from meshwright.execution.data.store import PreferencePairs, open_store
from meshwright.execution.text.tokenizer import Tokenizer
from meshwright.execution.training.data.cache import cache_directory
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.data.held_out import split
from meshwright.support.files import write_error

KINDS = {
    "prompt_cut": "prompts cut at their beginning",
    "answer_too_long": "pairs left out for an answer longer than a row",
}
"""{kind of cut or omitted pairs: its description}; bad records are counted separately."""


@dataclass(frozen=True)
class PairData:
    """Pairs of a run, memory-mapped.

    Args:
        tokens: int32 [pairs, 2, s + 1]: the row with the chosen answer, then the row with the rejected one; padded with
            zeros.
        has_loss: uint8 [pairs, 2, s]: 1 if the next token belongs to the answer.
        counts: numbers of pairs cut, left out or bad, by kind.
    """

    tokens: np.ndarray
    has_loss: np.ndarray
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens int32 [b, s + 1] and weights float32 [b, s] of the pairs `numbers` [b / 2].

        The two rows of a pair are adjacent.
        """
        tokens, has_loss = (array[numbers].reshape(-1, array.shape[-1]) for array in (self.tokens, self.has_loss))
        return tokens, has_loss.astype(np.float32)

    @property
    def fingerprint(self) -> str:
        """Checksum of all rows, by which precomputed log-probabilities are matched with their pairs."""
        checksum = hashlib.sha256(self.tokens.reshape(-1).data)
        checksum.update(self.has_loss.reshape(-1).data)
        return checksum.hexdigest()

    def describe(self) -> str:
        """Return a note about cut and omitted pairs; empty if all are complete."""
        words = [f"{self.counts[kind]:,} {what}" for kind, what in KINDS.items() if self.counts.get(kind)]
        if bad := describe_bad(self.counts):
            words.append(bad)
        return f"of {len(self):,} pairs: {', '.join(words)}" if words else ""


class RunPairs(NamedTuple):
    """All preference pairs of a run."""

    data: PairData
    training: np.ndarray  # Numbers of the training pairs.
    held_out: np.ndarray  # Numbers of the held-out pairs.
    fingerprint: str  # Checksum of the pairs from the run's own sources, without other sources for evaluation.


def open_pairs(
    config: DataConfig, evaluated: Sequence[str], tokenizer: Tokenizer | None, workload: Workload
) -> RunPairs:
    """Open the pairs of a run.

    Args:
        config: the sources, and the share of their pairs to hold out.
        evaluated: sources of which all pairs are held out; if there are any, the share in `config` is not used.
        tokenizer: the tokenizer; None to read text as bytes.
        workload: batch size, sequence length and vocabulary.

    Raises:
        MeshwrightError: as in `load_pairs`, or there are fewer training or held-out pairs than a batch has.
    """
    sources, evaluated = ([config.find_path(name) for name in names] for names in (config.sources, evaluated))
    data = load_pairs(sources, tokenizer, workload, config.bad_data)
    own, training = data.fingerprint, np.arange(len(data))
    if evaluated:
        other = load_pairs(evaluated, tokenizer, workload, config.bad_data)
        parts = ((each.tokens, each.has_loss) for each in (data, other))
        both = PairData(*_map_to_files(parts, workload.seq_len), data.counts)
        return RunPairs(both, training, np.arange(len(data), len(both)), own)
    part, rest = split(len(data), config.held_out, ", ".join(config.sources))
    training, held = (np.concatenate([*each.blocks()]) if each else np.zeros(0, int) for each in (part, rest))
    if len(training) < workload.batch or 0 < len(held) < workload.batch:
        raise MeshwrightError(
            f"of {len(data):,} pairs {len(held):,} are held out, and a batch has {workload.batch}; give more pairs,"
            " another --held-out or a smaller --batch"
        )
    return RunPairs(data, training, held, own)


def load_pairs(
    sources: Sequence[str], tokenizer: Tokenizer | None, workload: Workload, rule: Rule = "error"
) -> PairData:
    """Load pairs from JSON Lines, Parquet, Arrow or token stores, as rows for a workload.

    Records have `prompt`, `chosen` and `rejected`, as text or chat messages.

    Args:
        sources: paths of files, folders or stores.
        tokenizer: the tokenizer; None to read text as bytes.
        workload: batch size, sequence length and vocabulary.
        rule: how to treat records that are not pairs.

    Raises:
        MeshwrightError: there are no sources, a record is not a pair, a token is outside the vocabulary, or there are
            fewer pairs than a batch has.
    """
    if not sources:
        raise MeshwrightError(
            "objective='dpo' needs --data: JSON lines, Parquet or a store with prompt, chosen and rejected"
        )
    bad, counts, seq_len = BadData(rule), dict.fromkeys(KINDS, 0), workload.seq_len
    pairs = _fitting(_pairs(sources, tokenizer, workload.config.vocab, bad), seq_len, counts)
    tokens, has_loss = _map_to_files((_rows(pair, seq_len) for pair in pairs), seq_len)
    if len(tokens) < workload.batch:
        raise MeshwrightError(
            f"{', '.join(sources)} has {len(tokens):,} pairs that fit rows of {workload.seq_len} tokens; a batch has"
            f" {workload.batch}: give more, a smaller --batch or a longer --seq-len"
        )
    return PairData(tokens, has_loss, counts | dict(bad.counts))


def _map_to_files(parts: Iterable[tuple[np.ndarray, np.ndarray]], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Write pairs to temporary files; return the tokens [n, 2, s + 1] and `has_loss` [n, 2, s] of all, memory-mapped.

    The files have no name and disappear with the process. They are in the cache directory, because /tmp may be in
    memory.

    parts: arrays of the same form with any number of pairs.
    """
    directory, count = cache_directory(), 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory) as of_tokens, TemporaryFile(dir=directory) as of_loss:
            for tokens, has_loss in parts:
                of_tokens.write(tokens.astype(np.int32, copy=False).data)
                of_loss.write(has_loss.astype(np.uint8, copy=False).data)
                count += len(tokens)
            of_tokens.flush()
            of_loss.flush()
            shapes = (count, 2, seq_len + 1), (count, 2, seq_len)
            if not count:
                return np.zeros(shapes[0], np.int32), np.zeros(shapes[1], np.uint8)
            # Views without the type of maps, as in `row_index`.
            return (
                np.asarray(np.memmap(of_tokens, np.int32, "r", shape=shapes[0])),
                np.asarray(np.memmap(of_loss, np.uint8, "r", shape=shapes[1])),
            )
    except OSError as error:
        raise write_error(directory, error) from None


def _rows(pair: Pair, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens [1, 2, s + 1] and `has_loss` [1, 2, s] of a pair, padded to rows of `seq_len` inputs."""
    tokens = np.stack([_padded(row.tokens, seq_len + 1) for row in pair])
    return tokens[None], np.stack([_padded(_loss(row)[1:], seq_len) for row in pair])[None]


def _pairs(sources: Sequence[str], tokenizer: Tokenizer | None, vocab: int, bad: BadData) -> Iterator[Pair]:
    """Yield the pairs of all sources, one source after another; bad records are added to `bad`."""
    for name in sources:
        source = find_source(name)
        if isinstance(source, FileSource):
            yield from _of_files(source, tokenizer, vocab, bad)
            continue
        store = PreferencePairs(open_store(source.directory))
        if (largest := max(shard.largest for shard in store.store.info.shards)) >= vocab:
            raise MeshwrightError(f"{name} has token {largest}, which is outside the vocabulary of {vocab:,}")
        yield from (store[number] for number in range(len(store)))


def _of_files(source: FileSource, tokenizer: Tokenizer | None, vocab: int, bad: BadData) -> Iterator[Pair]:
    """Yield the pairs in the files of a source; bad records are added to `bad`."""
    if source.kind == "text":
        raise MeshwrightError(f"{source.name} is text; objective='dpo' reads records with prompt, chosen and rejected")
    encoder = find_encoder(source, None, tokenizer, vocab=vocab, pairs=True)
    for part in (part for path in source.files for part in ranges(path, source.kind)):
        for number, record in enumerate(read_records(part)):
            try:
                if isinstance(record, BadRecordError):
                    raise record
                yield Pair(*encoder(record))
            except BadRecordError as error:
                bad.add(error, part.place(number))


def _fitting(pairs: Iterable[Pair], seq_len: int, counts: dict[str, int]) -> Iterator[Pair]:
    """Yield the pairs that fit rows of seq_len + 1 tokens, some with a cut prompt.

    Pairs with cut prompts, and pairs left out, are counted in `counts`, by the kinds of `KINDS`.
    """
    for pair in pairs:
        if (over := max(len(row.tokens) for row in pair) - seq_len - 1) <= 0:
            yield pair
        # At least one token of the prompt is left, to predict the first token of the answer.
        elif over < min(int(_loss(row).argmax()) for row in pair):
            counts["prompt_cut"] += 1
            yield Pair(*(Document(row.tokens[over:], _loss(row)[over:]) for row in pair))
        else:
            counts["answer_too_long"] += 1


def _loss(row: Document) -> np.ndarray:
    """Return whether each token of a row belongs to the answer [n]; if `row.loss` is None, all but the first do."""
    return np.arange(len(row.tokens)) > 0 if row.loss is None else row.loss


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    """Pad an array [n] with zeros at its end, to [length]."""
    return np.pad(array, (0, length - len(array)))
