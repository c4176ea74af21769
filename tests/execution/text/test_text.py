"""Tokenizers, text that is shown as it is made, and chats, against the libraries that they come from."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from meshwright.errors import MeshwrightError
from meshwright.execution.text.chat import apply_chat_template
from meshwright.execution.text.tokenizer import TokenStream, byte_tokenizer, read_tokenizer

TEXT = ["the quick brown fox jumps over the lazy dog", "naïve café — 東京 🙂", "def main():\n    return 0\n"]
TEMPLATE = (
    "{% if messages[0].role == 'system' and messages|length == 1 %}{{ raise_exception('no user') }}{% endif %}"
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE, as GPT-2 and Llama 3 have, with special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(TEXT, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer")
    made.save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_text_and_tokens_are_those_of_the_library(folder):
    ours, theirs = read_tokenizer(folder, vocab=300), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXT:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.encode(text)[0] == 0
        assert ours.decode(ours.encode(text)) == text
    assert ours.stop_tokens == (1,)


def test_generation_config_says_what_ends_a_text(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_tokenizer(tmp_path, vocab=300).stop_tokens == (7, 9)


@given(st.text(max_size=30))
def test_a_stream_gives_the_text_and_never_half_a_character(folder, text):
    for tokenizer in (read_tokenizer(folder, vocab=300), byte_tokenizer()):
        stream = TokenStream(tokenizer)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        pieces = [stream.add(token) for token in tokens]
        assert "".join(pieces) + stream.finish() == text
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_character_that_is_cut_short_is_shown_at_the_end():
    stream = TokenStream(byte_tokenizer())
    assert [stream.add(byte) for byte in "é🙂".encode()[:-1]] == ["", "é", "", "", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_chat_is_written_by_its_template(folder):
    tokenizer = read_tokenizer(folder, vocab=300)
    tokens = apply_chat_template(tokenizer, [{"role": "user", "content": "東京?"}])
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    wanted = "<s><|user|>\n東京?</s><|assistant|>\n"
    assert tokens == theirs.encode(wanted, add_special_tokens=False).ids
    with pytest.raises(MeshwrightError, match="no user"):
        apply_chat_template(tokenizer, [{"role": "system", "content": "x"}])


def test_templates_have_what_transformers_gives_them(folder, tmp_path):
    template = (
        "{% if tools is not none %}no{% endif %}{{ image_token }}{{ messages|tojson(separators=(',', ':')) }}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"chat_template": template, "image_token": {"content": "<i>"}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = read_tokenizer(tmp_path, vocab=300)
    tokens = apply_chat_template(tokenizer, [{"role": "user", "content": "é"}, {"role": "assistant", "content": "y"}])
    wanted = '<i>[{"role":"user","content":"é"},{"role":"assistant","content":"y"}]é'
    assert tokens == tokenizer.encode(wanted, add_special_tokens=False)


def test_a_template_gets_tools_and_may_be_another_one_for_them(tmp_path):
    plain = dataclasses.replace(byte_tokenizer(), config={"chat_template": "{{ tools[0].function.name }}"})
    tool = {"type": "function", "function": {"name": "weather"}}
    message = {"role": "user", "content": "x"}
    assert plain.decode(apply_chat_template(plain, [message], tools=[tool])) == "weather"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools|tojson }}"}]
    several = dataclasses.replace(byte_tokenizer(), config={"chat_template": named})
    assert several.decode(apply_chat_template(several, [message])) == "plain"
    assert json.loads(several.decode(apply_chat_template(several, [message], tools=[tool]))) == [tool]


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{% for x in range(10**9) %}x{% endfor %}", "{{ messages.append(1) }}"]
)
def test_a_template_cannot_leave_its_sandbox(folder, tmp_path, template):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(MeshwrightError, match="chat template"):
        apply_chat_template(read_tokenizer(tmp_path, vocab=300), [{"role": "user", "content": "x"}])


SENTENCEPIECE = Path(__file__).parents[2] / "references" / "sentencepiece"


@pytest.mark.parametrize("kind", ["bpe", "unigram", "plain", "composed", "defined"])
def test_a_sentencepiece_model_splits_texts_as_its_own_library_does(kind, tmp_path):
    """`tests/references/make_sentencepiece.py` keeps what the library makes of each text."""
    shutil.copy(SENTENCEPIECE / f"{kind}.model", tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "added_tokens_decoder": {"700": {"content": "<more>", "special": True}}})
    )
    tokenizer = read_tokenizer(tmp_path, vocab=701)
    for row in json.loads((SENTENCEPIECE / "texts.json").read_text())[kind]:
        assert tokenizer.encode(row["text"], add_special_tokens=False) == row["tokens"], row["text"]
        assert tokenizer.encode(row["text"]) == [1, *row["tokens"]]
        if 0 not in row["tokens"]:  # The library shows a mark for what is in no piece.
            assert tokenizer.decode(row["tokens"]) == row["decoded"]
    assert tokenizer.encode("a<more>", add_special_tokens=False)[-1] == 700
    assert (tokenizer.num_tokens, tokenizer.stop_tokens) == (701, (2,))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (b"\x12\x03\xc0\x01\x01", "spaces after words"),
        (b"\x12\x02\x18\x03", "of words or of characters"),
        (b"\x1a\x02\x28\x00", "keeps spaces"),
        (b"\x1a\x02\x18\x01", "defined by its user"),
    ],
)
def test_a_sentencepiece_model_that_no_tokenizer_is_like_is_refused(fields, reason, tmp_path):
    """Of a field that is given twice in a protocol buffer the last holds."""
    (tmp_path / "tokenizer.model").write_bytes((SENTENCEPIECE / "defined.model").read_bytes() + fields)
    with pytest.raises(MeshwrightError, match=reason):
        read_tokenizer(tmp_path, vocab=700)


TOKENIZERS = Path(__file__).parents[2] / "references" / "tokenizers"


@pytest.mark.parametrize("case", json.loads((TOKENIZERS / "cases.json").read_text()), ids=lambda case: case["name"])
def test_a_tokenizer_config_changes_tokens_as_transformers_has_it(case, tmp_path):
    """`tests/references/make_tokenizers.py` keeps what transformers' AutoTokenizer makes of each text."""
    shutil.copy(TOKENIZERS / f"{case['file']}.json", tmp_path / "tokenizer.json")
    for name in ("tokenizer_config", "config"):
        (tmp_path / f"{name}.json").write_text(json.dumps(case[name]))
    tokenizer = read_tokenizer(tmp_path, vocab=500)
    for row in case["texts"]:
        assert tokenizer.encode(row["text"], add_special_tokens=False) == row["tokens"], row["text"]
        assert tokenizer.decode(row["tokens"]) == row["decoded"]


def test_a_token_that_cannot_have_its_number_is_refused(folder, tmp_path):
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"450": {"content": "<more>"}}}')
    with pytest.raises(MeshwrightError, match="gives '<more>' the token 450; it is 3"):
        read_tokenizer(tmp_path, vocab=500)
