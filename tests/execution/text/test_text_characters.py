"""The characters that one token stands for at most: no text has fewer tokens than they say."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from meshwright.execution.text.characters import most_characters
from meshwright.execution.text.tokenizer import byte_tokenizer, read_tokenizer


def byte_level(**parts):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the cat and the hat   " * 20], trainer)
    for name, part in parts.items():
        setattr(made, name, part)
    return json.loads(made.to_str())


def longest(data):
    return max(map(len, data["model"]["vocab"]))


def test_it_is_the_longest_token():
    data = byte_level()
    assert most_characters(data) == longest(data) > 3
    assert most_characters(byte_level(normalizer=normalizers.NFC())) == 4 * longest(data)
    assert most_characters(byte_level(normalizer=normalizers.Replace("a", "bb"))) == longest(data)
    assert byte_tokenizer().most_characters == 1


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace("aa", "b")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
    ],
)
def test_what_leaves_out_characters_has_no_bound(parts):
    assert most_characters(byte_level(**parts)) is None


def test_unknown_characters_may_be_one_token():
    made = Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True))
    assert most_characters(json.loads(made.to_str())) is None
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    assert most_characters(json.loads(words.to_str())) is None


@pytest.mark.parametrize("text", ["the cat " * 50, "the   hat" * 9, "\u00e9\u6771" * 30, " " * 400])
def test_no_text_has_fewer_tokens(tmp_path: Path, text):
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level()))
    tokenizer = read_tokenizer(tmp_path, vocab=300)
    assert tokenizer is not None
    assert tokenizer.most_characters is not None
    assert len(tokenizer.encode(text)) * tokenizer.most_characters >= len(text)
