"""A server of linear attention: each row's state is its own, through chunks of prompts, preemption and other meshes."""

from dataclasses import replace

import numpy as np
import pytest
from serving_cases import alone, answers, drawn_model, engine_of_few_programs, greedy_requests, prompts_of, tokens_of

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.attention import LinearAttention
from meshwright.description.step.model import AttentionConfig
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.serving.engine.draft_programs import why_not_draft
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.request import Request
from meshwright.serving.engine.settings import EngineSettings

LINEAR = LinearAttention(num_heads=4, num_value_heads=8, key_dim=8, value_dim=8, layers=(True, False))
DELTA = replace(
    PRESETS["tiny"],
    name="delta",
    num_layers=2,
    attention=AttentionConfig(qk_norm="head", has_output_gate=True, linear=LINEAR),
)
# Room for two texts of the longest kind, so that texts lose their pages to older ones.
TIGHT = EngineSettings(rows=8, context=64, page_size=4, cache_tokens=144, chunk_tokens=16)


def check_many(engine, count):
    """Prompts in chunks, some of which begin alike, more than there are rows and pages for."""
    requests = greedy_requests(prompts_of(count, vocab=256, longest=40), most_tokens=24)
    got = answers(engine, requests)
    wanted = [alone(engine.model, request) for request in requests]
    assert [tokens_of(outputs) for outputs in got] == [each.tokens for each in wanted]


def test_many_requests_get_what_each_gets_alone():
    engine = engine_of_few_programs(drawn_model(config=DELTA), TIGHT, halvings=1)
    engine.start()
    try:
        check_many(engine, 24)
        counters = engine.scheduler.counters
        assert counters.preempted > 0
        # Pages of a prefix have no state, so none is taken from another text.
        assert counters.cached_tokens == 0
        prompt = prompts_of(1, vocab=256, longest=60)[0]
        (outputs,) = answers(engine, [Request(prompt=prompt, max_tokens=3, logprobs=1, prompt_logprobs=0)])
        logits = np.asarray(engine.model.logits([[*prompt, *tokens_of(outputs)]]), np.float64)[0]
        wanted = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        found = [*outputs[0].prompt_logprobs, *(each for output in outputs for each in output.logprobs)]
        for row, each in zip(wanted, found, strict=False):
            np.testing.assert_allclose(each.logprob, row[each.token], atol=1e-4)
    finally:
        engine.close()


@pytest.mark.matrix
@pytest.mark.parametrize("split", ["batch", "sequence"])
def test_on_a_mesh_that_splits_weights_heads_and_rows(split):
    settings = replace(TIGHT, cache_split=split, cache_tokens=576)
    engine = engine_of_few_programs(drawn_model(MeshShape(dp=2, fsdp=2, tp=2), DELTA), settings)
    engine.start()
    try:
        check_many(engine, 16)
    finally:
        engine.close()


def test_what_a_state_does_not_allow_is_refused_by_name():
    # The config and the mesh are looked at first; other parameters are drawn in no time.
    model = replace(drawn_model(config=replace(PRESETS["tiny"], num_layers=1)), config=DELTA)
    with pytest.raises(MeshwrightError, match="num_drafts is 2; the state of delta's linear attention cannot go back"):
        Engine(model, replace(TIGHT, num_drafts=2))
    assert why_not_draft(DELTA, PRESETS["tiny"], 2).startswith("the state of delta's linear attention")
    with pytest.raises(MeshwrightError, match="sp=2, over which the linear attention of delta is not split"):
        Engine(replace(model, mesh_shape=MeshShape(sp=2)), TIGHT)
