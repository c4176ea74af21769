"""Grammars of constrained texts, compiled by llguidance; as a program, a process that tries grammars of strangers.

`python -m meshwright.serving.engine.grammars` reads a line with a vocabulary, then a line for each grammar, and answers
each. A grammar can recurse until the stack overflows, or compile for minutes: then only that process is lost.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from meshwright.errors import MeshwrightError

LIMITS = LLParserLimits(
    step_lexer_fuel=100_000, max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False
)
"""A mask costs at most 100,000 steps of the lexer and 50,000 of the parser, about 10 ms by llguidance's documentation;
the states of a grammar's lexer, of 1 to 2 kB each, at most 100 MB."""

WHITESPACE = r"[ \t\r\n]{1,32}"
"""Whitespace in JSON; bounded, since an unsure model would generate it endlessly."""

MOST_BYTES = 2 << 30
"""The memory of the process that tries grammars."""

STACK_BYTES = 1 << 20
"""The stack that grammars are tried on: an eighth of a thread's, so that no grammar that passes overflows one."""

NUM_TRIED = 4
"""The tokens of a text that a grammar is tried with."""
NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
MOST_REASON = 300
"""Most characters of a reason in errors: llguidance quotes the whole grammar."""


class _ByteTokens:
    """A token for each byte, for llguidance. It needs a token that ends texts: UTF-8 has no byte 255."""

    eos_token_id = 255
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(255)), b"<end>")
    special_token_ids = (255,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def read_vocabulary(tokenizer_json: str | None, stop_tokens: list[int]) -> LLTokenizer:
    """The tokens as bytes, from the text of a tokenizer.json; None for a token for each byte.

    Raises:
        MeshwrightError: a tokenizer whose tokens are not bytes of a text.
    """
    if tokenizer_json is None:
        return LLTokenizer(TokenizerWrapper(_ByteTokens()))
    try:
        return LLTokenizer(tokenizer_json, eos_token=stop_tokens or None)
    except ValueError as error:
        raise MeshwrightError(
            f"texts of this tokenizer cannot be constrained, only those of byte-level and SentencePiece ones: {error}"
        ) from None


def compile_grammar(vocabulary: LLTokenizer, kind: str, source: str) -> LLMatcher:
    """Return the matcher of a new text, for a `Constraint`'s kind and source.

    Raises:
        MeshwrightError: a source that is no such grammar, uses what llguidance does not support, or exceeds `LIMITS`.
    """
    try:
        matcher = LLMatcher(vocabulary, _grammar(kind, source), log_level=0, limits=LIMITS)
        if reason := _error_after(matcher.deep_copy(), NUM_TRIED):
            raise ValueError("no text matches it" if reason.startswith("NoExtension") else reason)
    except RecursionError:
        raise MeshwrightError(f"the {NAMES[kind]} is nested too deeply") from None
    except ValueError as error:
        lines = [line.strip() for line in str(error).removesuffix("<non-verbose/>").splitlines()]
        raise MeshwrightError(f"the {NAMES[kind]} cannot be used: {' '.join(lines)[:MOST_REASON].strip()}") from None
    return matcher


def _error_after(matcher: LLMatcher, count: int) -> str:
    """Why a grammar fails within some tokens, the first allowed each: its lexer is built as a text needs it."""
    for _ in range(count):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask or matcher.is_stopped():
            break
        matcher.consume_token((mask & -mask).bit_length() - 1)
    return matcher.get_error()


def _grammar(kind: str, source: str) -> str:
    """A grammar in llguidance's form."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(source)
    json.loads(source)  # llguidance's errors would name places in a text of its own.
    return LLMatcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": WHITESPACE})


def _answer() -> None:
    """Answer the grammars of standard input: a line with the reason against each, or null."""
    vocabulary = read_vocabulary(*json.loads(sys.stdin.readline()))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    print("null", flush=True)
    for line in sys.stdin:
        try:
            compile_grammar(vocabulary, *json.loads(line))
            print("null", flush=True)
        except MeshwrightError as error:
            print(json.dumps(str(error)), flush=True)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    parent = os.getppid()
    thread = threading.Thread(target=_answer, daemon=True)
    thread.start()
    # A grammar that compiles for hours must not outlive the server.
    while thread.is_alive() and os.getppid() == parent:
        thread.join(timeout=1.0)
    os._exit(0)  # The thread may still wait for standard input, which Python could not close.
