"""Weights, keys and values in int8: close to what they were, and steps compute with just what they stand for."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from serving_cases import answers, drawn_model, engine_of_few_programs, greedy_requests, prompts_of, tokens_of

from meshwright.description.families.registry import PRESETS
from meshwright.execution.models.quantised.weights import Int8Weight, in_int8, layer_weights
from meshwright.mesh import MeshShape
from meshwright.serving.engine.request import Request
from meshwright.serving.engine.settings import EngineSettings

SMALL = replace(PRESETS["tiny"], num_layers=1)
SETTINGS = EngineSettings(rows=4, context=64, page_size=8, chunk_tokens=16)


def stands_for(model):
    """The model whose weights are those that its int8 weights stand for."""
    with jax.set_mesh(model.mesh):
        stored = in_int8(model.params, model.config)
        assert any(isinstance(leaf, Int8Weight) for leaf in stored["layers"].values())
        layers = [layer_weights(stored["layers"], number, np.float32) for number in range(model.config.num_layers)]
        params = {**model.params, "layers": jax.tree.map(lambda *each: jax.numpy.stack(each), *layers)}
    return replace(model, params=params)


def served(model, requests, **settings):
    engine = engine_of_few_programs(model, replace(SETTINGS, **settings))
    engine.start()
    try:
        return answers(engine, requests)
    finally:
        engine.close()


@pytest.mark.parametrize("shape", [MeshShape(), pytest.param(MeshShape(fsdp=2, tp=2), marks=pytest.mark.matrix)])
def test_weights_in_int8_are_computed_with_as_what_they_stand_for(shape):
    model = drawn_model(shape, SMALL)
    exact = stands_for(model)
    for path in ("query", "down"):
        before, after = (np.asarray(each.params["layers"][path]) for each in (model, exact))
        assert 0 < np.abs(before - after).max() <= np.abs(before).max() / 127
    requests = greedy_requests(prompts_of(6, vocab=256, longest=30), most_tokens=12)
    got = served(model, requests, weight_dtype="int8")
    wanted = [exact.generate([list(each.prompt)], max_tokens=each.max_tokens, stop_tokens=())[0] for each in requests]
    assert [tokens_of(outputs) for outputs in got] == [each.tokens for each in wanted]


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
