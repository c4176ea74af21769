"""Read SentencePiece models (`tokenizer.model`) as tokenizers, for directories without a `tokenizer.json`.

The file is a protocol buffer (https://github.com/google/sentencepiece, src/sentencepiece_model.proto); only the fields
that determine how text is split are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from meshwright.errors import MeshwrightError
from meshwright.execution.text.tokenizer_config import SPACE

UNIGRAM, BPE = 1, 2
"""Values of the file's `TrainerSpec.model_type` that are read."""
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Values of the file's `SentencePiece.type`; 1 is an ordinary piece."""

NEVER = -1e4
"""A score so low that the piece is never chosen."""


class Piece(NamedTuple):
    """A piece of text with its score and kind (`SentencePiece.type` in the file); its index is its token id."""

    text: str
    score: float
    kind: int


class SentencePiece(NamedTuple):
    """Contents of a model file.

    algorithm: `UNIGRAM`, `BPE` or another number. byte_fallback: split characters without a piece into bytes. bos, eos:
    ids of the begin and end tokens; -1 if there is none. rules: name of the normalization. charsmap: the compiled
    normalization. has_prefix: put a space before a text. squeezes_spaces: remove repeated spaces, and spaces at both
    ends. keeps_spaces: do not replace spaces by `SPACE`. has_suffix: put spaces after words instead of before them.
    """

    pieces: list[Piece]
    algorithm: int
    byte_fallback: bool
    bos: int
    eos: int
    rules: str
    charsmap: bytes
    has_prefix: bool
    squeezes_spaces: bool
    keeps_spaces: bool
    has_suffix: bool

    @property
    def unread(self) -> str:
        """Text on a feature of the file that `tokenizers.Tokenizer` cannot reproduce exactly; empty if it has none."""
        user_defined = [piece.text for piece in self.pieces if piece.kind == USER_DEFINED]
        kinds = {
            "of words or of characters": self.algorithm not in (UNIGRAM, BPE),
            "with unused pieces": any(piece.kind == UNUSED for piece in self.pieces),
            "that keeps spaces as they are (escape_whitespaces is false)": self.keeps_spaces,
            "with spaces after words (treat_whitespace_as_suffix)": self.has_suffix,
            f"with pieces defined by its user ({user_defined[:1]}) and a space before each text": bool(
                user_defined and (self.has_prefix or self.squeezes_spaces)
            ),
        }
        return next((kind for kind, holds in kinds.items() if holds), "")


def read_sentencepiece(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a SentencePiece model.

    Args:
        config: contents of `tokenizer_config.json`. `add_bos_token` (default: true) and `add_eos_token` (default:
          false) say whether every text gets the begin and the end token.

    Raises:
        MeshwrightError: the file is not such a model, or has features that `SentencePiece.unread` describes.
    """
    try:
        model = _read(path.read_bytes())
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, IndexError, struct.error):
        raise MeshwrightError(
            f"{path} is not a SentencePiece model, and there is no tokenizer.json; transformers writes one:"
            f" `AutoTokenizer.from_pretrained(…).save_pretrained(…)`"
        ) from None
    if model.unread:
        raise MeshwrightError(
            f"{path} is a SentencePiece model {model.unread}, which is not read; give a tokenizer.json of it"
        )
    tokenizer = Tokenizer(_unigram(model) if model.algorithm == UNIGRAM else _bpe(model))
    steps: list[Any] = []
    if model.charsmap:
        # SentencePiece looks up the longest run of characters. `Precompiled` of `tokenizers` looks up a letter with
        # combining marks by the letter alone, so letters and marks are composed first.
        steps += [normalizers.NFKC()] if "nfkc" in model.rules else []
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.squeezes_spaces:
        # Remove only spaces, not newlines and tabs; at the end also SPACE, which spaces are replaced by.
        steps += [normalizers.Replace(Regex(pattern), "") for pattern in (r"\A +", rf"[ {SPACE}]+\z")]
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    # As in the tokenizer.json of Llama 2, text after a special token begins with a space too.
    steps += [normalizers.Prepend(SPACE)] if model.has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    joined = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    leading = 2**31 if model.squeezes_spaces else int(model.has_prefix)
    tokenizer.decoder = decoders.Sequence([*joined, *([decoders.Strip(" ", leading, 0)] if leading else [])])
    for piece in model.pieces:
        if piece.kind in (UNKNOWN, CONTROL):
            tokenizer.add_special_tokens([AddedToken(piece.text, normalized=False, special=True)])
        elif piece.kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece.text, normalized=True)])
    before = [model.pieces[model.bos].text] if config.get("add_bos_token", True) and model.bos >= 0 else []
    after = [model.pieces[model.eos].text] if config.get("add_eos_token", False) and model.eos >= 0 else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join([*before, "$A", *after]),
            special_tokens=[(text, tokenizer.token_to_id(text)) for text in {*before, *after}],
        )
    return tokenizer


def _unigram(model: SentencePiece) -> models.Unigram:
    """Return a Unigram model, which splits text into the pieces with the highest sum of scores."""
    unknown = next((number for number, piece in enumerate(model.pieces) if piece.kind == UNKNOWN), None)
    # Byte pieces encode characters that are in no piece; text that equals their names (`<0x41>`) must not match them.
    vocab = [(piece.text, NEVER if piece.kind == BYTE else piece.score) for piece in model.pieces]
    return models.Unigram(vocab, unk_id=unknown, byte_fallback=model.byte_fallback)


def _bpe(model: SentencePiece) -> models.BPE:
    """Return a BPE model: every split of a piece into two pieces is a merge; pieces with higher scores merge first."""
    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    merges: list[tuple[str, str]] = []
    for piece in sorted((piece for piece in model.pieces if piece.kind == 1), key=lambda piece: -piece.score):
        halves = [(piece.text[:at], piece.text[at:]) for at in range(1, len(piece.text))]
        known = [pair for pair in halves if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    unknown = next((piece.text for piece in model.pieces if piece.kind == UNKNOWN), None)
    return models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def _read(data: bytes) -> SentencePiece:
    """Return the contents of a model file; missing fields get the format's defaults.

    Raises:
        ValueError, IndexError, struct.error: the data is not a SentencePiece model.
    """
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            said = dict(_fields(value))
            score = struct.unpack("<f", said.get(2, bytes(4)))[0]
            pieces.append(Piece(said[1].decode(), score, said.get(3, 1)))
        elif number == 2:
            trainer |= dict(_fields(value))
        elif number == 3:
            normalizer |= dict(_fields(value))
    if not pieces or not trainer:
        raise ValueError
    numbers = {piece.text: number for number, piece in enumerate(pieces) if piece.kind == CONTROL}
    return SentencePiece(
        pieces,
        algorithm=trainer.get(3, UNIGRAM),
        byte_fallback=bool(trainer.get(35, False)),
        bos=numbers.get(trainer.get(46, b"<s>").decode(), -1),
        eos=numbers.get(trainer.get(47, b"</s>").decode(), -1),
        rules=normalizer.get(1, b"").decode(),
        charsmap=normalizer.get(2, b""),
        has_prefix=bool(normalizer.get(3, True)),
        squeezes_spaces=bool(normalizer.get(4, True)),
        keeps_spaces=not normalizer.get(5, True),
        has_suffix=bool(trainer.get(24, False)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of each field of a protocol buffer; a value is an int, or bytes for other types."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError
        if at + size > len(data):
            raise ValueError
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at position `at`, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
