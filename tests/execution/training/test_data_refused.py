"""Data that would be read otherwise than it is meant is refused in one line, with what is wrong."""

import fcntl
import json
import os

import pytest
from data_files import write_lines, write_tokenizer

from meshwright.errors import MeshwrightError
from meshwright.execution.data.encoding import find_encoder
from meshwright.execution.data.sources import find_files, find_source
from meshwright.execution.data.tokenizing import Tokenizing, tokenize
from meshwright.execution.text.tokenizer import read_tokenizer

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return read_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), vocab=300)


@pytest.mark.parametrize(
    ("record", "options", "reason"),
    [
        ({"input_ids": [1, 2, 3], "labels": [1, 7, 3]}, {}, "labels has 7 where input_ids has 2"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, {}, "attention_mask has a 0"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, {}, "attention_mask has 1 tokens, input_ids 2"),
        ({"messages": "hi"}, {}, "the field messages of .* is 'hi'; a chat is a list of messages"),
        ({"messages": [{"role": "wizard", "content": "x"}, ANSWER]}, {}, "the role 'wizard', which the chat template"),
        ({"text": "a"}, {"fields": '"hello"'}, "it names no field"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, {"pairs": True}, "chosen is rejected too"),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, {"pairs": True}, "chosen is rejected too"),
        ({"text": "a"}, {"vocab": 104, "is_bytes": True}, "vocab 104 is too small for text as bytes"),
    ],
)
def test_a_record_that_says_two_things_is_refused(record, options, reason, tokenizer, tmp_path):
    options = dict(options)
    is_bytes, vocab = options.pop("is_bytes", False), options.pop("vocab", 300)
    source = find_files((str(write_lines(tmp_path / "a.jsonl", [record])),))
    fields, of = options.pop("fields", None), None if is_bytes else tokenizer

    def read():
        encoder = find_encoder(source, fields, of, vocab=vocab, **options)
        tokenize(Tokenizing(source, encoder, "error", "name"), tmp_path / "out", processes=1)

    with pytest.raises(MeshwrightError, match=reason) as error:
        read()
    assert "\n" not in str(error.value)


def test_a_mask_of_ones_and_labels_of_the_tokens_are_taken_by_a_small_vocabulary(tmp_path):
    record = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]}
    source = find_files((str(write_lines(tmp_path / "a.jsonl", [record])),))
    encoder = find_encoder(source, None, None, vocab=104)
    assert tokenize(Tokenizing(source, encoder, "error", "name"), tmp_path / "out", processes=1).tokens == 3


def test_what_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, reason in (
        ("/dev/null", "is not a regular file, but a device"),
        (tmp_path / "pipe", "is not a regular file"),
        (tmp_path / "link", "is a link to .*nowhere, which is not there"),
    ):
        with pytest.raises(MeshwrightError, match=reason):
            find_source(str(path))


def test_a_file_is_read_once_and_hidden_ones_are_not(tmp_path):
    folder = tmp_path / "data"
    (folder / ".cache").mkdir(parents=True)
    for name in ("a.jsonl", ".b.jsonl", ".cache/c.jsonl"):
        write_lines(folder / name, [{"text": "x"}])
    assert [path.name for path in find_files((str(folder),)).files] == ["a.jsonl"]
    with pytest.raises(MeshwrightError, match=r"a\.jsonl is given twice"):
        find_files((str(folder), str(folder / "*.jsonl")))


def test_a_directory_that_another_process_writes_is_left_alone(tmp_path):
    source = find_files((str(write_lines(tmp_path / "a.jsonl", [{"text": "x"}])),))
    what = Tokenizing(source, find_encoder(source, None, None), "error", "bytes")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "unfinished.json").write_text(what.signature())
    with (tmp_path / "out" / "unfinished.json").open() as held:
        assert json.loads(held.read())
    other = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(MeshwrightError, match="another process tokenises into"):
        tokenize(what, tmp_path / "out", processes=1)
    os.close(other)
    assert tokenize(what, tmp_path / "out", processes=1).documents == 1
