"""A token store: a folder of memory-mapped arrays with the tokens of documents, described by `store.json`.

store.json                `StoreInfo`; written last, so that a store is complete or absent
offsets.npy               int64 [documents + 1]: index of each document's first token in all tokens; the total
loss_counts.npy           int64 [documents]: `Document.loss_tokens`; only if some tokens have no loss
000000.tokens.npy …       the tokens of the documents of each shard, concatenated
000000.loss.npy …         bool: whether each token of the shard has loss; only if some of them have none
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.execution.data.document import Document, Form, Pair
from meshwright.support.field_types import check_fields, from_data

FORMAT = 1
"""The version of this file format."""

STORE = "store.json"

CHECKED_TOKENS = 1 << 30
"""Checksums of stores with more tokens are not checked: for so many tokens that takes 7 s of one core."""

BLOCK = 1 << 24
"""Number of tokens that are read at once for a checksum."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The description of a shard, which has some of a store's documents.

    documents, tokens: how many the shard has. has_loss: whether some tokens have no loss, so that there is a loss file.
    checksum: sha256 of the tokens as uint32, then of the loss masks if there are any, then of the number of tokens and
    of `loss_tokens` of each document as int64.
    """

    documents: int
    tokens: int
    has_loss: bool
    largest: int
    """The largest token id; -1 if there are no tokens."""
    checksum: str
    bad: dict[str, int] = field(default_factory=dict)
    """Number of bad records that were left out, by kind (`bad_data.KINDS`)."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """Contents of `store.json`."""

    format: int
    form: Form
    """Form of the records; in `pairs`, chosen and rejected documents alternate."""
    fields: str
    """As in `Encoder`."""
    tokenizer: str
    """The fingerprint of the tokenizer (`Tokenizer.fingerprint`)."""
    tokenizer_name: str
    """Where the tokenizer was read from, for messages."""
    chat_template: str | None
    """The sha256 of the chat template that messages were formatted with; None without one."""
    shards: tuple[Shard, ...]
    fingerprint: str
    """A checksum of all documents and their order."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def bad(self) -> dict[str, int]:
        """Number of bad records of all shards that were left out, by kind."""
        kinds = sorted({kind for shard in self.shards for kind in shard.bad})
        return {kind: sum(shard.bad.get(kind, 0) for shard in self.shards) for kind in kinds}

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """The number of documents; a pair counts as two."""
        return sum(shard.documents for shard in self.shards)

    def to_json(self) -> str:
        """Return the text of `store.json`."""
        return json.dumps(asdict(self), indent=1) + "\n"


def tokens_file(number: int) -> str:
    """Return the name of the file with the tokens of shard `number`."""
    return f"{number:06d}.tokens.npy"


def loss_file(number: int) -> str:
    """Return the name of the file with the loss mask of shard `number`."""
    return f"{number:06d}.loss.npy"


def is_store(path: Path) -> bool:
    """Whether a path is a directory with a complete token store."""
    return (path / STORE).is_file()


class TokenStore:
    """An open store: a `Dataset` whose arrays stay on disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.info = read_info(directory)
        self.offsets = _map_array(directory / "offsets.npy")
        self._has_loss = any(shard.has_loss for shard in self.info.shards)
        self._counts = _map_array(directory / "loss_counts.npy") if self._has_loss else None
        # The cache keeps the number of maps below the system's limit (vm.max_map_count), and ends with this store.
        self._part = lru_cache(maxsize=4096)(_map_shard)
        self._starts = np.cumsum([0, *(shard.tokens for shard in self.info.shards)])
        if len(self.offsets) != self.info.documents + 1 or self.offsets[-1] != self.info.tokens:
            raise MeshwrightError(f"{directory}/offsets.npy is not that of its store.json; tokenise anew")

    @property
    def loss_counts(self) -> np.ndarray | None:
        """The `Document.loss_tokens` of each document [documents]; None if all tokens have loss."""
        return self._counts

    def check(self) -> None:
        """Raise if a shard does not have its checksum. Stores of more than `CHECKED_TOKENS` tokens are not checked."""
        if self.info.tokens > CHECKED_TOKENS:
            return
        with ThreadPoolExecutor() as pool:
            for number, checksum in enumerate(pool.map(self._checksum, range(len(self.info.shards)))):
                if checksum != self.info.shards[number].checksum:
                    raise MeshwrightError(
                        f"{self.directory} is damaged: shard {number} is not what was written; tokenise anew, or delete"
                        " it if it is in the cache"
                    )

    def _checksum(self, number: int) -> str:
        """Return the checksum of shard `number`, computed from the files."""
        shard, checksum = self.info.shards[number], hashlib.sha256()
        parts = {tokens_file(number): np.uint32} | ({loss_file(number): np.bool_} if shard.has_loss else {})
        for name, dtype in parts.items():
            values = self._part(self.directory / name, shard.tokens)
            for start in range(0, shard.tokens, BLOCK):
                checksum.update(values[start : start + BLOCK].astype(dtype).data)
        first = sum(one.documents for one in self.info.shards[:number])
        lengths = np.diff(self.offsets[first : first + shard.documents + 1])
        counts = np.maximum(lengths - 1, 0) if self._counts is None else self._counts[first : first + shard.documents]
        checksum.update(np.stack([lengths, counts], axis=1).astype(np.int64).tobytes())
        return checksum.hexdigest()

    def read(self, document: int, start: int = 0, stop: int | None = None) -> Document:
        """Return tokens `start` (included) to `stop` (excluded; default: the end) of document number `document`."""
        first, last = int(self.offsets[document]), int(self.offsets[document + 1])
        stop = last if stop is None else min(first + stop, last)
        number = int(np.searchsorted(self._starts, first, side="right")) - 1
        shard, at = self.info.shards[number], int(self._starts[number])
        span = slice(first + start - at, stop - at)
        tokens = self._part(self.directory / tokens_file(number), shard.tokens)[span].astype(np.int32)
        if not shard.has_loss:
            return Document(tokens)
        return Document(tokens, np.array(self._part(self.directory / loss_file(number), shard.tokens)[span]))


def open_store(directory: Path) -> TokenStore:
    """Return the store in a directory, with its checksums checked (`TokenStore.check`). Raises if it is damaged."""
    store = TokenStore(directory)
    store.check()
    return store


def read_info(directory: Path) -> StoreInfo:
    """Return the contents of the `store.json` of a directory.

    Raises:
        MeshwrightError: the file is missing, has another version, or is not a valid `StoreInfo`.
    """
    path = directory / STORE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise MeshwrightError(f"{path} is not JSON: {error}") from None
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise MeshwrightError(
            f"{path} has format {data.get('format')!r}, and this version reads {FORMAT}; tokenise anew"
        )
    try:
        return from_data(StoreInfo, data)
    except MeshwrightError as error:
        raise MeshwrightError(f"{path} is not a store of tokens: {error}") from None


def _map_shard(path: Path, count: int) -> np.ndarray:
    """Return the array in a file of a shard as a memory map. Raises if it does not have `count` elements."""
    found = _map_array(path)
    if found.shape != (count,):
        raise MeshwrightError(f"{path} has {found.size:,} tokens, and store.json {count:,}; tokenise anew")
    return found


def _map_array(path: Path) -> np.ndarray:
    """Return the array of integers or booleans [count] in a file as a memory map. Raises if it is anything else."""
    try:
        found = np.load(path, mmap_mode="r")
        if found.ndim != 1 or found.dtype.kind not in "biu":
            raise ValueError(f"it has the shape {found.shape} and dtype {found.dtype}")
        return found
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror or error}") from None
    # The file is too short, or not a NumPy file: NumPy reads its header as Python.
    except (ValueError, TypeError, SyntaxError, TokenError, OverflowError, EOFError) as error:
        raise MeshwrightError(f"{path} is damaged: {str(error).splitlines()[0]}; tokenise anew") from None


class PreferencePairs:
    """The preference pairs of a store as a sequence of `Pair`. Raises if the store's `form` is not `pairs`."""

    def __init__(self, store: TokenStore) -> None:
        if store.info.form != "pairs":
            raise MeshwrightError(
                f"{store.directory} holds documents, not pairs; preference records have prompt, chosen and rejected"
            )
        self.store = store

    def __len__(self) -> int:
        return self.store.info.documents // 2

    def __getitem__(self, number: int) -> Pair:
        return Pair(self.store.read(2 * number), self.store.read(2 * number + 1))
