"""The chat page and the document of the server, against the server's own tables."""

import dataclasses
import json
import re
from pathlib import Path

import httpx
from chat_tokenizer import chat_tokenizer
from fake_engine import FakeEngine
from started import started

from meshwright.serving.decode_stats import StepMeans
from meshwright.serving.http.app import ENDPOINTS
from meshwright.serving.http.metrics import MEAN_GAUGES
from meshwright.serving.http.openai.generation import MAX_LOGIT_BIASES
from meshwright.serving.http.service import ApiKey, Limits
from meshwright.serving.request import MOST_LOGPROBS
from meshwright.text import byte_tokenizer

DOCUMENT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def settings_of(server):
    page = httpx.get(server.url)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    # Nothing from elsewhere: neither a link, nor leave to load one.
    assert not re.search(r"https?://|src=|@import|url\(", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    return json.loads(re.search(r"const SERVER = (.*);", page.text)[1])


def test_the_page_knows_its_server():
    with started(FakeEngine(chat_tokenizer()), api_keys=(ApiKey("k"),)) as server:
        assert settings_of(server) == {"model": "fake/model", "has_chat": True, "has_keys": True}
    with started(FakeEngine(byte_tokenizer())) as server:
        assert settings_of(server) == {"model": "fake/model", "has_chat": False, "has_keys": False}


def test_the_document_names_every_path_field_and_limit():
    for endpoint in ENDPOINTS:
        assert f"{endpoint.path}`" in DOCUMENT
        for name in endpoint.request.model_fields:
            assert f"`{name}`" in DOCUMENT, f"{name} of {endpoint.path}"
    for field in dataclasses.fields(Limits):
        assert f"`{field.name}`" in DOCUMENT, field.name
    limits = Limits()
    said = {
        "body_bytes": f"{limits.body_bytes >> 20} MiB", "head_bytes": f"{limits.head_bytes >> 10} KiB",
        "body_seconds": f"{limits.body_seconds:g} s", "head_seconds": f"{limits.head_seconds:g} s",
        "seconds": f"{limits.seconds:g} s", "unread_seconds": f"{limits.unread_seconds:g} s",
        "prompts": f"{limits.prompts:,}",
        "prompts_at_once": f"of which {limits.prompts_at_once} are in the engine at once", "choices": limits.choices,
        "stop_strings": limits.stop_strings, "stop_characters": f"of {limits.stop_characters} characters",
    }  # fmt: skip
    for name, value in said.items():
        assert f"{value} (`{name}`)" in DOCUMENT, name
    assert f"| tokens of `logit_bias` | {MAX_LOGIT_BIASES:,} |" in DOCUMENT
    assert f"`top_logprobs` | {MOST_LOGPROBS} |" in DOCUMENT


def test_metrics_are_of_requests_tokens_and_the_engine():
    with started(FakeEngine(byte_tokenizer())) as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": ["abc", "de"], "max_tokens": 4})
        httpx.post(f"{server.url}/v1/completions", json={"prompt": 5})
        found = httpx.get(f"{server.url}/metrics")
        assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
        values = dict(line.rsplit(" ", 1) for line in found.text.splitlines() if not line.startswith("#"))
        assert values['meshwright_http_requests_total{endpoint="/v1/completions",status="200"}'] == "1.0"
        assert values['meshwright_http_requests_total{endpoint="/v1/completions",status="400"}'] == "1.0"
        assert values["meshwright_prompt_tokens_total"] == "5.0"
        assert values["meshwright_text_tokens_total"] == "8.0"
        assert values["meshwright_first_token_seconds_count"] == "2.0"
        assert values["meshwright_token_seconds_count"] == "2.0"
        assert values["meshwright_num_pages"] == "100.0"
        assert values["meshwright_num_steps_total"] == "8.0"


def test_metrics_have_what_is_measured_beside_what_is_planned():
    seen = [None, (StepMeans(0.25, 3.5, 4096, 1.5), StepMeans(0.125, 4, 8192, 0.75))]
    with started(FakeEngine(byte_tokenizer()), means=lambda: seen[0]) as server:
        assert "meshwright_mean_" not in httpx.get(f"{server.url}/metrics").text
        seen.pop(0)
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("meshwright_mean_"))
    assert values == {
        f'meshwright_mean_{name}{{origin="{origin}"}}': value
        for name, both in {
            "step_seconds": ("0.125", "0.25"),
            "batch": ("4.0", "3.5"),
            "cache_bytes": ("8192.0", "4096.0"),
            "first_token_seconds": ("0.75", "1.5"),
        }.items()
        for origin, value in zip(("predicted", "measured"), both, strict=True)
    }
    assert set(MEAN_GAUGES) == set(StepMeans._fields)
    assert all(f"meshwright_mean_{name}" in DOCUMENT for name in MEAN_GAUGES)
