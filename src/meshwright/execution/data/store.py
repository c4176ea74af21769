"""A store of tokens: a folder of memory-mapped arrays, described by `store.json`.

store.json                origin of the tokens; written last, so that a store is complete or absent
offsets.npy               int64 [documents + 1]: where each document begins in the concatenated tokens
loss_counts.npy           int64 [documents]: tokens with loss; only if some tokens have none
000000.tokens.npy …       the tokens of all documents, concatenated
000000.loss.npy …         bool: which tokens have loss; only in shards with tokens that have none
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
"""The version of the format."""

STORE = "store.json"

CHECKED_TOKENS = 1 << 30
"""Stores of more tokens are opened without reading them for their checksums, which took 7 s of one core for so many."""

BLOCK = 1 << 24
"""Tokens that are read at once for a checksum."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some of a store's documents, stored one after another.

    checksum: sha256 of their tokens as uint32, their loss masks if there are any, and, for each document, the number
    of its tokens and of those with loss, as int64.
    """

    documents: int
    tokens: int
    has_loss: bool
    largest: int
    """Largest token id; -1 if there are no tokens."""
    checksum: str
    bad: dict[str, int] = field(default_factory=dict)
    """Bad records by kind (`bad_data.KINDS`)."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """Contents of `store.json`."""

    format: int
    form: Form
    """Form of the records; in `pairs` every second document is a rejected answer."""
    fields: str
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
        """Bad records by kind."""
        kinds = sorted({kind for shard in self.shards for kind in shard.bad})
        return {kind: sum(shard.bad.get(kind, 0) for shard in self.shards) for kind in kinds}

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
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
    """Return the name of the loss-mask file of shard `number`."""
    return f"{number:06d}.loss.npy"


def is_store(path: Path) -> bool:
    """Whether a path is a store of tokens."""
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
        """The predicted tokens of each document that have loss [documents]; None if all but the first do."""
        return self._counts

    def check(self) -> None:
        """Raise if tokens, loss masks or offsets are not what was written. Nothing is read of a large store."""
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
        """Return the checksum of a shard as it is on disk."""
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
        """Read tokens `start` to `stop` of a document, or to its end."""
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
    """Open the store in a directory whose checksums are right. Raises if it is damaged."""
    store = TokenStore(directory)
    store.check()
    return store


def read_info(directory: Path) -> StoreInfo:
    """Read the `store.json` of a directory.

    Raises:
        MeshwrightError: if it is missing, edited, or of another version.
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
    """Memory-map the array of a shard. Raises if it does not have `count` elements."""
    found = _map_array(path)
    if found.shape != (count,):
        raise MeshwrightError(f"{path} has {found.size:,} tokens, and store.json {count:,}; tokenise anew")
    return found


def _map_array(path: Path) -> np.ndarray:
    """Memory-map the array of integers or booleans [count] in a file."""
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
    """The preference pairs of a store by number; chosen and rejected documents alternate. Its `form` must be pairs."""

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
