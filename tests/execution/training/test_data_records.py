"""Records of every format become the same documents; each kind of bad record has its rule, and is counted."""

import gzip
import itertools
import json
import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from data_files import write_arrow, write_lines, write_parquet, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.execution.data import records as records_module
from meshwright.execution.data import tokenizing
from meshwright.execution.data.encoding import find_encoder
from meshwright.execution.data.sources import find_files, find_source, parse_sources
from meshwright.execution.data.store import PreferencePairs, TokenStore, open_store
from meshwright.execution.data.template import parse_fields
from meshwright.execution.data.tokenizing import Tokenizing, tokenize
from meshwright.execution.text.chat import chat_examples
from meshwright.execution.text.tokenizer import read_tokenizer

RECORDS = [
    {"question": f"{n} + {n}?", "prompt": "Think.", "answer": str(n + n), "text": f"text {n} é"} for n in range(11)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return read_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), vocab=300)


def documents(path, directory, *, fields=None, tokenizer=None, rule="error", vocab=300, pairs=False, processes=1):
    """The documents of a source as text with what has no loss in brackets, and the counts of bad records."""
    source = find_files((str(path),))
    encoder = find_encoder(source, fields, tokenizer, vocab=vocab, pairs=pairs)
    info = tokenize(Tokenizing(source, encoder, rule, "its name"), directory, processes=processes)
    store = TokenStore(directory)
    shown = [marked(store.read(number), tokenizer) for number in range(info.documents)]
    return shown, info.bad


def marked(document, tokenizer):
    """A document as text; what has no loss stands in brackets."""
    loss = [True] * len(document.tokens) if document.loss is None else document.loss.tolist()
    pieces = []
    for has_loss, run in itertools.groupby(zip(document.tokens.tolist(), loss, strict=True), lambda both: both[1]):
        tokens = [token for token, _ in run]
        text = (
            bytes(tokens).decode()
            if tokenizer is None
            else tokenizer.codec.tokenizer.decode(tokens, skip_special_tokens=False)
        )
        pieces.append(text if has_loss else f"[{text}]")
    return "".join(pieces)


def test_every_format_gives_the_same_documents(tmp_path):
    found = [
        documents(write_lines(tmp_path / "a.jsonl", RECORDS), tmp_path / "1"),
        documents(write_parquet(tmp_path / "a.parquet", RECORDS), tmp_path / "2"),
        documents(write_arrow(tmp_path / "arrow", RECORDS), tmp_path / "3"),
    ]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    found.append(documents(tmp_path / "b.jsonl.gz", tmp_path / "4"))
    assert all(one == ([f"{record['text']}\n" for record in RECORDS], {}) for one in found)


def test_small_units_and_several_processes_give_the_same_store(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", RECORDS)
    whole, _ = documents(path, tmp_path / "whole")
    monkeypatch.setattr(records_module, "UNIT_BYTES", 100)
    monkeypatch.setattr(tokenizing, "UNIT_BYTES", 100)
    for processes in (1, 2):
        parts, _ = documents(path, tmp_path / f"{processes}", processes=processes)
        assert parts == whole
    infos = [TokenStore(tmp_path / name).info for name in "12"]
    assert infos[0] == infos[1]
    assert len(infos[0].shards) > 5
    for name, write in (("parquet", write_parquet), ("arrow", write_arrow)):
        assert documents(write(tmp_path / f"t.{name}", RECORDS), tmp_path / f"{name}.out")[0] == whole


def test_templates_join_fields_and_say_what_has_loss(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", RECORDS[1:2])
    shown = {
        fields: documents(path, tmp_path / str(number), fields=fields, tokenizer=tokenizer)[0][0]
        for number, fields in enumerate(
            (
                "[question+prompt],answer",
                '["Q: "+question+"\\nA: "],answer',
                "[question],[prompt],answer,<|eos|>",
                "<|bos|>,answer",
                "answer",
            )
        )
    }
    assert [*shown.values()] == [
        "[<s>1 + 1? Think.]2</s>",
        "[<s>Q: 1 + 1?\nA: ]2</s>",
        "[<s>1 + 1?Think.]2</s>",
        "<s>2</s>",
        "<s>2</s>",
    ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ("[question],", "a field is missing"),
        ("[question,answer", "brackets stand around a whole part"),
        ("a]b", "brackets stand around a whole part"),
        ("[a]", "every part is in brackets"),
        ('"open', "a quote is not closed"),
        ("a+<|eos|>", "are parts of their own"),
        ('"Q: "a', "+ or , is missing before a"),
    ],
)
def test_a_wrong_template_is_one_line(fields, reason):
    with pytest.raises(MeshwrightError, match=reason.replace("+", r"\+").replace("|", r"\|")) as found:
        parse_fields(fields)
    assert "[question+prompt],answer" in str(found.value)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello <|user|>"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao"},
]
LEARNED = (
    "[<s><|system|>Be brief.</s><|user|>Hi</s><|assistant|>]Hello <|user|></s>[<|user|>Bye</s><|assistant|>]Ciao</s>"
)


def test_chats_have_loss_on_the_assistants_turns(tmp_path, tokenizer):
    share_gpt = [
        {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in CHAT
    ]
    for name, record in (("a", {"messages": CHAT}), ("b", {"conversations": share_gpt})):
        path = write_lines(tmp_path / f"{name}.jsonl", [record])
        assert documents(path, tmp_path / name, tokenizer=tokenizer) == ([LEARNED], {})
    assert documents(write_arrow(tmp_path / "arrow", [{"messages": CHAT}]), tmp_path / "c", tokenizer=tokenizer)[0] == [
        LEARNED
    ]


TOOLS = [{"type": "function", "function": {"name": "clock"}}]


def test_chats_have_their_tools_calls_and_weights(tmp_path):
    """What a message has beside role and content is the template's to write; a weight of 0 takes a turn's loss."""
    template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "t", template=template), vocab=300)
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "Time"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "clock"}}]},
        {"role": "system", "content": "12:00"},
        {"role": "assistant", "content": "About noon", "weight": 0},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "12:00", "weight": 1},
    ]
    wanted = (
        "[[clock]<|user|>Time?</s><|assistant|>]!clock</s>[<|system|>12:00</s><|assistant|>About noon</s>"
        "<|user|>Sure?</s><|assistant|>]12:00</s>"
    )
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": chat, "tools": TOOLS}])
    # A table has null where a message has no such key, and tools as text.
    table = write_parquet(tmp_path / "a.parquet", [{"messages": [chat[0] | {"content": "Time?"}, *chat[1:]],
                                                    "tools": json.dumps(TOOLS)}])  # fmt: skip
    for name, path in (("lines", lines), ("table", table)):
        assert documents(path, tmp_path / name, tokenizer=tokenizer) == ([wanted], {})
    for wrong, reason in (
        ({"messages": chat, "tools": "{"}, "tools is not a list of tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1 of messages has no role and"),
        ({"messages": [{"role": "user", "content": "a", "weight": 2}]}, "has the weight 2; it is 0 or 1"),
    ):
        with pytest.raises(MeshwrightError, match=f"line 1: .*{reason}"):
            documents(write_lines(tmp_path / "b.jsonl", [wrong]), tmp_path / "none", tokenizer=tokenizer)


def test_a_template_that_marks_the_assistants_words_says_where_they_are(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "t", template=template), vocab=300)
    [(tokens, loss)] = chat_examples(tokenizer, CHAT[1:])
    learned = [token for token, has_loss in zip(tokens, loss, strict=True) if has_loss]
    assert tokenizer.codec.tokenizer.decode(learned, skip_special_tokens=False) == "Hello <|user|></s>Ciao</s>"
    assert [loss for loss in chat_examples(tokenizer, CHAT[1:], first=2)[0].loss if loss] == [True] * 5


THINKS = (
    "{% set of = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set of.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% set thought, said = '', m.content %}"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = m.content.split('</think>')[-1] %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > of.last and (loop.last or thought) %}"
    "<think>{{ thought }}</think>{% endif %}{{ said }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template of Qwen3's form: thoughts after the last question alone, and one before the last answer."""


def test_a_chat_whose_earlier_turns_are_written_otherwise_later_is_an_example_for_each(tmp_path):
    """Each turn is learned once, thoughts and all, after what a model has before it when it writes that turn."""
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "t", template=THINKS), vocab=300)
    chat = [
        *CHAT[1:2],
        {"role": "assistant", "content": "<think>a greeting</think>Hello"},
        *CHAT[3:],
        {"role": "user", "content": "Why?"},
    ]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat[:2]}, {"messages": chat[:4]}, {"messages": chat}])
    first = "[<|user|>Hi</s><|assistant|>]<think>a greeting</think>Hello</s>"
    second = "[<|user|>Hi</s><|assistant|>Hello</s><|user|>Bye</s><|assistant|>]<think></think>Ciao</s>"
    shown, bad = documents(path, tmp_path / "store", tokenizer=tokenizer)
    # A question that nobody answers teaches nothing.
    assert shown == [first, first, second, first, second]
    assert bad == {}


def test_turns_with_thoughts_after_one_question_are_one_example(tmp_path):
    """As those between calls of tools: nothing of them is left out, so that all have loss in one text."""
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "t", template=THINKS), vocab=300)
    turns = [{"role": "assistant", "content": f"<think>{n}</think>step {n}"} for n in (1, 2)]
    chat = [CHAT[1], turns[0], {"role": "system", "content": "result"}, turns[1]]
    [(tokens, loss)] = chat_examples(tokenizer, chat)
    learned = [token for token, has_loss in zip(tokens, loss, strict=True) if has_loss]
    said = tokenizer.codec.tokenizer.decode(learned, skip_special_tokens=False)
    assert said == "<think>1</think>step 1</s><think>2</think>step 2</s>"


def test_an_answer_of_a_pair_is_one_text(tmp_path):
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "t", template=THINKS), vocab=300)
    record = {"prompt": CHAT[1:2], "chosen": CHAT[2:], "rejected": [{"role": "assistant", "content": "No"}]}
    path = write_lines(tmp_path / "a.jsonl", [record])
    with pytest.raises(MeshwrightError, match=r"a\.jsonl, line 1: .*otherwise once more follow; an answer is one turn"):
        documents(path, tmp_path / "store", tokenizer=tokenizer, pairs=True)
    record["prompt"], record["chosen"] = CHAT[1:4], CHAT[4:]
    shown, _ = documents(write_lines(path, [record]), tmp_path / "store2", tokenizer=tokenizer, pairs=True)
    assert shown[0].endswith("<|user|>Bye</s><|assistant|>]<think></think>Ciao</s>")


def test_a_turn_that_does_not_follow_the_generation_prompt_is_one_line(tmp_path):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}"
    )
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "t", template=template), vocab=300)
    with pytest.raises(
        MeshwrightError, match=r"begins turn 3 of a chat otherwise than its generation prompt.*generation"
    ):
        chat_examples(tokenizer, CHAT)


@settings(max_examples=30)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=6))
def test_the_learned_part_of_any_chat_is_what_the_assistant_said(tokenizer, contents):
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    [(tokens, loss)] = chat_examples(tokenizer, messages)
    learned = [token for token, has_loss in zip(tokens, loss, strict=True) if has_loss]
    said = "".join(message["content"] + "</s>" for message in messages if message["role"] == "assistant")
    assert learned == tokenizer.encode(said, add_special_tokens=False)


def test_token_ids_stand_as_they_are(tmp_path):
    records = [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}, {"input_ids": [4, 5], "labels": None}]
    for name, path in (
        ("1", write_lines(tmp_path / "a.jsonl", records)),
        ("2", write_parquet(tmp_path / "a.parquet", records)),
    ):
        shown, _ = documents(path, tmp_path / name)
        assert shown == ["[\x01]\x02[\x03]", "\x04\x05"]
        assert TokenStore(tmp_path / name).loss_counts.tolist() == [1, 1]


PREFERENCES = [
    {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
    {"prompt": CHAT[:2], "chosen": [CHAT[2]], "rejected": [{"role": "assistant", "content": "No"}]},
    {"prompt": "Hi", "chosen": CHAT[:3], "rejected": [*CHAT[:2], {"role": "assistant", "content": "No"}]},
]


def test_preferences_are_pairs_with_loss_on_the_answers(tmp_path, tokenizer):
    start = "[<s><|system|>Be brief.</s><|user|>Hi</s><|assistant|>]"
    wanted = [("[<s>Hi]Hello</s>", "[<s>Hi]No</s>"), *[(f"{start}Hello <|user|></s>", f"{start}No</s>")] * 2]
    for number, record in enumerate(PREFERENCES):
        path = write_lines(tmp_path / f"{number}.jsonl", [record] * 2)
        documents(path, tmp_path / str(number), tokenizer=tokenizer, pairs=True)
        pairs = PreferencePairs(TokenStore(tmp_path / str(number)))
        assert len(pairs) == 2
        assert tuple(marked(document, tokenizer) for document in pairs[1]) == wanted[number]
    documents(write_lines(tmp_path / "a.jsonl", RECORDS), tmp_path / "text")
    with pytest.raises(MeshwrightError, match="holds documents, not pairs"):
        PreferencePairs(TokenStore(tmp_path / "text"))


BAD = {
    "broken": ('{"text": "cut', "this is not JSON"),
    "an array": ("[1]", "this is a list; each line holds an object"),
    "missing": ('{"other": 1}', "the field text is missing; there are other"),
    "no text": ('{"text": 7}', "the field text is 7, not text"),
    "null": ('{"text": null}', "the field text is null, not text"),
    "twice": ('{"text": "a", "text": "b"}', 'the key "text" is given twice in one object'),
    "surrogate": ('{"text": "\\ud800"}', "the text has half of a surrogate pair"),
}
COUNTED = {"broken": 3, "missing_field": 3, "invalid_utf8": 2, "empty": 2}


@pytest.mark.parametrize(("line", "reason"), BAD.values(), ids=[*BAD])
def test_a_bad_line_is_named_with_its_number(tmp_path, monkeypatch, line, reason):
    monkeypatch.setattr(records_module, "UNIT_BYTES", 1000)
    path = write_lines(tmp_path / "a.jsonl", [*RECORDS * 20, line, *RECORDS])
    with pytest.raises(MeshwrightError, match=f"a.jsonl, line 221: {reason}.*; --bad-data skip leaves"):
        documents(path, tmp_path / "out")


@pytest.mark.slow
def test_line_70_001_of_a_large_file_is_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [*RECORDS[:1] * 70_000, '{"text": ', *RECORDS])
    with pytest.raises(MeshwrightError, match=r"a\.jsonl, line 70,001: this is not JSON"):
        documents(path, tmp_path / "out")


def test_bad_records_are_left_out_and_counted(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [*RECORDS[:3], *(line for line, _ in BAD.values()), "", {"text": ""}])
    with path.open("ab") as file:
        file.write(b'{"text": "\xff"}\n')
    shown, bad = documents(path, tmp_path / "out", rule="skip")
    assert (len(shown), bad) == (3, COUNTED)


def test_what_holds_nothing_to_learn_from_is_left_out_under_any_rule(tmp_path):
    records = [
        {"input_ids": []},
        {"input_ids": [5]},
        {"input_ids": [1, 2], "labels": [1, -100]},
        {"input_ids": [1, 2], "labels": [1, 2]},
    ]
    shown, bad = documents(write_lines(tmp_path / "a.jsonl", records), tmp_path / "out")
    assert (len(shown), bad) == (1, {"empty": 2, "no_loss": 1})
    with pytest.raises(MeshwrightError, match="has no documents"):
        documents(write_lines(tmp_path / "b.jsonl", [{"text": ""}]), tmp_path / "none")


def test_token_ids_outside_the_vocabulary_are_named_or_counted(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"input_ids": ids} for ids in ([1, 2], [1, 300], [-1, 3])])
    with pytest.raises(MeshwrightError, match=r"a\.parquet, row 2: token id 300 is outside the vocabulary of 300"):
        documents(path, tmp_path / "1")
    assert documents(path, tmp_path / "2", rule="skip")[1] == {"over_vocab": 2}


def test_a_chat_that_the_template_refuses_is_named_or_counted(tmp_path):
    template = (
        "{{ raise_exception('roles must alternate') if messages[0].role == 'assistant' }}" + "{{ messages[0].content }}"
    )
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "t", template=template), vocab=300)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [CHAT[2]]}])
    with pytest.raises(MeshwrightError, match="line 1: the chat template does not take these messages: roles must"):
        documents(path, tmp_path / "1", tokenizer=tokenizer)


def test_a_source_without_a_record_says_what_its_first_line_is(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["[1]", "{"])
    with pytest.raises(MeshwrightError, match=r"has no record that can be read: .*a\.jsonl, line 1: this is a list"):
        find_encoder(find_files((str(path),)), None, None)


def test_a_pattern_stands_for_the_files_that_match_it(tmp_path):
    for name in ("b", "a"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name * 3}])
    write_lines(tmp_path / "c.txt", ["no record"])
    assert documents(tmp_path / "*.jsonl", tmp_path / "out")[0] == ["aaa\n", "bbb\n"]
    with pytest.raises(MeshwrightError, match="are of several formats"):
        find_source(str(tmp_path / "*.*"))


def test_a_bad_record_is_mended_or_skipped_in_the_same_directory(tmp_path, monkeypatch):
    path, out = write_lines(tmp_path / "a.jsonl", [*RECORDS, "{"]), tmp_path / "out"
    with pytest.raises(MeshwrightError, match="line 12: this is not JSON"):
        documents(path, out)
    assert [*out.iterdir()] == []
    write_lines(path, RECORDS)
    whole = documents(path, out)
    monkeypatch.setattr(records_module, "UNIT_BYTES", 200)
    monkeypatch.setattr(tokenizing, "UNIT_BYTES", 200)
    write_lines(path, [*RECORDS, "{"])
    with pytest.raises(MeshwrightError, match="line 12: this is not JSON"):
        documents(path, tmp_path / "parts")
    assert (tmp_path / "parts" / "000000.json").is_file()
    assert documents(path, tmp_path / "parts", rule="skip") == (whole[0], {"broken": 1})


def test_memory_does_not_grow_with_a_compressed_file(tmp_path):
    """It is one unit of work, because it cannot be read from its middle."""
    peaks = []
    for count in (500, 5000):
        path = tmp_path / f"{count}.jsonl.gz"
        path.write_bytes(gzip.compress(b'{"text": "%s"}\n' % (b"word " * 100) * count))
        tracemalloc.start()
        source = find_files((str(path),))
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        tokenize(
            Tokenizing(source, find_encoder(source, None, None), "error", "bytes"), tmp_path / str(count), processes=1
        )
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 500_000  # All of its tokens are 2.5 MB.


def test_files_that_change_while_they_are_tokenised_are_one_line(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", RECORDS)
    make = tokenizing.make_shard

    def changing(*args):
        path.write_text("")
        return make(*args)

    monkeypatch.setattr(tokenizing, "make_shard", changing)
    with pytest.raises(MeshwrightError, match=r"a\.jsonl was changed while it was tokenised; delete .*out"):
        documents(path, tmp_path / "out")


def test_a_large_file_of_text_is_one_text_in_pieces(tmp_path, monkeypatch):
    text = "".join(f"line {n}\n" for n in range(30)) + "x" * 300
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("second")
    monkeypatch.setattr(records_module, "UNIT_BYTES", 64)
    source = find_files((str(tmp_path),))
    info = tokenize(
        Tokenizing(source, find_encoder(source, None, None), "error", "bytes"), tmp_path / "out", processes=1
    )
    store = TokenStore(tmp_path / "out")
    shown = "".join(marked(store.read(number), None) for number in range(info.documents))
    assert shown == f"{text}\nsecond\n"
    assert info.documents > 3


def test_a_killed_store_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(records_module, "UNIT_BYTES", 200)
    monkeypatch.setattr(tokenizing, "UNIT_BYTES", 200)
    path, out = write_lines(tmp_path / "a.jsonl", RECORDS), tmp_path / "out"
    source = find_files((str(path),))
    encoder = find_encoder(source, None, None)
    whole = tokenize(Tokenizing(source, encoder, "error", "bytes"), tmp_path / "whole", processes=1)
    made, make = [], tokenizing.make_shard

    def dying(unit, *rest):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(unit.number)
        return make(unit, *rest)

    monkeypatch.setattr(tokenizing, "make_shard", dying)
    with pytest.raises(KeyboardInterrupt):
        tokenize(Tokenizing(source, encoder, "error", "bytes"), out, processes=1)
    with pytest.raises(MeshwrightError, match="holds a part of a store; the same"):
        find_source(str(out))
    other = find_encoder(source, "answer", None)
    with pytest.raises(MeshwrightError, match="a part of another store"):
        tokenize(Tokenizing(source, other, "error", "bytes"), out, processes=1)
    made.append(-1)
    assert tokenize(Tokenizing(source, encoder, "error", "bytes"), out, processes=1) == whole
    assert made[:2] == [0, 1]
    assert len(made) == len(set(made)) == len(whole.shards) + 1
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in (tmp_path / "whole").iterdir())
    seen = []
    assert tokenize(Tokenizing(source, encoder, "error", "bytes"), out, processes=1, on_bytes=seen.append) == whole
    assert sum(seen) == path.stat().st_size
    with pytest.raises(MeshwrightError, match="holds a store of other tokens"):
        tokenize(Tokenizing(source, other, "error", "bytes"), out, processes=1)


def test_a_damaged_store_is_one_line(tmp_path):
    documents(write_lines(tmp_path / "a.jsonl", RECORDS), tmp_path / "out")
    tokens = tmp_path / "out" / "000000.tokens.npy"
    data = tokens.read_bytes()
    tokens.write_bytes(data[:-20])
    with pytest.raises(MeshwrightError, match=r"000000.tokens.npy is damaged"):
        TokenStore(tmp_path / "out").read(0)
    np.save(tokens, np.zeros(5, np.uint8))
    with pytest.raises(MeshwrightError, match=r"has 5 tokens, and store.json"):
        TokenStore(tmp_path / "out").read(0)
    for other in (b"", data.replace(b"'fortran", b"'(ortran")):
        tokens.write_bytes(other)
        with pytest.raises(MeshwrightError, match=r"000000.tokens.npy is damaged"):
            TokenStore(tmp_path / "out").read(0)
    info = tmp_path / "out" / "store.json"
    info.write_text(info.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(MeshwrightError, match="has format 2, and this version reads 1"):
        TokenStore(tmp_path / "out")


@pytest.mark.parametrize("masks", [False, True])
def test_a_flipped_bit_of_a_store_is_found(tmp_path, masks, monkeypatch):
    """Runs trained on changed tokens, or ended in a traceback, as `benchmarks/faults.py` found."""
    monkeypatch.setattr("meshwright.execution.data.records.UNIT_BYTES", 64)
    fields = "[text],text" if masks else "text"
    records = [{"text": f"{number} is a number"} for number in range(9)]
    documents(write_lines(tmp_path / "a.jsonl", records), tmp_path / "out", fields=fields)
    files = sorted((tmp_path / "out").glob("*.npy"))
    open_store(tmp_path / "out")
    rng = random.Random(0)
    for path in files:
        data = path.read_bytes()
        for _ in range(8):
            flipped = bytearray(data)
            flipped[rng.randrange(128, len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            with pytest.raises(MeshwrightError, match=r"is damaged: |is not that of its store.json"):
                open_store(tmp_path / "out")
        path.write_bytes(data)
    assert any("loss" in path.name for path in files) is masks
    open_store(tmp_path / "out")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("a=x",), "the weight of a is 'x'; it is a number above 0"),
        (("a=0",), "the weight of a is '0'"),
        (("a=1", "b"), "b has no weight, and other sources have; b=1 gives it one"),
        (("a", "a"), "a source is given twice"),
    ],
)
def test_wrong_mixtures_are_one_line(texts, message):
    with pytest.raises(MeshwrightError, match=message):
        parse_sources(texts)


def test_what_is_at_a_path_is_said_where_it_cannot_be_read(tmp_path):
    with pytest.raises(MeshwrightError, match="there is no file"):
        find_source(str(tmp_path / "none.jsonl"))
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(MeshwrightError, match=r"a\.csv is a table of text; --data takes"):
        find_source(str(tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_text("none")
    with pytest.raises(MeshwrightError, match="is no Parquet file"):
        find_files((str(tmp_path / "a.parquet"),)).first_record()
    splits = tmp_path / "splits"
    splits.mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(MeshwrightError, match=r"holds the splits train, test; name one of them, as .*splits/train"):
        find_source(str(splits))
    write_lines(splits / "a.jsonl", RECORDS)


def test_no_record_that_says_what_is_text_is_one_line(tmp_path):
    for name, records in (("a", [{"a": "x", "b": "y"}]), ("b", [{"messages": CHAT}])):
        write_lines(tmp_path / f"{name}.jsonl", records)
    first, second = (find_files((str(tmp_path / name),)) for name in ("a.jsonl", "b.jsonl"))
    with pytest.raises(MeshwrightError, match=r"a\.jsonl have the fields a, b; --fields says"):
        find_encoder(first, None, None)
    with pytest.raises(MeshwrightError, match=r"messages of .*b\.jsonl is a chat, and bytes have no chat template"):
        find_encoder(second, None, None)
    with pytest.raises(MeshwrightError, match="are of several formats"):
        find_files((str(write_parquet(tmp_path / "c.parquet", RECORDS)), str(tmp_path / "a.jsonl")))


def test_files_become_tokens_without_jax():
    program = "import sys, meshwright.execution.data; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
