"""Compile grammars with llguidance. Run as a program, this module tries untrusted grammars in a separate process.

`python -m meshwright.serving.engine.grammars` reads a line with a vocabulary, then a line for each grammar, and answers
each line. A grammar can overflow the stack, or compile for minutes: then only that process is lost.
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
"""Limits of a grammar's parser.

A mask costs at most 100,000 lexer steps and 50,000 parser steps, about 10 ms by llguidance's documentation; the lexer
states of a grammar, 1 to 2 kB each, take at most 100 MB.
"""

WHITESPACE = r"[ \t\r\n]{1,32}"
"""Whitespace in JSON; bounded, because an uncertain model might generate it endlessly."""

MOST_BYTES = 2 << 30
"""Maximum memory of the process that tries grammars."""

STACK_BYTES = 1 << 20
"""Stack size for trying grammars: an eighth of a thread's, so accepted grammars never overflow a thread's stack."""

NUM_TRIED = 4
"""Number of tokens generated to try a grammar."""
NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
"""Names of the kinds of `Constraint`, for errors."""
MOST_REASON = 300
"""Maximum number of characters of llguidance's message in an error: it quotes the whole grammar."""


class _ByteTokens:
    """A vocabulary for llguidance with one token per byte. The end token is 255, which is no byte of UTF-8 text."""

    eos_token_id = 255
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(255)), b"<end>")
    special_token_ids = (255,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def read_vocabulary(tokenizer_json: str | None, stop_tokens: list[int]) -> LLTokenizer:
    """Return the vocabulary of a tokenizer, with each token as bytes, for llguidance.

    Args:
        tokenizer_json: the text of a tokenizer.json; None for a vocabulary with one token per byte.
        stop_tokens: the tokens that end a text.

    Raises:
        MeshwrightError: the tokenizer is neither byte-level nor SentencePiece.
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
    """Return a matcher at the beginning of a text, for a `Constraint`'s kind and source.

    Raises:
        MeshwrightError: the source is not a valid grammar, uses features that llguidance lacks, or exceeds `LIMITS`.
    """
    try:
        matcher = LLMatcher(vocabulary, _grammar(kind, source), log_level=0, limits=LIMITS)
        if reason := _first_error(matcher.deep_copy()):
            raise ValueError("no text matches it" if reason.startswith("NoExtension") else reason)
    except RecursionError:
        raise MeshwrightError(f"the {NAMES[kind]} is nested too deeply") from None
    except ValueError as error:
        lines = [line.strip() for line in str(error).removesuffix("<non-verbose/>").splitlines()]
        raise MeshwrightError(f"the {NAMES[kind]} cannot be used: {' '.join(lines)[:MOST_REASON].strip()}") from None
    return matcher


def _first_error(matcher: LLMatcher) -> str:
    """Generate `NUM_TRIED` tokens, each time the first allowed one. Return llguidance's error; empty if there is none.

    llguidance builds the lexer lazily, so some errors appear only during generation.
    """
    for _ in range(NUM_TRIED):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask or matcher.is_stopped():
            break
        matcher.consume_token((mask & -mask).bit_length() - 1)
    return matcher.get_error()


def _grammar(kind: str, source: str) -> str:
    """Return a grammar in llguidance's format."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(source)
    json.loads(source)  # llguidance's errors would name positions in its own copy of the text.
    return LLMatcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": WHITESPACE})


def _answer() -> None:
    """Answer each grammar on standard input with a line: the reason for refusing it, or null."""
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
    os._exit(0)  # At exit Python would wait for the thread, which may still read standard input.
