"""One unit of work of tokenising: ranges of files to the arrays of one shard."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from meshwright.data.bad_data import BadData, BadRecordError, Rule
from meshwright.data.document import Document
from meshwright.data.encoding import Encoder
from meshwright.data.records import Range, read_records
from meshwright.data.store import Shard, loss_file, tokens_file
from meshwright.files import write_file


@dataclass(frozen=True)
class Unit:
    """The ranges of files that become one shard."""

    number: int
    ranges: tuple[Range, ...]

    @property
    def num_bytes(self) -> int:
        """About how much of the files it is."""
        return sum(part.num_bytes for part in self.ranges)


def shard_info_file(number: int) -> str:
    """The name of the file that is written when a shard is whole, until the store is."""
    return f"{number:06d}.json"


def shard_lengths_file(number: int) -> str:
    """The name of the file with the sizes of a shard's documents [documents, 2]: tokens, and tokens with loss."""
    return f"{number:06d}.lengths.npy"


def make_shard(unit: Unit, encoder: Encoder, rule: Rule, directory: Path) -> Shard:
    """Tokenise a unit and write its arrays; `NUMBER.json`, written last, says that the shard is whole.

    Raises:
        MeshwrightError: a bad record, unless the rule skips it, or a disk that is full.
    """
    bad = BadData(rule)
    documents = [document for part in unit.ranges for document in _documents(part, encoder, bad)]
    dtype = np.uint8 if encoder.vocab <= 1 << 8 else np.uint16 if encoder.vocab <= 1 << 16 else np.uint32
    tokens = _end_to_end([document.tokens for document in documents], dtype)
    has_loss = any(document.loss is not None for document in documents)
    checksum = hashlib.sha256(tokens.astype(np.uint32).tobytes())
    write_file(directory / tokens_file(unit.number), npy(tokens))
    if has_loss:
        masks = [
            np.ones(len(document.tokens), bool) if document.loss is None else document.loss for document in documents
        ]
        loss = _end_to_end(masks, bool)
        checksum.update(loss.tobytes())
        write_file(directory / loss_file(unit.number), npy(loss))
    sizes = np.array([(len(document.tokens), document.loss_tokens) for document in documents], np.int64).reshape(-1, 2)
    checksum.update(sizes.tobytes())
    write_file(directory / shard_lengths_file(unit.number), npy(sizes))
    shard = Shard(
        documents=len(documents),
        tokens=len(tokens),
        has_loss=has_loss,
        largest=int(tokens.max(initial=0)) if len(tokens) else -1,
        checksum=checksum.hexdigest(),
        bad=dict(bad.counts),
    )
    write_file(directory / shard_info_file(unit.number), json.dumps(asdict(shard)))
    return shard


def npy(array: np.ndarray) -> bytes:
    """An array as the bytes of a `.npy` file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _documents(part: Range, encoder: Encoder, bad: BadData) -> list[Document]:
    """The documents of a range; bad records are counted, or raised."""
    found: list[Document] = []
    for number, record in enumerate(read_records(part)):
        try:
            if isinstance(record, BadRecordError):
                raise record
            found += encoder(record)
        except BadRecordError as error:
            bad.add(error, part.place(number))
    return found


def _end_to_end(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)
