"""Tokenise files into a token store, in several processes; a call that was interrupted can be continued."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import Rule
from meshwright.execution.data.encoding import Encoder
from meshwright.execution.data.records import UNIT_BYTES, Range, ranges
from meshwright.execution.data.shards import Unit, make_shard, npy, shard_info_file, shard_lengths_file
from meshwright.execution.data.sources import FileSource
from meshwright.execution.data.store import FORMAT, STORE, Shard, StoreInfo, loss_file, read_info, tokens_file
from meshwright.execution.data.workers import run_units
from meshwright.execution.text.chat import chat_template
from meshwright.support.field_types import from_data
from meshwright.support.files import check_new_directory, write_file

ENCODING = 2
"""Version of the conversion of records to tokens; stores of other versions are rebuilt."""

UNFINISHED = "unfinished.json"
"""Name of the file that marks a directory as an incomplete store; it holds the `Tokenizing.signature`."""


@dataclass(frozen=True)
class Tokenizing:
    """What a token store is made of.

    source: the files. encoder: converts their records to documents. rule: what to do with bad records. tokenizer_name:
    where the tokenizer comes from, for messages.
    """

    source: FileSource
    encoder: Encoder
    rule: Rule
    tokenizer_name: str

    def signature(self) -> str:
        """Return what determines the store's contents, as JSON text: equal signatures give equal stores.

        Files are identified by path, size and time of the last change.
        """
        template = chat_template(self.encoder.tokenizer) if self.encoder.tokenizer else None
        known = {
            "format": FORMAT,
            "encoding": ENCODING,
            "files": [_file_signature(path) for path in self.source.files],
            "form": self.encoder.form,
            "fields": self.encoder.fields,
            "tokenizer": self.encoder.fingerprint,
            "vocab": self.encoder.vocab,
            "chat_template": template and hashlib.sha256(template.encode()).hexdigest(),
            "rule": self.rule,
            "unit_bytes": UNIT_BYTES,
        }
        return json.dumps(known, sort_keys=True)

    def units(self) -> list[Unit]:
        """Return the work as units of about `UNIT_BYTES`, each with one or more ranges of files."""
        units: list[Unit] = []
        parts: list[Range] = []
        for part in (part for path in self.source.files for part in ranges(path, self.source.kind)):
            if parts and sum(one.num_bytes for one in parts) + part.num_bytes > UNIT_BYTES:
                units.append(Unit(len(units), tuple(parts)))
                parts = []
            parts.append(part)
        return [*units, Unit(len(units), tuple(parts))] if parts else units


def _file_signature(path: Path) -> tuple[str, int, int]:
    """Return a file's path, size in bytes, and time of the last change in ns."""
    try:
        stat = path.stat()
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns


def tokenize(
    what: Tokenizing,
    directory: Path,
    *,
    processes: int = 0,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> StoreInfo:
    """Make a token store in a directory, or complete one that an interrupted call began; return its description.

    Args:
        what: the source files and how they are encoded.
        directory: it is new or empty, or has an incomplete or complete store with the same signature.
        processes: number of parallel processes, at most one per unit of work; 0 for one per core.
        on_bytes: called with the bytes of source files tokenised since its last call; first with those that interrupted
            calls tokenised.

    Raises:
        MeshwrightError: a record is bad and the rule does not skip it, the directory has other contents, or the disk is
          full.
    """
    signature = what.signature()
    if (directory / STORE).is_file():
        known = directory / "signature.json"
        if not known.is_file() or known.read_text() != signature:
            raise MeshwrightError(f"{directory} holds a store of other tokens; -o names another directory")
        on_bytes(sum(unit.num_bytes for unit in what.units()))
        return read_info(directory)
    _begin(directory, signature)
    with _locked(directory):
        return _make(what, directory, signature, processes, on_bytes)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory inside the `with` block, so that no other process tokenises into it.

    Raises:
        MeshwrightError: another process holds the lock.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise MeshwrightError(
            f"another process tokenises into {directory}; wait for it, or -o names another directory"
        ) from None
    finally:
        os.close(descriptor)


def _make(
    what: Tokenizing, directory: Path, signature: str, processes: int, on_bytes: Callable[[int], None]
) -> StoreInfo:
    """Tokenize the units that have no finished shard in `directory`, complete the store, and return its description.

    signature: a checksum of what is tokenized and how, stored with the store. processes: 0 for as many as there are
    cores. on_bytes: called with the bytes of source files that were tokenized since the last call.
    """
    units = what.units()
    done = {unit.number: shard for unit in units if (shard := _finished_shard(directory, unit.number))}
    on_bytes(sum(unit.num_bytes for unit in units if unit.number in done))
    left = [unit for unit in units if unit.number not in done]
    count = min(processes or len(os.sched_getaffinity(0)), len(left))
    if count > 1:
        made = run_units(left, what.encoder, what.rule, directory, processes=count)
    else:
        made = ((unit, make_shard(unit, what.encoder, what.rule, directory)) for unit in left)
    try:
        with closing(made):
            for unit, shard in made:
                done[unit.number] = shard
                on_bytes(unit.num_bytes)
        return _finish(what, directory, [done[unit.number] for unit in units], signature)
    except MeshwrightError:
        # Without a complete shard there is nothing to continue, so clear the directory for corrected source files.
        if not done:
            for path in (directory / UNFINISHED, *directory.glob("[0-9]*.*")):
                path.unlink(missing_ok=True)
        raise


def _begin(directory: Path, signature: str) -> None:
    """Create the directory, or check that it has an incomplete store with the same signature. Raises if it has not."""
    check_new_directory(directory)
    path = directory / UNFINISHED
    if not directory.is_dir() or not any(directory.iterdir()):
        directory.mkdir(parents=True, exist_ok=True)
        write_file(path, signature)
    elif not path.is_file():
        raise MeshwrightError(f"{directory} is not empty, and holds no store of tokens; -o names a new directory")
    elif path.read_text() == signature.replace('"rule": "skip"', '"rule": "error"'):
        write_file(path, signature)  # Shards completed under `error` have no bad record, so `skip` gives the same.
    elif path.read_text() != signature:
        raise MeshwrightError(
            f"{directory} holds a part of another store (other files, tokenizer or options); delete it, or -o names"
            " another directory"
        )


def _finished_shard(directory: Path, number: int) -> Shard | None:
    """Return the description of shard `number` if an earlier call completed it; else None."""
    path = directory / shard_info_file(number)
    if not path.is_file():
        return None
    try:
        shard = from_data(Shard, json.loads(path.read_text()))
    except ValueError:
        return None
    names = [tokens_file(number), shard_lengths_file(number), *([loss_file(number)] if shard.has_loss else [])]
    return shard if all((directory / name).is_file() for name in names) else None


def _finish(what: Tokenizing, directory: Path, shards: Sequence[Shard], signature: str) -> StoreInfo:
    """Complete a store of complete shards: write `offsets.npy`, `loss_counts.npy` if needed, and last `store.json`.

    Returns the contents of `store.json`. The files that only an incomplete store has are deleted.

    Raises:
        MeshwrightError: a source file was changed meanwhile, or there are no documents.
    """
    if what.signature() != signature:
        raise MeshwrightError(
            f"{what.source.name} was changed while it was tokenised; delete {directory}, and tokenise it again"
        )
    if not sum(shard.documents for shard in shards):
        raise MeshwrightError(f"{what.source.name} has no documents; every record is empty or left out")
    sizes = [np.load(directory / shard_lengths_file(number)) for number in range(len(shards))]
    lengths, counts = np.concatenate(sizes).T
    write_file(directory / "offsets.npy", npy(np.concatenate([[0], np.cumsum(lengths)])))
    if any(shard.has_loss for shard in shards):
        write_file(directory / "loss_counts.npy", npy(np.ascontiguousarray(counts)))
    template = json.loads(signature)["chat_template"] if what.encoder.form in ("chat", "pairs") else None
    info = StoreInfo(
        format=FORMAT,
        form=what.encoder.form,
        fields=what.encoder.fields,
        tokenizer=what.encoder.fingerprint,
        tokenizer_name=what.tokenizer_name,
        chat_template=template,
        shards=tuple(shards),
        fingerprint=hashlib.sha256(json.dumps([shard.checksum for shard in shards]).encode()).hexdigest(),
    )
    write_file(directory / "signature.json", signature)
    write_file(directory / STORE, info.to_json())
    for number in range(len(shards)):
        for name in (shard_info_file(number), shard_lengths_file(number)):
            (directory / name).unlink(missing_ok=True)
    (directory / UNFINISHED).unlink(missing_ok=True)
    return info
