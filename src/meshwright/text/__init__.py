"""Text and tokens: tokenizers of Hugging Face directories, chat templates, incremental decoding."""

from meshwright.text.byte_files import byte_tokenizer_files
from meshwright.text.chat import apply_chat_template, chat_examples, chat_template
from meshwright.text.lines import json_lines, read_text
from meshwright.text.tokenizer import (
    FILES,
    REPLACEMENT,
    Tokenizer,
    TokenStream,
    byte_tokenizer,
    byte_tokenizer_for,
    read_json,
    read_tokenizer,
)

__all__ = [
    "FILES",
    "REPLACEMENT",
    "TokenStream",
    "Tokenizer",
    "apply_chat_template",
    "byte_tokenizer",
    "byte_tokenizer_files",
    "byte_tokenizer_for",
    "chat_examples",
    "chat_template",
    "json_lines",
    "read_json",
    "read_text",
    "read_tokenizer",
]
