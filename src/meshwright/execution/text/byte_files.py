"""Write the byte tokenizer, whose token n is the UTF-8 byte n, as files that Hugging Face's libraries load."""

from __future__ import annotations

import json

_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
"""Bytes that byte-level tokenizers write as the Latin-1 character of that number; others become characters from 256."""


def byte_tokenizer_files(max_length: int | None) -> dict[str, bytes]:
    """Return the contents of `tokenizer.json` and `tokenizer_config.json`, by name.

    max_length: the model's maximum number of tokens of a text; None for no limit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # Of [train] and [serve].

    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    characters = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    made = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if max_length is not None:
        config["model_max_length"] = max_length
    return {
        "tokenizer.json": made.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }
