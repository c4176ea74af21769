"""Open the data of a run: the training rows and the held-out rows of each source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import describe_bad
from meshwright.execution.data.document import Dataset
from meshwright.execution.data.records import UNIT_BYTES
from meshwright.execution.data.sources import FileSource, StoreSource, parse_sources
from meshwright.execution.data.store import TokenStore, open_store
from meshwright.execution.data.template import parse_templates
from meshwright.execution.text.chat import chat_template
from meshwright.execution.text.tokenizer import Tokenizer, byte_tokenizer
from meshwright.execution.training.data.cache import cached_directory
from meshwright.execution.training.data.config import DataConfig, RowKind
from meshwright.execution.training.data.held_out import HashSplit, split
from meshwright.execution.training.data.row_index import read_row_index, write_row_index
from meshwright.execution.training.data.rows import DocumentRows, Rows, WindowRows, text_windows
from meshwright.execution.training.data.stores import cached_store, run_sources
from meshwright.execution.training.data.text_files import TextBytes, check_text
from meshwright.support.field_types import not_a_choice
from meshwright.units import show_bytes

Note = Callable[[str], None]


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Args:
        training: the training rows of each source.
        held_out: the held-out rows of each source.
        weights: weights of the sources in a mixture; None if all rows are equally frequent.
        bad: {source: {kind of bad records: their number}}.
        fingerprint: a checksum of all documents and their order.
    """

    training: tuple[Rows, ...]
    held_out: tuple[Rows, ...]
    weights: tuple[float, ...] | None
    bad: dict[str, dict[str, int]]
    fingerprint: str


class _Opened(NamedTuple):
    """An opened source."""

    name: str
    dataset: Dataset
    bad: dict[str, int]  # Number of bad records, by kind.
    fingerprint: str


def open_data(
    config: DataConfig,
    workload: Workload,
    tokenizer: Tokenizer | None,
    *,
    seed: int,
    on_note: Note = lambda line: None,
) -> RunData:
    """Open the data of a run. Records, and text for a tokenizer, are first converted to cached token stores, once.

    Args:
        config: the sources.
        workload: batch size, sequence length and vocabulary.
        tokenizer: the tokenizer; None reads text as bytes.
        seed: determines the order of documents, and so which are packed together.
        on_note: called with each line for the user.

    Raises:
        MeshwrightError: a source cannot be read, a record is bad, tokens are of another tokenizer, or there is too
            little data.
    """
    rows = default_rows(config)
    sources = [
        _open_store(source, workload, tokenizer)
        if isinstance(source, StoreSource)
        else _open_files(source, config, workload, tokenizer, on_note=on_note)
        for source in run_sources(config)
    ]
    training: list[Rows] = []
    held_out: list[Rows] = []
    for source in sources:
        if rows == "windows":
            if source.dataset.loss_counts is not None:
                raise MeshwrightError(
                    f"{source.name} has tokens without loss, and windows have no weights; --rows packed has them"
                )
            count = text_windows(source.dataset, workload.seq_len)
        else:
            count = len(source.dataset.offsets) - 1
        train, held = split(count, config.held_out, source.name)
        training.append(_rows(source, workload.seq_len, train, rows, seed))
        if held is not None:
            held_out.append(_rows(source, workload.seq_len, held, rows, None))
        _tell(source, training[-1], on_note)
    weights = [weight for _, weight in parse_sources(config.sources)]
    data = RunData(
        training=tuple(training),
        held_out=tuple(held_out),
        weights=tuple(weight for weight in weights if weight is not None) or None,
        bad={source.name: source.bad for source in sources if source.bad},
        fingerprint=hashlib.sha256("".join(source.fingerprint for source in sources).encode()).hexdigest(),
    )
    have = sum(one.count for one in data.training)
    if have < workload.batch:
        what = {"windows": "windows", "packed": "packed rows", "padded": "documents"}[rows]
        size = sum(int(one.dataset.offsets[-1]) for one in sources)
        unit = "bytes" if all(isinstance(one.dataset, TextBytes) for one in sources) else "tokens"
        raise MeshwrightError(
            f"the data has {size:,} {unit}, {have:,} {what} of {workload.seq_len}; a batch has {workload.batch}: give"
            " more data, a smaller --batch or a shorter --seq-len"
        )
    return data


def default_rows(config: DataConfig) -> RowKind:
    """Return the kind of rows in the config, or its default: windows if every source is text, else packed documents."""
    if config.rows is not None:
        return config.rows
    sources = [config.find(path) for path, _ in parse_sources(config.sources)]
    is_text = all(
        one.kind == "text" if isinstance(one, FileSource) else TokenStore(one.directory).info.form == "file"
        for one in sources
    )
    return "windows" if is_text else "packed"


def check_templates(config: DataConfig, evaluated: Sequence[str] = ()) -> None:
    """Raise a `MeshwrightError` if a record template is for a source that the run does not read, or without records.

    evaluated: other sources, which the run reads for evaluation.
    """
    templates = parse_templates(config.fields)
    if not templates:
        return
    paths = [path for path, _ in (*parse_sources(config.sources), *parse_sources(tuple(evaluated)))]
    without = {path: what for path in paths if (what := _without_fields(config.find(path)))}
    for path in templates:
        if path and path not in paths:
            raise MeshwrightError(not_a_choice("the source of --fields", path, paths))
        if path in without:
            raise MeshwrightError(f"{path} {without[path]}, which has no fields; leave its --fields out")
    if "" in templates and without.keys() | templates.keys() >= {*paths}:
        raise MeshwrightError(f"--fields is {templates['']!r}, and no source has records that it is for; leave it out")


def _without_fields(source: FileSource | StoreSource) -> str:
    """Return a description of a source that has no records, such as "is text"; empty if the source has records."""
    if isinstance(source, StoreSource):
        return "is a store of tokens"
    return "is text" if source.kind == "text" else ""


def _open_store(source: StoreSource, workload: Workload, tokenizer: Tokenizer | None) -> _Opened:
    """Open a store that `meshwright tokenize` wrote; a `MeshwrightError` if its tokens are of another tokenizer."""
    store = open_store(source.directory)
    info = store.info
    if info.form == "pairs":
        raise MeshwrightError(f"{source.name} holds pairs of answers, which --objective dpo learns from")
    if info.tokenizer != fingerprint(tokenizer):
        reads = "reads bytes" if tokenizer is None else "has another tokenizer"
        raise MeshwrightError(
            f"{source.name} holds tokens of {info.tokenizer_name}, and this run {reads}; tokenise the files with the"
            " model's own (meshwright tokenize --tokenizer DIRECTORY)"
        )
    template = tokenizer and chat_template(tokenizer)
    if info.chat_template and template and info.chat_template != hashlib.sha256(template.encode()).hexdigest():
        raise MeshwrightError(f"{source.name} holds chats of another chat template than this run's; tokenise them anew")
    largest = max((shard.largest for shard in info.shards), default=-1)
    if largest >= (vocab := workload.config.vocab):
        raise MeshwrightError(f"{source.name} has token id {largest}, outside the vocabulary of {vocab:,}")
    return _Opened(source.name, store, info.bad, info.fingerprint)


def _open_files(
    source: FileSource,
    config: DataConfig,
    workload: Workload,
    tokenizer: Tokenizer | None,
    *,
    on_note: Note,
) -> _Opened:
    """Open the files of a source: text that is read as bytes directly, all else through a token store in the cache."""
    if source.kind == "text" and tokenizer is None:
        checksum = check_text(source.files)
        return _Opened(source.name, TextBytes(source.files), {}, checksum)

    @contextmanager
    def note_of_large(name: str, size: int) -> Iterator[Callable[[int], None]]:
        if size > UNIT_BYTES:
            on_note(f"tokenising {name} ({show_bytes(size)}), once; `meshwright tokenize` shows a bar")
        yield lambda num_bytes: None

    directory, info = cached_store(source, config, workload, tokenizer, note_of_large)
    return _Opened(source.name, open_store(directory), info.bad, info.fingerprint)


def fingerprint(tokenizer: Tokenizer | None) -> str:
    """Return the fingerprint of a tokenizer, or of the byte tokenizer for None."""
    return (tokenizer or byte_tokenizer()).fingerprint


def _rows(source: _Opened, seq_len: int, part: HashSplit, rows: RowKind, seed: int | None) -> Rows:
    """Return the rows of a part of a source's documents or windows.

    Args:
        part: the training part or the held-out part.
        rows: the kind of the rows.
        seed: determines the order of documents; None keeps theirs.
    """
    sizes = source.dataset.offsets.tolist() if isinstance(source.dataset, TextBytes) else None
    key = repr((INDEX_FORMAT, source.fingerprint, sizes, seq_len, part, rows, seed))
    if rows == "windows":
        windows = range(part.count) if part.is_whole else part.open_numbers(cached_directory(key, part.write))
        return WindowRows(source.name, source.dataset, seq_len, windows)
    is_packed = rows == "packed"

    def write(directory: Path) -> None:
        try:
            write_row_index(directory, source.dataset, part.blocks(), seq_len, is_packed=is_packed, seed=seed)
        except MeshwrightError as error:
            raise MeshwrightError(f"{source.name}: {error}") from None

    index = read_row_index(cached_directory(key, write))
    return DocumentRows(source.name, source.dataset, seq_len, index, is_packed=is_packed)


INDEX_FORMAT = 2
"""Version of the format of row indices in the cache."""


def _tell(source: _Opened, rows: Rows, on_note: Note) -> None:
    """Report to the user how many records of a source are left out, split or cut, and if rows have much padding."""
    if left_out := describe_bad(source.bad):
        on_note(f"{source.name}: left out {left_out}")
    for what, count in rows.notes.items():
        said = {
            "documents_split": "documents are longer than a row and are split over several",
            "documents_cut": "documents are longer than a row and are cut at its end",
            "no_loss": "documents have no loss before they are cut, and are left out",
        }[what]
        on_note(f"{source.name}: {count:,} {said}")
    if isinstance(rows, DocumentRows) and rows.is_packed and rows.fill < MIN_FILL:
        on_note(f"{source.name}: {1 - rows.fill:.0%} of its rows is padding")


MIN_FILL = 0.7
"""A note is printed if a smaller fraction than this of the inputs of packed rows is not padding."""
