"""Keys and values in int8 and fp8 are close to what they were."""

from dataclasses import replace

import numpy as np
import pytest
from serving_cases import answers, drawn_model, engine_of_few_programs, prompts_of

from meshwright.description.families.registry import PRESETS
from meshwright.serving.engine.request import Request
from meshwright.serving.engine.settings import EngineSettings

SMALL = replace(PRESETS["tiny"], num_layers=1)
SETTINGS = EngineSettings(rows=4, context=64, page_size=8, chunk_tokens=16)


def served(model, requests, **settings):
    engine = engine_of_few_programs(model, replace(SETTINGS, **settings))
    engine.start()
    try:
        return answers(engine, requests)
    finally:
        engine.close()


@pytest.mark.parametrize(("narrow", "most"), [("int8", 0.05), ("fp8", 0.05)])
def test_narrow_keys_and_values_move_log_probabilities_little(narrow, most):
    model = drawn_model(config=SMALL)
    prompt = prompts_of(1, vocab=256, longest=60, seed=5)[0]
    request = Request(prompt=prompt, max_tokens=0, prompt_logprobs=0)
    found = {}
    for dtype in (None, narrow):
        ((output,),) = served(model, [request], kv_dtype=dtype)
        found[dtype] = np.array([each.logprob for each in output.prompt_logprobs])
    moved = np.abs(found[narrow] - found[None])
    assert 0 < moved.max() < most
