"""The engine behind its HTTP: clients get what the model alone says."""

import json
import time
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest
from serving_cases import alone, drawn_model
from started import serving

from meshwright.description.families.registry import PRESETS
from meshwright.execution.models.generation.sampling import GREEDY, Sampling
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.request import Request
from meshwright.serving.engine.settings import EngineSettings
from meshwright.serving.http.service import Service

pytestmark = pytest.mark.matrix

PROMPT = "The mesh has 2 axes"


@pytest.fixture(scope="module")
def server():
    model = drawn_model(config=replace(PRESETS["tiny"], num_layers=1))
    engine = Engine(model, EngineSettings(rows=4, context=64, page_size=64, cache_tokens=512, chunk_tokens=64))
    service = Service(
        engine=engine, model="tiny", context=engine.layout.context, tokenizer=model.tokenizer, stats=engine.stats
    )
    with serving(service, start=engine.start) as found:
        yield found
    engine.close()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def wanted(server, prompt=PROMPT, completion=0, **options):
    engine = server.service.engine
    return alone(engine.model, Request(prompt=list(prompt.encode()), **options), completion)


def test_texts_are_those_of_the_model_alone(server, client):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "extra_body": {"return_token_ids": True}}
    greedy = client.completions.create(**options, temperature=0).choices[0]
    assert tuple(greedy.token_ids) == wanted(server, max_tokens=20, sampling=GREEDY).tokens
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)
    sampled = client.completions.create(**options, temperature=0.8, top_p=0.9, seed=3, n=2).choices
    for number, choice in enumerate(sampled):
        one = wanted(server, completion=number, max_tokens=20, sampling=sampling)
        assert (tuple(choice.token_ids), choice.text) == (one.tokens, one.text)
    stream = client.completions.create(**options, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in stream) == greedy.text


def test_log_likelihoods_are_those_of_the_model(server, client):
    model = server.service.engine.model
    losses = model.losses([PROMPT])[0]
    scored = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.text == PROMPT
    np.testing.assert_allclose(scored.logprobs.token_logprobs[1:], -losses, rtol=1e-4, atol=1e-4)
    answer = httpx.post(f"{server.url}/loglikelihood", json={"prefix_text": [PROMPT[:10]], "text": [PROMPT[10:]]})
    assert answer.json()["log_likelihood"] == pytest.approx([-losses[9:].sum()], abs=1e-3)
    # Longer than the context: in windows of 64 tokens.
    text = (PROMPT * 5)[:90]
    answer = httpx.post(f"{server.url}/loglikelihood-rolling", json={"text": [text]})
    whole = model.losses([text[:64]])[0].sum() + model.losses([text[-64:]])[0][-26:].sum()
    assert answer.json()["log_likelihood"] == pytest.approx([-whole], abs=1e-2)


def test_what_is_likeliest_is_said_to_be(server):
    prompts = [f"axes {chr(number)}" for number in range(33, 127)]
    logits = server.service.engine.model.logits([list(prompt.encode()) for prompt in prompts])
    likeliest = np.asarray(logits)[:, -1].argmax(-1)
    # Of a prompt after which that is a character.
    at = int(np.flatnonzero(likeliest < 128)[0])
    texts = [chr(likeliest[at]), chr((likeliest[at] + 1) % 128)]
    answer = httpx.post(f"{server.url}/loglikelihood", json={"prefix_text": [prompts[at]] * 2, "text": texts})
    assert answer.json()["is_greedy"] == [True, False]


def test_embeddings_are_of_a_text_alone(server, client):
    one = client.embeddings.create(model="tiny", input=PROMPT).data[0].embedding
    many = client.embeddings.create(model="tiny", input=["x" * 40, PROMPT, "y"]).data
    assert len(one) == server.service.engine.model.config.embed
    np.testing.assert_allclose(many[1].embedding, one, rtol=1e-4, atol=1e-5)


def test_a_schema_is_kept(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    done = client.completions.create(
        model="tiny", prompt="a", max_tokens=40, temperature=1, seed=0, extra_body={"response_format": form}
    )
    assert list(json.loads(done.choices[0].text)) == ["a"]
    with pytest.raises(openai.BadRequestError, match="regular expression"):
        client.completions.create(model="tiny", prompt="a", extra_body={"guided_regex": "("})


def test_what_the_engine_refuses_is_refused(client):
    for options in ({"prompt": [5000]}, {"prompt": "a", "logit_bias": {"5000": 1}}, {"prompt": "a" * 64}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", **options)


def test_a_client_that_goes_away_leaves_nothing(server, client):
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, n=4, stream=True)
    next(iter(stream))
    stream.close()
    end = time.monotonic() + 5
    while (stats := server.service.engine.stats()).running or stats.queued:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert server.service.num_active == 0
