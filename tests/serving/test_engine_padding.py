"""A server on a mesh that pads the vocabulary and pads or copies the heads, for each format of weights and cache."""

from dataclasses import replace

import numpy as np
import pytest
from serving_cases import answers, drawn_model, engine_of_few_programs, greedy_requests, prompts_of, tokens_of

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.serving.engine.request import Request
from meshwright.serving.engine.settings import EngineSettings

ODD = replace(PRESETS["tiny"], num_layers=1, num_heads=10, num_kv_heads=5, vocab=259)
FEW = replace(ODD, num_heads=16, num_kv_heads=2)
SETTINGS = EngineSettings(rows=8, context=64, page_size=4, cache_tokens=288, chunk_tokens=16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mesh .* takes the first")
@pytest.mark.parametrize(
    ("config", "on", "mesh", "formats"),
    [
        (ODD, "cpu:4", "tp=4", {}),
        pytest.param(ODD, "cpu:4", "tp=2,sp=2", {}, marks=pytest.mark.matrix),
        pytest.param(ODD, "cpu:4", "tp=4", {"weight_dtype": "int8", "kv_dtype": "int8"}, marks=pytest.mark.matrix),
        pytest.param(FEW, "cpu:4", "tp=4", {}, marks=pytest.mark.matrix),
        pytest.param(FEW, "cpu:8", "tp=4,sp=2", {}, marks=pytest.mark.matrix),
    ],
)
def test_padding_is_never_served(config, on, mesh, formats, tmp_path):
    one = drawn_model(config=config)
    one.save(tmp_path / "odd")
    model = mw.load(tmp_path / "odd", on=on, mesh=mesh)
    prompts = prompts_of(6, vocab=config.vocab, longest=30)
    hot = Sampling(temperature=100.0, repetition_penalty=1.3, frequency_penalty=0.5)
    requests = [
        *greedy_requests(prompts, most_tokens=6),
        *(Request(prompt=prompt, max_tokens=24, sampling=replace(hot, seed=n)) for n, prompt in enumerate(prompts)),
        Request(prompt=prompts[0], max_tokens=3, logprobs=20, prompt_logprobs=1, pooled=True),
    ]
    engine = engine_of_few_programs(model, replace(SETTINGS, **formats))
    engine.start()
    try:
        got = answers(engine, requests)
    finally:
        engine.close()
    assert max(token for outputs in got for token in tokens_of(outputs)) < config.vocab
    if not formats:
        wanted = [one.generate(prompt, max_tokens=request.max_tokens, stop_tokens=())[0].tokens
                  for prompt, request in zip(prompts, requests, strict=False)]  # fmt: skip
        assert [tokens_of(outputs) for outputs in got[: len(prompts)]] == wanted
    scored = got[-1]
    logits = np.asarray(one.logits([[*prompts[0], *tokens_of(scored)]]), np.float64)[0]
    exact = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    found = [*scored[0].prompt_logprobs, *(each for output in scored for each in output.logprobs)]
    for row, each in zip(exact, found, strict=False):
        assert all(token < config.vocab for token, _ in each.likeliest)
        np.testing.assert_allclose(each.logprob, row[each.token], atol=0.1 if formats else 1e-4)
