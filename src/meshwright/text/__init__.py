"""Text and tokens: tokenizers of Hugging Face directories, chat templates, and text that is shown as it is made."""

from meshwright.text.byte_files import byte_tokenizer_files
from meshwright.text.chat import apply_chat_template
from meshwright.text.tokenizer import FILES, Tokenizer, TokenStream, byte_tokenizer, read_tokenizer

__all__ = [
    "FILES",
    "TokenStream",
    "Tokenizer",
    "apply_chat_template",
    "byte_tokenizer",
    "byte_tokenizer_files",
    "read_tokenizer",
]
