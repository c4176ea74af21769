"""Scores are what follows from the logits of one device by hand, on every mesh; every token is counted once."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from byte_models import byte_model

import meshwright as mw
from meshwright.cli.main import main
from meshwright.execution.models.inference.scoring import Score, total, windows
from meshwright.execution.models.inference.tasks import Question, answer, read_task

GOLDENS = Path(__file__).parents[2] / "references"
MESHES = ("1,8,1,1", "2,2,2,1", "1,1,4,2")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A directory of a model on bytes, of which each is a token."""
    folder = tmp_path_factory.mktemp("scored") / "out"
    byte_model(seq_len=32).save(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", "1,1,4,2"),
        *(
            pytest.param(family, mesh, marks=pytest.mark.matrix)
            for family in ("llama", "gemma2", "gpt2", "mixtral")
            for mesh in MESHES
            if (family, mesh) != ("llama", "1,1,4,2")
        ),
    ],
)
def test_losses_of_texts_of_all_lengths_are_those_of_one_device_by_hand(family, mesh):
    golden = np.load(GOLDENS / family / "golden.npz")
    rows = [row[:length] for row, length in zip(golden["tokens"], golden["lengths"], strict=True) if length > 1]
    found = mw.load(GOLDENS / family, on="cpu:8", mesh=mesh).losses(rows)
    one = mw.load(GOLDENS / family, on="cpu:1")
    for row, losses in zip(rows, found, strict=True):
        logs = np.asarray(jax.nn.log_softmax(one.logits(row[None])[0]))
        np.testing.assert_allclose(losses, -logs[np.arange(len(row) - 1), row[1:]], atol=2e-5)


@pytest.mark.parametrize("count", [2, 7, 8, 9, 30])
@pytest.mark.parametrize(("seq_len", "stride"), [(8, 8), (8, 3), (8, 1), (1, 1), (64, 64)])
def test_windows_predict_every_token_once_from_as_many_as_the_stride_leaves(count, seq_len, stride):
    """count: of tokens after the first."""
    predicted, before = [], []
    for start, end, fresh in windows(count, seq_len, stride):
        assert 1 <= end - start <= seq_len
        predicted += range(end - fresh + 1, end + 1)
        before += range(end - fresh + 1 - start, end + 1 - start)
    assert predicted == [*range(1, count + 1)]
    assert all(there >= min(token, seq_len - stride + 1) for token, there in zip(predicted, before, strict=True))


def test_scores_of_texts_add_up(exported):
    text = (exported / "config.json").read_text()[:200] + "é😀"
    model = mw.load(exported, on="cpu:8", mesh="1,4,2,1")
    long, short = model.score([text, "ab"])
    tokens = np.frombuffer(text.encode(), np.uint8)
    parts = [tokens[start : start + 33] for start in range(0, len(tokens) - 1, 32)]
    by_hand = [loss for part in parts if len(part) > 1 for loss in model.losses([part])[0]]
    assert long.tokens == long.num_bytes == len(tokens) - 1 == len(by_hand)
    assert long.nats == pytest.approx(sum(by_hand), rel=1e-6)
    assert long.bits_per_byte == pytest.approx(long.loss / math.log(2))
    assert long.perplexity == pytest.approx(math.exp(long.loss))
    both = total([long, short])
    assert (both.tokens, both.nats) == (long.tokens + 1, pytest.approx(long.nats + short.nats))
    (near,) = model.score(text, stride=4)
    assert (near.tokens, near.num_bytes) == (long.tokens, long.num_bytes)
    assert near.nats != long.nats
    assert Score(tokens=2, nats=4.0, num_bytes=None).bits_per_byte is None


def test_a_task_is_answered_with_the_likeliest_choice(exported, tmp_path, capsys):
    model = mw.load(exported, on="cpu:8")
    questions = [Question("What is it? ", ("a", "longer than that", "b"), 1), Question("Who?", ("you", "I"), 0)]
    result = answer(model, questions)
    for question, likely in zip(questions, result.log_likelihoods, strict=True):
        for choice, value in zip(question.choices, likely, strict=True):
            whole = f"{question.query} {choice}".encode()
            start = len(question.query.rstrip().encode())
            (losses,) = model.losses([list(whole)[-33:]])
            assert value == pytest.approx(-losses[-(len(whole) - start) :].sum(), abs=1e-4)
    best = [np.argmax(likely) for likely in result.log_likelihoods]
    assert result.acc == np.mean([b == q.gold for b, q in zip(best, questions, strict=True)])
    by_byte = [
        np.argmax(np.array(likely) / [len(choice) for choice in question.choices])
        for likely, question in zip(result.log_likelihoods, questions, strict=True)
    ]
    assert result.acc_norm == np.mean([b == q.gold for b, q in zip(by_byte, questions, strict=True)])
    path = tmp_path / "task.jsonl"
    names = ("query", "gold"), ("question", "answer")
    path.write_text(
        "".join(
            json.dumps({query: q.query, "choices": q.choices, gold: q.gold}) + "\n"
            for q, (query, gold) in zip(questions, names, strict=True)
        )
    )
    assert read_task(path) == questions
    assert main(["eval", str(exported), "--on", "cpu:8", "--task", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["questions"], said["acc"], said["acc_norm"]) == (2, result.acc, result.acc_norm)


BAD = {
    "a letter": ({"query": "q", "choices": ["a", "b"], "gold": "B"}, "gold is 'B'; it is the number of the right"),
    "too large": (
        {"query": "q", "choices": ["a", "b"], "gold": 2},
        "gold is 2; it is the number of the right choice",
    ),
    "true": ({"query": "q", "choices": ["a", "b"], "gold": True}, "gold is True"),
    "one choice": ({"query": "q", "choices": ["a"], "gold": 0}, "choices is .* it is a list of two texts or more"),
    "empty choice": ({"query": "q", "choices": ["a", ""], "gold": 0}, "choices is"),
    "no choices": ({"query": "q", "gold": 0}, "choices is missing"),
    "no question": ({"choices": ["a", "b"], "gold": 0}, "query is missing; it is a text"),
    "another field": ({"ctx": "q", "choices": ["a", "b"], "gold": 0}, "there is no field 'ctx'; a question has query"),
    "both names": ({"query": "q", "question": "q", "choices": ["a", "b"], "gold": 0}, "there is no field 'question'"),
    "a list": ([1], "this is a list; each line holds an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_question_is_one_line_with_its_place(case, tmp_path):
    data, message = BAD[case]
    path = tmp_path / "task.jsonl"
    path.write_text('{"query": "q", "choices": ["a", "b"], "gold": 0}\n\n' + json.dumps(data) + "\n")
    with pytest.raises(mw.MeshwrightError, match=rf"task\.jsonl, line 3: {message}") as raised:
        read_task(path)
    assert "\n" not in str(raised.value)


def test_what_cannot_be_scored_is_one_line(exported):
    model = mw.load(exported, on="cpu:1")
    for call, message in (
        (lambda: model.losses(["a"]), "a text has 1 token; its second is the first that is predicted"),
        (lambda: model.score("text", seq_len=4, stride=5), "stride is 5; it is from 1 to the 4 tokens of a window"),
        (lambda: model.log_likelihoods([("", "x")]), "'x' after '' has 1 tokens of 1; it is predicted from a token"),
        (lambda: model.log_likelihoods([("q", "x" * 40)]), "has 40 tokens of 41; .* 1 to 32"),
    ):
        with pytest.raises(mw.MeshwrightError, match=message):
            call()
