"""Constrained decoding: random texts under masks match, and grammars that would hang or crash a server are refused."""

import json
import random
import re
import threading
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.errors import MeshwrightError
from meshwright.execution.text import tokenizer as text_tokenizer
from meshwright.execution.text.tokenizer import byte_tokenizer, read_tokenizer
from meshwright.serving.engine import constraints
from meshwright.serving.engine.constraints import MOST_SOURCE, ConstraintCompiler
from meshwright.serving.engine.request import Constraint

GOLDENS = Path(__file__).parents[1] / "references"
VOCAB = 900
"""Of the model: more than any of the tokenizers has."""


def byte_level(folder):
    """A tokenizer.json of merged bytes, of which none are digits."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [
        '{"name": "Ada", "tags": ["red", "green"], "size": -1.5}',
        "the year of the red cat",
        "naïve über 中文",
    ] * 3
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False),
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return read_tokenizer(folder, vocab=VOCAB)


def sentencepiece(folder):
    (folder / "tokenizer.model").write_bytes((GOLDENS / "sentencepiece" / "bpe.model").read_bytes())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return read_tokenizer(folder, vocab=VOCAB)


@pytest.fixture(scope="module", params=["bytes", "byte-level", "SentencePiece"])
def compiler(request, tmp_path_factory):
    """A compiler of constraints, and the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make = {"bytes": lambda _: byte_tokenizer(), "byte-level": byte_level, "SentencePiece": sentencepiece}
    tokenizer = make[request.param](folder)
    compiler = ConstraintCompiler(tokenizer)
    yield compiler, tokenizer
    compiler.close()


@pytest.fixture(scope="module")
def of_bytes():
    compiler = ConstraintCompiler(byte_tokenizer(), seconds=1.0)
    yield compiler
    compiler.close()


def tokens_of(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(compiler, tokenizer, constraint, rng, most=400):
    """A random text that ends by a stop token, or where nothing can follow; None where it is longer than `most`."""
    matcher, tokens = compiler.matcher(constraint), []
    mask = np.full(-(-VOCAB // 32), 0xFFFFFFFF, np.uint32)
    for _ in range(most):
        if not matcher.mask(mask):
            assert matcher.is_finished or not tokenizer.stop_tokens
            return tokenizer.decode(tokens)
        allowed = tokens_of(mask)
        assert max(allowed) < tokenizer.num_tokens
        stops = set(allowed) & set(tokenizer.stop_tokens)
        assert bool(stops) == (matcher.may_stop and bool(tokenizer.stop_tokens))
        # Texts that may end mostly do, so that walks end.
        if matcher.may_stop and rng.random() < 0.7:
            return tokenizer.decode(tokens)
        token = rng.choice([t for t in allowed if t not in stops] or [None])
        if token is None:
            return tokenizer.decode(tokens)
        matcher.accept(token)
        tokens.append(token)
    return None


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "number", "minimum": -5, "maximum": 99.5},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "über"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": "中文"}]},
        "day": {"type": "string", "format": "date"},
    },
    "required": ["name", "tags", "next"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [PERSON, {"type": "array", "items": {"type": "integer", "multipleOf": 7}, "maxItems": 4}, {"enum": [1, "a"]}],
)
def test_random_texts_under_masks_match_the_schema(compiler, schema):
    constraint, rng, texts = Constraint("json_schema", json.dumps(schema)), random.Random(0), []
    for _ in range(30):
        text = walk(*compiler, constraint, rng)
        if text is not None:
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
            texts.append(text)
    assert len(set(texts)) >= (2 if "enum" in schema else 10)


@pytest.mark.parametrize(
    "regex", [r"[a-z]+@[a-z]{2,5}\.(org|de)", r"(a|bc)*d?", "[一-鿿é]{1,3}x", "yes|no", r"-?[0-9]+(\.[0-9]{2})?"]
)
def test_random_texts_under_masks_match_the_regex(compiler, regex):
    constraint, rng = Constraint("regex", regex), random.Random(1)
    texts = [text for _ in range(20) if (text := walk(*compiler, constraint, rng)) is not None]
    assert len(texts) >= 10
    assert [text for text in texts if not re.fullmatch(regex, text)] == []


def test_a_lark_grammar_is_followed(compiler):
    constraint = Constraint("lark", 'start: "(" start ")" | /[0-9]/')
    for seed in range(10):
        text = walk(*compiler, constraint, random.Random(seed))
        assert text is None or re.fullmatch(r"(\()*[0-9](\))*", text)
        assert text is None or text.count("(") == text.count(")")


def test_stop_tokens_of_a_request_come_once_the_text_matches(of_bytes):
    """A newline would match the grammar in the middle of a text; as a stop token it can only end it."""
    matcher = of_bytes.matcher(Constraint("regex", r"a\n?b+"), stop_tokens=(10, 700))
    mask = np.zeros(-(-VOCAB // 32), np.uint32)
    assert matcher.mask(mask)
    matcher.accept(ord("a"))
    assert matcher.mask(mask)
    assert (tokens_of(mask), matcher.may_stop) == ([ord("b")], False)
    matcher.accept(ord("b"))
    assert matcher.mask(mask)
    assert (tokens_of(mask), matcher.may_stop, matcher.is_finished) == ([10, ord("b"), 700], True, False)
    assert matcher.mask(mask, stops=False)
    assert tokens_of(mask) == [ord("b")]


def test_a_text_that_nothing_continues_is_finished(of_bytes):
    matcher = of_bytes.matcher(Constraint("regex", "no"))
    mask = np.zeros(8, np.uint32)
    for token in b"no":
        assert matcher.mask(mask)
        assert not matcher.is_finished
        matcher.accept(token)
    assert matcher.is_finished
    assert not matcher.mask(mask)


def test_drafts_are_counted_and_taken_back(of_bytes):
    matcher = of_bytes.matcher(Constraint("regex", "abc*"))
    assert matcher.num_accepted(list(b"abx")) == 2
    matcher.accept(ord("a"))
    matcher.accept(ord("b"))
    matcher.rollback(1)
    mask = np.zeros(8, np.uint32)
    matcher.mask(mask)
    assert tokens_of(mask) == [ord("b")]


def test_texts_of_one_constraint_do_not_meet(of_bytes):
    first, second = (of_bytes.matcher(Constraint("regex", "ab|cd")) for _ in range(2))
    first.accept(ord("a"))
    mask = np.zeros(8, np.uint32)
    second.mask(mask)
    assert tokens_of(mask) == [ord("a"), ord("c")]


def test_a_token_that_may_not_come_next_is_refused(of_bytes):
    matcher = of_bytes.matcher(Constraint("regex", "ab"))
    with pytest.raises(MeshwrightError, match="the constraint refuses token 98"):
        matcher.accept(98)


def nested_rules(count):
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(count)) + f'\nr{count}: "a"'


REFUSED = {
    "no JSON": ("json_schema", "{", "the JSON schema cannot be used: Expecting property name.*line 1"),
    "no schema": ("json_schema", "[]", "Expecting object schema"),
    "unknown type": ("json_schema", '{"type": "text"}', "Invalid type: text"),
    "not supported": ("json_schema", '{"type": "object", "unevaluatedProperties": false}', "unevaluatedProperties"),
    "of another file": ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
    "nothing matches": ("json_schema", '{"type": "string", "allOf": [{"type": "integer"}]}', "Unsatisfiable"),
    "only itself": ("json_schema", '{"$ref": "#"}', "no text matches"),
    "nested JSON": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "nested too deeply|recursion limit"),
    "bad regex": ("regex", "a(", "the regular expression cannot be used: .*unclosed group"),
    "look-ahead": ("regex", "(?=a)", "look-around"),
    "nested regex": ("regex", "(" * 20000 + ")" * 20000, "the regular expression cannot be used"),
    "repeated": ("regex", "(a{1000}){1000}", "too many expressions|too complex: it takes over 1 s"),
    "bad Lark": ("lark", "start: b", 'the Lark grammar cannot be used: .*unknown name: "b"'),
    "too long": ("regex", "a" * (MOST_SOURCE + 1), "has 65,537 characters; at most 65,536"),
    # Of these llguidance's limits take no notice: they take too long, too much memory or stack.
    "slow": ("json_schema", '{"type": "integer", "multipleOf": 99999989}', "too complex: it takes"),
    "slow patterns": (
        "json_schema",
        json.dumps({"type": "string", "allOf": [{"pattern": f"{i}.*b.*c"} for i in range(500)]}),
        "too complex: it takes over 1 s",
    ),
    "crash": ("lark", nested_rules(3000), "the Lark grammar is too complex: it takes too much memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_constraint_that_cannot_be_used_is_refused(of_bytes, name):
    kind, source, reason = REFUSED[name]
    for _ in range(2):  # the second time from what is kept
        with pytest.raises(MeshwrightError, match=reason) as refused:
            of_bytes.matcher(Constraint(kind, source))
        assert len(str(refused.value)) < 400
        assert "\n" not in str(refused.value)
    assert of_bytes.matcher(Constraint("regex", "after it")).num_accepted(list(b"after")) == 5


def test_a_tokenizer_of_whole_words_cannot_constrain(tmp_path):
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path, vocab=2)
    assert isinstance(tokenizer, text_tokenizer.Tokenizer)
    with pytest.raises(MeshwrightError, match="only those of byte-level and SentencePiece"):
        ConstraintCompiler(tokenizer).matcher(Constraint("regex", "a"))


def test_a_text_that_the_vocabulary_cannot_continue_is_an_error(tmp_path):
    """Unigram pieces without bytes have no snowman."""
    (tmp_path / "tokenizer.model").write_bytes((GOLDENS / "sentencepiece" / "unigram.model").read_bytes())
    tokenizer = read_tokenizer(tmp_path, vocab=VOCAB)
    assert tokenizer is not None
    compiler = ConstraintCompiler(replace(tokenizer, stop_tokens=(2,)))
    with pytest.raises(MeshwrightError, match="the regular expression cannot be used"):
        compiler.matcher(Constraint("regex", "☃+"))
    matcher = compiler.matcher(Constraint("regex", "[ab]{9}☃+"))
    mask = np.zeros(-(-VOCAB // 32), np.uint32)
    for _ in range(9):
        assert matcher.mask(mask)
        matcher.accept(tokens_of(mask)[0])
    with pytest.raises(MeshwrightError, match="no token of the vocabulary continues it"):
        matcher.mask(mask)
    compiler.close()


def test_constraints_of_one_owner_leave_a_process_to_others(monkeypatch):
    gate, tried = threading.Event(), []

    def exchange(process, line, seconds):
        tried.append(line[1])
        if line[1].startswith("slow"):
            gate.wait(20)

    monkeypatch.setattr(constraints._Process, "begin", lambda process: None)
    monkeypatch.setattr(constraints._Process, "exchange", exchange)
    compiler = ConstraintCompiler(byte_tokenizer(), processes=2)
    sources = ["slow1", "slow2", "slow3", "slow1"]
    waiting = [
        threading.Thread(target=compiler.matcher, args=(Constraint("regex", source), (), "many")) for source in sources
    ]
    for thread in waiting:
        thread.start()
    compiler.matcher(Constraint("regex", "b"), (), "other")
    assert all(thread.is_alive() for thread in waiting)
    gate.set()
    for thread in waiting:
        thread.join(20)
    compiler.matcher(Constraint("regex", "slow1"))
    # Each was tried once, however many had asked.
    assert sorted(tried) == ["b", "slow1", "slow2", "slow3"]


def test_a_compiler_without_a_reason_is_told_so():
    assert constraints._first_line("<non-verbose/>") == "llguidance gives no reason"


def test_stop_tokens_behind_the_tokenizers_vocabulary_end_a_text():
    compiler = ConstraintCompiler(byte_tokenizer())
    matcher = compiler.matcher(Constraint("regex", "a*"), (290,))
    mask = np.zeros(10, np.uint32)
    assert matcher.mask(mask)
    compiler.close()
    assert mask[290 // 32] == 1 << 290 % 32
