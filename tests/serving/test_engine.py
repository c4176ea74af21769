"""The engine: each request gets what its prompt alone gets, whatever is beside it, and nothing is left behind."""

import re
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from serving_cases import (
    SMALL,
    TIGHT,
    alone,
    answers,
    drawn_model,
    engine_of_few_programs,
    greedy_requests,
    prompts_of,
    small_engine,
    tokens_of,
)

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.mesh import MeshShape
from meshwright.serving.engine.decode_stats import show_means
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.request import ClosedError, Constraint, OverloadedError, Request
from meshwright.serving.engine.settings import EngineSettings

GOLDENS = Path(__file__).parents[1] / "references"
TWO_HEADS = replace(SMALL, name="grouped", num_kv_heads=4)
EXPERTS = replace(PRESETS["tiny-moe"], num_layers=1, num_kv_heads=4)


def is_empty(engine):
    """Whether no request holds a page or a row."""
    scheduler = engine.scheduler
    for prefix in scheduler.prefixes:
        prefix.clear()
    return scheduler.num_free_pages == scheduler.num_pages and not scheduler.running and not scheduler.waiting


@pytest.fixture(scope="module")
def engine():
    found = small_engine()
    found.start()
    yield found
    found.close()


def test_many_requests_get_what_each_gets_alone(engine):
    requests = greedy_requests(prompts_of(40, vocab=256, longest=40), most_tokens=24)
    # All are there before the first is answered, so that pages run out.
    got = answers(engine, requests)
    wanted = [alone(engine.model, request) for request in requests]
    assert [tokens_of(outputs) for outputs in got] == [each.tokens for each in wanted]
    assert ["".join(output.text for output in outputs) for outputs in got] == [each.text for each in wanted]
    counters = engine.scheduler.counters
    assert counters.preempted > 0
    assert counters.cached_tokens > 0
    assert is_empty(engine)


def test_what_is_sampled_with_a_seed_depends_on_nothing_else(engine):
    how = Sampling(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.5)
    prompts = prompts_of(12, vocab=256, longest=30, seed=1)
    requests = [
        Request(prompt=prompt, max_tokens=12, num_completions=2, sampling=replace(how, seed=number))
        for number, prompt in enumerate(prompts)
    ]
    got = answers(engine, requests)
    for request, outputs in zip(requests, got, strict=True):
        for number in (0, 1):
            assert tokens_of(outputs, number) == alone(engine.model, request, number).tokens
    assert tokens_of(got[0], 0) != tokens_of(got[0], 1)


def test_texts_that_stop_say_why(engine):
    prompt = [1, 2, 3, 4, 5]
    whole = alone(engine.model, Request(prompt=prompt, max_tokens=12))
    third = whole.tokens[2]
    ((*_, last),) = answers(engine, [Request(prompt=prompt, max_tokens=12, stop_tokens=(third,))])
    assert last.done == "token"
    outputs = answers(engine, [Request(prompt=prompt, max_tokens=12, stop_tokens=(third,), min_tokens=8)])[0]
    assert third not in tokens_of(outputs)[:8]
    assert len(tokens_of(outputs)) >= 8
    text = whole.text
    assert text is not None
    (outputs,) = answers(engine, [Request(prompt=prompt, max_tokens=12, stop=(text[3:5],))])
    assert "".join(output.text for output in outputs) == text[: text.find(text[3:5])]
    assert (outputs[-1].done, outputs[-1].stop) == ("text", text[3:5])


def test_log_probabilities_are_those_of_the_logits(engine):
    prompt = [7, 9, 2, 200, 31, 8, 4, 77, 5, 3, 2, 1, 9, 30, 31, 32, 90, 91, 4, 4]
    request = Request(prompt=prompt, max_tokens=3, logprobs=2, prompt_logprobs=1, pooled=True)
    (outputs,) = answers(engine, [request])
    made = tokens_of(outputs)
    logits = np.asarray(engine.model.logits([[*prompt, *made]]), np.float64)[0]
    wanted = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    found = [*outputs[0].prompt_logprobs, *(each for output in outputs for each in output.logprobs)]
    assert [each.token for each in found] == [*prompt[1:], *made]
    for row, each in zip(wanted, found, strict=False):
        np.testing.assert_allclose(each.logprob, row[each.token], atol=1e-4)
        assert each.likeliest[0][0] == row.argmax()
        np.testing.assert_allclose(
            [value for _, value in each.likeliest], np.sort(row)[::-1][: len(each.likeliest)], atol=1e-4
        )
    assert len(outputs[0].pooled) == engine.model.config.embed
    assert sum(len(output.pooled) for output in outputs[1:]) == 0


def test_a_prompt_that_is_only_scored_has_as_many_texts_as_were_asked_for(engine):
    (outputs,) = answers(engine, [Request(prompt=[5, 6, 7], max_tokens=0, prompt_logprobs=1, num_completions=3)])
    assert [(each.completion, each.done, len(each.prompt_logprobs)) for each in outputs] == [
        (0, "length", 2), (1, "length", 0), (2, "length", 0)
    ]  # fmt: skip
    ended = []
    asked = Request(prompt=[5, 6, 7], max_tokens=0, prompt_logprobs=1, num_completions=3)
    engine.abort(engine.submit(asked, ended.extend))
    answers(engine, [Request(prompt=[1], max_tokens=1)])
    assert sorted(each.completion for each in ended if each.done) == [0, 1, 2]
    assert is_empty(engine)


def test_some_tokens_can_be_ruled_out(engine):
    prompt, rest = [1, 2, 3], range(128, 256)
    (outputs,) = answers(
        engine, [Request(prompt=prompt, max_tokens=10, logit_bias=tuple((token, -100.0) for token in rest))]
    )
    assert max(tokens_of(outputs)) < 128


def test_an_aborted_request_frees_its_pages_and_rows(engine):
    outputs = []
    ids = [engine.submit(Request(prompt=[1, 2, 3], max_tokens=60), outputs.extend) for _ in range(12)]
    for request_id in ids:
        engine.abort(request_id)
    answers(engine, [Request(prompt=[1], max_tokens=1)])
    assert sorted(output.done for output in outputs if output.done) == ["aborted"] * 12
    assert is_empty(engine)


def test_a_late_request_is_ended(engine):
    outputs = answers(engine, [Request(prompt=[1, 2], max_tokens=60, timeout_seconds=1e-6)])[0]
    assert outputs[-1].done == "aborted"
    assert "time" in outputs[-1].error


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(prompt=[], max_tokens=1), "no tokens"),
        (Request(prompt=[256], max_tokens=1), "token 256"),
        (Request(prompt=[1] * 64, max_tokens=1), "at most 64"),
        (Request(prompt=[1], max_tokens=-1), "max_tokens is -1"),
        (Request(prompt=[1], max_tokens=1, logprobs=21), "logprobs is 21"),
        (Request(prompt=[1], max_tokens=1, num_completions=0), "num_completions is 0"),
        (Request(prompt=[1], max_tokens=1, logit_bias=((999, 1.0),)), "logit_bias has token 999"),
        (Request(prompt=[1], max_tokens=4, min_tokens=2, stop_tokens=(2 * 10**9,)), "stop_tokens has token 2000000000"),
        (Request(prompt=[1], max_tokens=4, stop_tokens=tuple(range(2000))), "2,000 tokens; it may have at most 1,024"),
    ],
)
def test_what_cannot_be_answered_is_refused(engine, request_, said):
    with pytest.raises(MeshwrightError, match=said):
        engine.submit(request_, lambda outputs: None)


def test_a_full_queue_says_when_to_come_back(engine):
    room, ended = TIGHT.max_queue + TIGHT.rows, []
    texts = Request(prompt=[1], max_tokens=2, num_completions=room // 2)
    ids = [engine.submit(texts, ended.extend) for _ in range(2)]
    with pytest.raises(OverloadedError, match="1024") as found:
        engine.submit(replace(texts, num_completions=room // 2 + 1), ended.extend)
    assert found.value.retry_seconds > 0
    for each in ids:
        engine.abort(each)
    while not engine.is_idle:
        time.sleep(0.01)
    # What never has room is no matter of when.
    with pytest.raises(MeshwrightError, match=f"have room for {room}"):
        engine.submit(replace(texts, num_completions=room + 1), ended.extend)


def test_texts_for_which_rows_are_free_need_no_room_in_the_queue(engine):
    settings, engine.settings = engine.settings, replace(TIGHT, max_queue=1)
    try:
        (outputs,) = answers(engine, [Request(prompt=[1], max_tokens=2, num_completions=5)])
    finally:
        engine.settings = settings
    assert len([output for output in outputs if output.done]) == 5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (EngineSettings(context=64, cache_tokens=32), "room for 32"),
        (EngineSettings(cache_split="sequence"), "splits nothing of the cache"),
    ],
)
def test_settings_that_do_not_fit_are_refused(engine, settings, said):
    with pytest.raises(MeshwrightError, match=said):
        Engine(engine.model, settings)


CASES = [
    ("llama", "1,1,4,2", "batch"),
    ("gemma3_text", "1,2,2,2", "sequence"),
    ("deepseek_v3", "2,2,2,1", "batch"),
    ("qwen3_moe", "ep=2,fsdp=2,tp=2", "batch"),
    ("gpt_oss", "2,2,2,1", "batch"),
    ("phi3_longrope", "1,2,2,2", "batch"),
    ("llama_dynamic", "2,1,4,1", "heads"),
    ("gpt2", "2,2,2,1", "batch"),
    ("llama4_text", "ep=2,fsdp=2,tp=2", "sequence"),
    ("qwen2_moe_sparse", "ep=2,fsdp=2,tp=2", "batch"),
    ("mistral4", "1,2,2,2", "sequence"),
    ("gemma4_text", "1,1,4,2", "batch"),
    ("gemma4_text_moe", "ep=2,fsdp=2,tp=2", "sequence"),
    ("gemma4_text_e2b", "1,2,2,2", "sequence"),
    ("gemma3n_text", "2,2,2,1", "batch"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "mesh", "split"), CASES)
def test_every_family_on_a_mesh_gets_what_transformers_makes(family, mesh, split):
    model, golden = mw.load(GOLDENS / family, on="cpu:8", mesh=mesh), np.load(GOLDENS / family / "golden.npz")
    prompts = [row[:length].tolist() for row, length in zip(golden["tokens"], golden["lengths"], strict=True)]
    wanted = [tuple(row) for row in golden["continuations"].tolist()]
    others = prompts_of(24, vocab=model.config.vocab, longest=30)
    settings = EngineSettings(rows=16, context=48, page_size=8, cache_tokens=640, cache_split=split, chunk_tokens=16)
    engine = engine_of_few_programs(model, settings)
    engine.start()
    try:
        requests = [Request(prompt=prompt, max_tokens=len(wanted[0])) for prompt in prompts]
        requests += greedy_requests(others, most_tokens=16)
        got = [tokens_of(outputs) for outputs in answers(engine, requests, spread_seconds=0.5)]
        assert got[: len(wanted)] == wanted
        assert got[len(wanted) :] == [alone(model, request).tokens for request in requests[len(wanted) :]]
        assert is_empty(engine)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "guesser",
    ["before", pytest.param("itself", marks=pytest.mark.matrix), pytest.param("other", marks=pytest.mark.matrix)],
)
def test_drafts_change_no_token(guesser):
    model = drawn_model(config=SMALL)
    drafts = {"before": None, "itself": model, "other": drawn_model(config=SMALL, seed=1)}
    # Room for all: what loses its row or its pages is read again, which makes a token alone.
    engine = Engine(model, replace(TIGHT, num_drafts=3, rows=18, cache_tokens=18 * 64), drafts[guesser])
    engine.start()
    try:
        # What repeats itself is guessed right.
        prompts = [[*prompt, *prompt, *prompt][:40] for prompt in prompts_of(10, vocab=256, longest=20, seed=3)]
        requests = greedy_requests(prompts, most_tokens=24)
        requests += [
            replace(request, sampling=Sampling(temperature=0.8, top_k=20, seed=number), num_completions=2)
            for number, request in enumerate(requests[:4])
        ]
        got = answers(engine, requests, spread_seconds=0.1)
        for request, outputs in zip(requests, got, strict=True):
            for number in range(request.num_completions):
                assert tokens_of(outputs, number) == alone(model, request, number).tokens
        made = [len(output.tokens) for outputs in got for output in outputs]
        assert sum(made) == engine.stats().generated_tokens
        if guesser == "itself":
            # Every guess is right, sampled ones too: between the first and the last, outputs have four tokens.
            by_text = [
                [output for output in outputs if output.completion == number] for outputs in got for number in range(2)
            ]
            assert {len(output.tokens) for outputs in by_text for output in outputs[1:-1]} == {4}
        elif guesser == "before":
            assert max(made) > 1
        assert is_empty(engine)
    finally:
        engine.close()


def test_a_model_of_other_tokens_cannot_guess(engine):
    other = replace(engine.model, config=replace(SMALL, vocab=128, name="narrow"))
    with pytest.raises(MeshwrightError, match="vocabulary of 128"):
        Engine(engine.model, replace(TIGHT, num_drafts=3), other)
    with pytest.raises(MeshwrightError, match="num_drafts is 0"):
        Engine(engine.model, TIGHT, engine.model)


def test_constrained_texts_match(engine):
    requests = [
        Request(
            prompt=list(b"Name a number:"),
            max_tokens=40,
            sampling=Sampling(temperature=1.0, seed=seed),
            constraint=Constraint("regex", "[0-9]{3}-(cat|dog)"),
        )
        for seed in range(4)
    ]
    requests.append(
        Request(
            prompt=[1, 2], max_tokens=50, constraint=Constraint("json_schema", '{"type": "boolean"}'), num_completions=2
        )
    )
    requests += greedy_requests(prompts_of(4, vocab=256, longest=20), most_tokens=20)
    got = answers(engine, requests)
    texts = ["".join(output.text for output in outputs if output.completion == 0) for outputs in got]
    assert all(re.fullmatch("[0-9]{3}-(cat|dog)", text) for text in texts[:4])
    assert len(set(texts[:4])) > 1
    assert texts[4] in ("true", "false")
    assert [tokens_of(outputs) for outputs in got[5:]] == [alone(engine.model, each).tokens for each in requests[5:]]
    with pytest.raises(MeshwrightError, match="regular expression"):
        engine.submit(Request(prompt=[1], max_tokens=4, constraint=Constraint("regex", "(")), lambda outputs: None)


def test_what_is_measured_stands_beside_a_plan(engine):
    requests = [Request(prompt=[5 + number] * 20, max_tokens=30) for number in range(4)]
    answers(engine, requests)
    found = engine.means()
    assert found is not None
    measured, planned = found
    assert all(value > 0 for value in (*measured, *planned))
    assert measured.batch <= engine.layout.rows
    assert measured.cache_bytes <= engine.layout.pages[0] * 4 * 2 * SMALL.num_kv_heads * SMALL.head_dim * 4
    assert "(predicted: " in show_means(measured, planned)


def test_an_engine_that_fails_says_why_and_takes_no_more():
    broken = small_engine()
    broken.start()
    seen = []
    broken.on_failure = lambda: seen.append(str(sys.exception()))

    def fail(*arguments):
        raise RuntimeError("the devices are gone")

    broken.runner._compiled = dict.fromkeys(broken.runner._compiled, fail)
    threading.excepthook, before = (lambda _: None), threading.excepthook
    try:
        (outputs,) = answers(broken, [Request(prompt=[1], max_tokens=4)])
        broken.close()
    finally:
        threading.excepthook = before
    said = "a program on the devices failed: RuntimeError: the devices are gone"
    assert seen == [said]
    assert [(output.done, output.error) for output in outputs] == [("failed", said)]
    with pytest.raises(ClosedError, match="the devices are gone"):
        broken.submit(Request(prompt=[1], max_tokens=4), lambda outputs: None)


@cache
def drawn_requests(config, count):
    """Requests of mixed lengths, and what each prompt alone makes on one device."""
    model = drawn_model(config=config)
    prompts = prompts_of(count, vocab=256, longest=40, seed=11)
    # Every fifth repeats itself, which can be guessed.
    prompts = [[*prompt, *prompt, *prompt][:40] if number % 5 == 0 else prompt for number, prompt in enumerate(prompts)]
    requests = greedy_requests(prompts, most_tokens=24, seed=11)
    return requests, [alone(model, request).tokens for request in requests]


@pytest.mark.parametrize(
    ("config", "shape", "count"),
    [
        pytest.param(EXPERTS, MeshShape(ep=2, fsdp=2, tp=2), 60, marks=pytest.mark.matrix),
        *(
            pytest.param(config, shape, 500, marks=pytest.mark.exhaustive)
            for config, shape in (
                (TWO_HEADS, MeshShape(dp=2, tp=4)),
                (TWO_HEADS, MeshShape(fsdp=2, tp=2, sp=2)),
                (TWO_HEADS, MeshShape(dp=8)),
                (TWO_HEADS, MeshShape(fsdp=4, tp=2)),
                (EXPERTS, MeshShape(ep=2, tp=4)),
                (EXPERTS, MeshShape(ep=2, fsdp=2, tp=2)),
            )
        ),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_requests_at_random_get_what_each_gets_alone(config, shape, count):
    requests, wanted = drawn_requests(config, count)
    settings = replace(TIGHT, rows=16, cache_tokens=512, num_drafts=2)
    engine = engine_of_few_programs(drawn_model(shape, config), settings, halvings=1)
    engine.start()
    try:
        got = answers(engine, requests, spread_seconds=0.5)
        assert [tokens_of(outputs) for outputs in got] == wanted
        counters = engine.scheduler.counters
        assert counters.cached_tokens > 0
        assert counters.preempted > 0
        assert max(len(output.tokens) for outputs in got for output in outputs) > 1
        assert is_empty(engine)
    finally:
        engine.close()
