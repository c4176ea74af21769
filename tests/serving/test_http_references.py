"""Each family behind HTTP: clients get the tokens and the log probabilities that transformers computes."""

from itertools import cycle
from pathlib import Path

import httpx
import numpy as np
import pytest
from started import serving

import meshwright as mw
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.settings import EngineSettings
from meshwright.serving.http.service import Service

GOLDENS = Path(__file__).parents[1] / "references"
FAMILIES = (
    *("llama", "gemma3_text", "deepseek_v3", "gpt2", "gpt_neox", "phi3_longrope", "qwen2_moe", "olmo2", "gemma2"),
    *("smollm3", "granitemoe", "hunyuan_v1_dense", "cohere2", "qwen3_moe_sparse", "qwen2_moe_sparse", "llama4_text"),
    *("gemma4_text_e2b", "gemma3n_text", "phimoe"),
)
"""Llama and others that differ: windows, latents with experts, learned positions, parallel blocks, long sequences, a
shared expert, norms elsewhere, capped logits, layers without positions, factors, norms after the rotary embedding,
parallel blocks with one norm, dense layers between those with experts, chunks, inputs of each layer and keys of earlier
layers, several streams, experts weighted one after the other."""


def cases():
    """Families, each on another axis than the one before it; `test_engine.py` and `execution/inference` have all."""
    for family, axis in zip(FAMILIES, cycle(("tp", "fsdp", "dp", "sp")), strict=False):
        yield pytest.param(family, f"{axis}=2", id=f"{family}-{axis}")
    yield pytest.param("gpt_oss", "ep=2", id="gpt_oss-ep")


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "mesh"), [*cases()])
def test_tokens_and_log_probabilities_are_those_of_transformers(family, mesh):
    model, golden = mw.load(GOLDENS / family, on="cpu:2", mesh=mesh), np.load(GOLDENS / family / "golden.npz")
    # One shape of each kind of step, which is all that has to be compiled.
    engine = Engine(model, EngineSettings(rows=1, context=48, page_size=48, chunk_tokens=16))
    service = Service(
        engine=engine, model=family, context=engine.layout.context, tokenizer=model.tokenizer, stats=engine.stats
    )
    prompts = [row[:length].tolist() for row, length in zip(golden["tokens"], golden["lengths"], strict=True)]
    wanted = golden["continuations"].tolist()
    options = {"prompt": prompts, "temperature": 0, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    try:
        with serving(service, start=engine.start) as server, httpx.Client(base_url=server.url, timeout=60) as client:
            made = client.post("/v1/completions", json=options | {"max_tokens": len(wanted[0])}).json()
            read = client.post("/v1/completions", json=options | {"max_tokens": 0, "echo": True}).json()
    finally:
        engine.close()
    assert [choice["token_ids"] for choice in made["choices"]] == wanted
    logits = golden["logits"].astype(np.float64)
    logprobs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    for row, (prompt, choice) in enumerate(zip(prompts, read["choices"], strict=True)):
        expected = logprobs[row, np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], expected, atol=1e-4)
