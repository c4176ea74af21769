"""The chat page and the document of the server, against the server's own tables."""

import base64
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from chat_tokenizer import chat_tokenizer
from fake_engine import FakeEngine
from started import started

from meshwright.execution.text.tokenizer import byte_tokenizer
from meshwright.serving.engine.decode_stats import StepMeans
from meshwright.serving.engine.request import MOST_LOGPROBS
from meshwright.serving.http.app import ENDPOINTS
from meshwright.serving.http.metrics import MEAN_GAUGES
from meshwright.serving.http.openai.generation import MAX_LOGIT_BIASES
from meshwright.serving.http.service import ApiKey, RequestLimits

DOCUMENT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def settings_of(server):
    page = httpx.get(server.url)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    # Nothing from elsewhere: neither a link, nor leave to load one.
    assert not re.search(r"https?://\w|src=|@import|url\(", page.text)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (source,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    # Neither attributes with code or style, which the policy would refuse, nor text that is read as HTML.
    assert not re.search(r"\son\w+=|\sstyle=|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page.text)
    return json.loads(re.search(r"const SERVER = (.*);", page.text)[1])


def test_the_page_knows_its_server():
    with started(FakeEngine(chat_tokenizer()), api_keys=(ApiKey("k"),)) as server:
        assert settings_of(server) == {"model": "fake/model", "has_chat": True, "has_keys": True}
    with started(FakeEngine(byte_tokenizer())) as server:
        assert settings_of(server) == {"model": "fake/model", "has_chat": False, "has_keys": False}


PAGE = Path(__file__).parents[2] / "src" / "meshwright" / "serving" / "http" / "page.html"

SHOWN = """
class Element {
  constructor(name) { this.name = name; this.children = []; }
  append(...children) { this.children.push(...children); }
  addEventListener() {}
  toString() {
    if (this.className === "copy") return "";
    const target = this.href ? ` ${this.href}` : "";
    const start = this.start > 1 ? ` ${this.start}` : "";
    const inside = this.children.map((each) => each instanceof Element ? each : each.replace(/</g, "&lt;"));
    return `<${this.name}${target}${start}>${inside.join("")}</>`;
  }
}
const document = { createElement: (name) => new Element(name) };
const navigator = {};
"""
"""A document that is written as text, of which names in angle brackets are elements."""


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node")
def test_markdown_is_elements_and_never_html():
    cases = {
        "plain <b>text</b>": "<p>plain &lt;b>text&lt;/b></>",
        "# One\n## Two": "<h1>One</><h2>Two</>",
        "a **b *c* `d*`** e": "<p>a <strong>b <em>c</> <code>d*</></> e</>",
        "2 * 3 * 4 and snake_case_name": "<p>2 * 3 * 4 and snake_case_name</>",
        "```python\n<script>1</script>\n# no\n": "<pre><code>&lt;script>1&lt;/script>\n# no\n</></>",
        "- a\n- b\n  1. c\n\n3. d": "<ul><li>a</><li>b<ol><li>c</></></></><ol 3><li>d</></>",
        "> a\n> > b": "<blockquote><p>a</><blockquote><p>b</></></>",
        "| a | b |\n|---|:-:|\n| 1 | `2` |": "<table><tr><th>a</><th>b</></><tr><td>1</><td><code>2</></></></>",
        "[x](https://a.b/c) https://d.e.": "<p><a https://a.b/c>x</> <a https://d.e.>https://d.e.</></>",
        "[x](javascript:alert(1)) [y](JAVASCRIPT:1)": "<p>[x](javascript:alert(1)) [y](JAVASCRIPT:1)</>",
        "[x](data:text/html,1) <img src=x onerror=1>": "<p>[x](data:text/html,1) &lt;img src=x onerror=1></>",
        "a\n\n---\nb": "<p>a</><hr></><p>b</>",
    }
    script = PAGE.read_text(encoding="utf-8").partition("/* Markdown as")[2].partition("/* End of Markdown. */")[0]
    ending = ">" * 5000 + "x"
    program = f"""{SHOWN}/*{script}
const cases = {json.dumps([*cases, ending])};
console.log(JSON.stringify(cases.map((each) => markdown(each).join(""))));"""
    done = subprocess.run(["node", "-"], input=program, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *shown, deep = json.loads(done.stdout)
    assert dict(zip(cases, shown, strict=True)) == cases
    assert deep.endswith("x</>" + "</>" * 9)


def test_the_document_names_every_path_field_and_limit():
    for endpoint in ENDPOINTS:
        assert f"{endpoint.path}`" in DOCUMENT
        for name in endpoint.request.model_fields:
            assert f"`{name}`" in DOCUMENT, f"{name} of {endpoint.path}"
    for field in dataclasses.fields(RequestLimits):
        assert f"`{field.name}`" in DOCUMENT, field.name
    limits = RequestLimits()
    said = {
        "body_bytes": f"{limits.body_bytes >> 20} MiB", "head_bytes": f"{limits.head_bytes >> 10} KiB",
        "body_seconds": f"{limits.body_seconds:g} s", "head_seconds": f"{limits.head_seconds:g} s",
        "seconds": f"{limits.seconds:g} s", "unread_seconds": f"{limits.unread_seconds:g} s",
        "prompts": f"{limits.prompts:,}",
        "prompts_at_once": f"of which {limits.prompts_at_once} completions are in the engine at once",
        "choices": limits.choices,
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
