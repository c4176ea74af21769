"""Requests of every type of field, valid and not, to one engine: none is a fault, and the engine answers after them."""

from dataclasses import replace

import httpx
import pytest
from chat_tokenizer import chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_cases import SMALL, drawn_model, small_engine
from started import serving
from test_http_fuzz import check_answer, mostly, paths, values

from meshwright.serving.http.service import RequestLimits, Service

COMPLETION = {"prompt": "The mesh", "max_tokens": 8, "temperature": 0}
TOKENS = st.lists(mostly(st.integers(0, 255), st.sampled_from([256, 2 * 10**9, 2**31 - 1])), max_size=6)
PROMPTS = st.one_of(st.sampled_from(["", "a", "é" * 9, "a" * 80]), TOKENS, st.lists(TOKENS, max_size=3))
COUNTS = mostly(st.integers(0, 8), st.sampled_from([20, 21, 64, 2**31 - 1, 2**31]))
SCHEMAS = st.sampled_from(
    [{"type": "object"}, {"type": "integer"}, {"$ref": "#/x"}, "{", {"type": "string", "pattern": "("}]
)
BY_NAME = {
    "model": st.just("tiny"),
    "prompt": PROMPTS,
    "input": PROMPTS,
    "stop_token_ids": TOKENS,
    "logit_bias": st.dictionaries(
        st.sampled_from(["0", "255", "256", "2000000000", "x"]), st.floats(-100, 100), max_size=3
    ),
    "max_tokens": COUNTS,
    "min_tokens": COUNTS,
    "logprobs": st.one_of(st.booleans(), COUNTS),
    "n": mostly(st.integers(1, 3), st.sampled_from([0, 16, 17, 2**31 - 1])),
    "guided_regex": st.sampled_from(["[a-z]+", "(", "(a|b){1,300}c", ""]),
    "guided_json": SCHEMAS,
    "guided_grammar": st.sampled_from(['start: "a" | "b"', "start: x", "", "start: start"]),
}
"""The fields of which values beyond their type matter: those that are inside a type and outside a vocabulary."""


@pytest.fixture(scope="module")
def client():
    model = replace(drawn_model(config=SMALL), tokenizer=chat_tokenizer())
    engine = small_engine(model)
    service = Service(
        engine=engine,
        model="tiny",
        context=engine.layout.context,
        tokenizer=model.tokenizer,
        limits=RequestLimits(max_tokens=8, total_tokens=256),
    )
    with serving(service, start=engine.start) as found, httpx.Client(base_url=found.url, timeout=120) as made:
        yield made
        assert not engine.scheduler.running
        assert not found.errors
    engine.close()


@pytest.mark.parametrize(
    "count", [40, pytest.param(400, marks=pytest.mark.matrix), pytest.param(5000, marks=pytest.mark.exhaustive)]
)
def test_no_request_ends_the_engine(client, count):
    described = client.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    before = client.post("/v1/completions", json=COMPLETION).json()["choices"]

    def bodies(path):
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        own = schemas[schema["$ref"].rpartition("/")[2]]
        fields = {name: BY_NAME.get(name, values(one, schemas)) for name, one in own["properties"].items()}
        required = {name: fields.pop(name) for name in own.get("required", ())}
        # A few fields each: with all of them most bodies would be refused for the first that is wrong.
        names = st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True) if fields else st.just([])
        return names.flatmap(lambda some: st.fixed_dictionaries(required | {name: fields[name] for name in some}))

    @settings(max_examples=count, deadline=None, derandomize=count < 100, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def ask(data):
        path = data.draw(st.sampled_from(paths(described)))
        check_answer(client.post(path, json=data.draw(bodies(path))))

    ask()
    assert client.post("/v1/completions", json=COMPLETION).json()["choices"] == before
