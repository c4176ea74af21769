"""Encode records as documents of tokens: plain text, templates of fields, chats, token ids, and preferences."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import BadRecordError
from meshwright.execution.data.document import Document, Form
from meshwright.execution.data.sources import FileSource
from meshwright.execution.data.template import BOS, EOS, Part, parse_fields, text_field
from meshwright.execution.text.chat import chat_examples, chat_template
from meshwright.execution.text.tokenizer import Tokenizer, byte_tokenizer

Message = dict[str, Any]
"""A message of a chat, or a tool, as the object that chat templates read."""

IGNORED = -100
"""Label of a token without loss in Hugging Face datasets and in PyTorch's cross-entropy."""


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that messages may have, besides those that the chat template contains in quotes."""


@dataclass(frozen=True)
class Encoder:
    """Converts the records of a source to documents.

    form: see `Form`. fields: for `text` the template, for `tokens` and `chat` the name of the field; unused for `file`
    and `pairs`. tokenizer: None for bytes. vocab: token ids must be below it.
    """

    form: Form
    fields: str
    tokenizer: Tokenizer | None = None
    vocab: int = 256

    def __call__(self, record: Mapping[str, Any]) -> list[Document]:
        """Return the documents of a record: one, or for `pairs` two (chosen, rejected), or for `chat` one or several.

        Raises:
            BadRecordError: the record cannot be used.
        """
        documents = getattr(self, f"_{self.form}")(record)
        for document in documents:
            if len(document.tokens) < 2:
                raise BadRecordError("empty", "the document is empty")
            if document.loss is not None and not document.loss_tokens:
                raise BadRecordError("no_loss", "no token of the document has loss")
        return documents

    @cached_property
    def _codec(self) -> Tokenizer:
        return self.tokenizer or byte_tokenizer()

    @cached_property
    def fingerprint(self) -> str:
        """The tokenizer's fingerprint."""
        return self._codec.fingerprint

    @cached_property
    def begin(self) -> np.ndarray:
        """The special tokens with which the tokenizer begins every text [n], possibly none."""
        bare = self._codec.encode("a", add_special_tokens=False)
        marked = self._codec.encode("a")
        at = next((at for at in range(len(marked)) if marked[at : at + len(bare)] == bare), 0)
        return np.array(marked[:at], np.int32)

    @cached_property
    def end(self) -> np.ndarray:
        """The token that ends a text [1]: the tokenizer's first stop token, or without one a newline."""
        return np.array(self._codec.stop_tokens[:1] or self._codec.encode("\n", add_special_tokens=False), np.int32)

    def _file(self, record: Mapping[str, Any]) -> list[Document]:
        """Return the document of a record of a text file; only the record with the file's end gets the end token."""
        tokens = self._encode(record["text"])
        if not len(tokens):
            raise BadRecordError("empty", "the document is empty")
        return [_join([(tokens, True), (self.end if record["is_end"] else self.end[:0], True)])]

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        return parse_fields(self.fields)

    def _text(self, record: Mapping[str, Any]) -> list[Document]:
        """Return the document of a template's fields, with each part tokenised separately."""
        pieces: list[tuple[np.ndarray, bool]] = []
        is_empty = True
        for part in self._parts:
            if part.items in ((BOS,), (EOS,)):
                tokens = self.begin if part.items == (BOS,) else self.end
            else:
                tokens = self._encode(part.text(record))
                is_empty &= not len(tokens)
            pieces.append((tokens, part.has_loss))
        if is_empty:
            raise BadRecordError("empty", "the document is empty")
        if self._parts[0].items != (BOS,):
            pieces.insert(0, (self.begin, False))
        if self._parts[-1].items != (EOS,):
            pieces.append((self.end, True))
        return [_join(pieces)]

    def _tokens(self, record: Mapping[str, Any]) -> list[Document]:
        """Return the document of token ids. If the record has `labels`, tokens whose label is -100 have no loss."""
        tokens = self._ids(record, self.fields)
        if not len(tokens):
            raise BadRecordError("empty", "the document is empty")
        if (largest := int(tokens.max())) >= self.vocab or int(tokens.min()) < 0:
            wrong = largest if largest >= self.vocab else int(tokens.min())
            raise BadRecordError("over_vocab", f"token id {wrong} is outside the vocabulary of {self.vocab:,}")
        if (
            record.get("attention_mask") is not None
            and not self._numbers_of_tokens(record, "attention_mask", len(tokens)).all()
        ):
            raise BadRecordError(
                "missing_field",
                f"attention_mask has a 0, so that some of {self.fields} are padding; leave padding out of the record",
            )
        if "labels" not in record or record["labels"] is None:
            return [Document(tokens.astype(np.int32))]
        labels = self._numbers_of_tokens(record, "labels", len(tokens))
        if wrong := np.flatnonzero((labels != IGNORED) & (labels != tokens)).tolist():
            at = wrong[0]
            raise BadRecordError(
                "missing_field",
                f"labels has {labels[at]} where {self.fields} has {tokens[at]}; a label is the token itself, or"
                f" {IGNORED} where it has no loss",
            )
        return [Document(tokens.astype(np.int32), labels != IGNORED)]

    def _numbers_of_tokens(self, record: Mapping[str, Any], name: str, count: int) -> np.ndarray:
        """Return a field of `count` whole numbers, one for each token, as int64 [count]."""
        values = self._ids(record, name)
        if len(values) != count:
            raise BadRecordError("missing_field", f"{name} has {len(values)} tokens, {self.fields} {count}")
        return values

    def _chat(self, record: Mapping[str, Any]) -> list[Document]:
        """Return the documents of a chat, with loss on the assistant's turns (see `chat_examples`)."""
        return self._chat_of(messages_of(record, self.fields), tools_of(record))

    def _pairs(self, record: Mapping[str, Any]) -> list[Document]:
        """Return two documents: the prompt with the chosen answer, and the prompt with the rejected answer."""
        if isinstance(record.get("chosen"), str):
            prompt = self._encode(text_field(record, "prompt"))
            if record["chosen"] == record.get("rejected") != "":
                raise BadRecordError("missing_field", "chosen is rejected too, which prefers nothing")
            return [self._answer(prompt, text_field(record, name)) for name in ("chosen", "rejected")]
        chosen, rejected, tools = messages_of(record, "chosen"), messages_of(record, "rejected"), tools_of(record)
        if isinstance(record.get("prompt"), Sequence) and not isinstance(record["prompt"], str):
            prompt_messages = messages_of(record, "prompt")
            chosen, rejected, first = prompt_messages + chosen, prompt_messages + rejected, len(prompt_messages)
        else:  # `chosen` and `rejected` are whole chats; the messages that both begin with are the prompt.
            both = zip(chosen, rejected, strict=False)
            first = next((at for at, (a, b) in enumerate(both) if a != b), min(len(chosen), len(rejected)))
        if chosen == rejected:
            raise BadRecordError("missing_field", "chosen is rejected too, which prefers nothing")
        answers = [self._chat_of(messages, tools, first) for messages in (chosen, rejected)]
        if any(len(texts) > 1 for texts in answers):
            raise BadRecordError(
                "chat", "the chat template writes an answer's turns otherwise once more follow; an answer is one turn"
            )
        return [document for texts in answers for document in texts]

    def _chat_of(self, messages: list[Message], tools: Sequence[Message], first: int = 0) -> list[Document]:
        if not any((message["content"] or "").strip() or "tool_calls" in message for message in messages):
            raise BadRecordError("empty", "the document is empty")
        written = chat_template(self._codec, has_tools=bool(tools)) or ""
        for role in (message["role"] for message in messages):
            if role not in ROLES and not re.search(f"['\"]{re.escape(role)}['\"]", written):
                raise BadRecordError(
                    "chat",
                    f"a message has the role {role!r}, which the chat template does not name; known are"
                    f" {', '.join(ROLES)}",
                )
        try:
            examples = chat_examples(self._codec, messages, tools=tools, first=first)
        except MeshwrightError as error:
            raise BadRecordError("chat", str(error)) from None
        return [Document(np.array(tokens, np.int32), np.array(loss, bool)) for tokens, loss in examples]

    def _answer(self, prompt: np.ndarray, text: str) -> Document:
        """Return the document of a prompt's tokens and an answer's text, with loss on the answer."""
        if not text:
            raise BadRecordError("empty", "an answer is empty")
        return _join([(self.begin, False), (prompt, False), (self._encode(text), True), (self.end, True)])

    def _encode(self, text: str) -> np.ndarray:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise BadRecordError("invalid_utf8", "the text has half of a surrogate pair, which is no UTF-8") from None
        if self.tokenizer is None:
            return np.frombuffer(data, np.uint8)
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def _ids(self, record: Mapping[str, Any], name: str) -> np.ndarray:
        """Return a field of whole numbers as int64 [n]. Raises if it is anything else."""
        try:
            ids = np.asarray(record.get(name))
        except (ValueError, OverflowError):
            ids = np.empty(0, object)
        if ids.ndim == 1 and not len(ids) and isinstance(record.get(name), list | np.ndarray):
            return ids.astype(np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise BadRecordError("missing_field", f"the field {name} is not a list of token ids")
        return ids.astype(np.int64)


def find_encoder(
    source: FileSource,
    fields: str | None,
    tokenizer: Tokenizer | None,
    *,
    vocab: int | None = None,
    pairs: bool = False,
) -> Encoder:
    """Return the encoder of a source's records. The form is chosen by the first record.

    Args:
        source: the files.
        fields: a template of text fields, or the name of a field with messages or token ids. Default: the first field
          that the first record has of `messages`, `conversations` (chats), `input_ids` (token ids) and `text`.
        tokenizer: None for bytes.
        vocab: token ids must be below it; default: the tokenizer's number of tokens.
        pairs: whether records are preferences.

    Raises:
        MeshwrightError: the first record has none of these fields, the template is invalid, or the records are chats
          and the tokenizer has no chat template.
    """
    if vocab is None:
        vocab = (tokenizer or byte_tokenizer()).num_tokens
    if source.kind == "text":
        if fields is not None or pairs:
            raise MeshwrightError(
                f"{source.name} is text, which has no fields; leave {'--pairs' if pairs else '--fields'} out"
            )
        return _text_encoder(Encoder("file", "", tokenizer, vocab))
    if pairs:
        if fields is not None:
            raise MeshwrightError("the fields of preferences are prompt, chosen and rejected; leave --fields out")
        return _text_encoder(Encoder("pairs", "", tokenizer, vocab))
    record = source.first_record()
    if fields is None:
        fields = next((name for name in ("messages", "conversations", "input_ids", "text") if name in record), None)
        if fields is None:
            there = ", ".join(map(str, record)) or "none"
            raise MeshwrightError(
                f"the records of {source.name} have the fields {there}; --fields says which of them are text and which"
                " have loss, as [question],answer"
            )
    value = record.get(fields)
    if isinstance(value, list | np.ndarray):
        if not len(value) or not isinstance(value[0], Mapping):
            return Encoder("tokens", fields, tokenizer, vocab)
        if tokenizer is None or not chat_template(tokenizer):
            whose = "bytes have" if tokenizer is None else "the tokenizer has"
            raise MeshwrightError(
                f"the field {fields} of {source.name} is a chat, and {whose} no chat template; the directory of an"
                " instruction-tuned model has one: its chat_template.jinja may be copied beside another tokenizer.json"
            )
        return Encoder("chat", fields, tokenizer, vocab)
    if fields in ("messages", "conversations") and isinstance(value, str):
        raise MeshwrightError(
            f"the field {fields} of {source.name} is {value!r:.40}; a chat is a list of messages, each with role and"
            " content"
        )
    parse_fields(fields)
    return _text_encoder(Encoder("text", fields, tokenizer, vocab))


def _text_encoder(encoder: Encoder) -> Encoder:
    """Return `encoder` itself. Raises if it reads text as bytes and its vocabulary has fewer than 256 tokens."""
    if encoder.tokenizer is None and encoder.vocab < (wanted := byte_tokenizer().num_tokens):
        raise MeshwrightError(
            f"vocab {encoder.vocab} is too small for text as bytes, which needs {wanted}; give data of input_ids"
        )
    return encoder


def messages_of(record: Mapping[str, Any], name: str) -> list[Message]:
    """Return the messages in field `name` of a record, as objects with `role`, `content` and their other keys.

    ShareGPT's keys `from` and `value` become `role` and `content`. Keys whose value is null are removed: Parquet and
    Arrow store null for keys that a message lacks, and templates test whether a key is there.

    Raises:
        BadRecordError: the field is not a list of messages, or is empty.
    """
    value = record.get(name)
    if value is None or isinstance(value, str) or not isinstance(value, Sequence):
        raise BadRecordError("missing_field", f"the field {name} is not a list of messages")
    if not value:
        raise BadRecordError("empty", "the chat has no messages")
    return [_message(message, f"message {number} of {name}") for number, message in enumerate(value, start=1)]


def _message(value: Any, place: str) -> Message:
    """Return a message with `role` and `content` (text, or None if it has `tool_calls`). Raises if it is invalid.

    place: where the message is, for the error.
    """
    message = {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else {}
    role, content = message.pop("from", None), message.pop("value", None)
    role, content = message.get("role", role), message.get("content", content)
    if isinstance(content, list):  # Content parts, as in OpenAI's API.
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if None in parts else "".join(map(str, parts))
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and "tool_calls" in message)):
        raise BadRecordError("missing_field", f"{place} has no role and text as content")
    if message.get("weight", 1) not in (0, 1):
        raise BadRecordError("missing_field", f"{place} has the weight {message['weight']}; it is 0 or 1")
    return message | {"role": _ROLES.get(role, role), "content": content}


def tools_of(record: Mapping[str, Any]) -> list[Message]:
    """Return the tools of a chat, from the record's field `tools`; empty if it has none.

    The field is a list of objects, or such a list as JSON text, which tables use if tools have different parameters.

    Raises:
        BadRecordError: the field is something else.
    """
    value = record.get("tools")
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            value = 0
    if not (value is None or (isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value))):
        raise BadRecordError("missing_field", "the field tools is not a list of tools")
    return value or []


_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}
"""{name of a role in ShareGPT: its usual name}."""


def _join(pieces: list[tuple[np.ndarray, bool]]) -> Document:
    """Return the document that joins pieces, each as (tokens, whether all of them have loss)."""
    tokens = np.concatenate([piece for piece, _ in pieces]).astype(np.int32)
    loss = np.repeat([has_loss for _, has_loss in pieces], [len(piece) for piece, _ in pieces])
    return Document(tokens, None if loss[1:].all() else loss)  # The first token is never predicted.
