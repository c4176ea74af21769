"""What the engine does for TPUs alone, done on other devices: tokens are the same."""

from dataclasses import replace

import pytest
from serving_cases import answers, drawn_model, greedy_requests, prompts_of, tokens_of

from meshwright.description.families.registry import PRESETS
from meshwright.execution.models.generation import stationary
from meshwright.mesh import MeshShape
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.programs import greedy_program, sampling_program, scoring_program
from meshwright.serving.engine.settings import EngineSettings


@pytest.fixture
def tpu_programs(monkeypatch):
    """Programs as on TPUs, which no other test takes from the caches of those that were traced."""
    programs = (greedy_program, sampling_program, scoring_program)

    def forget():
        for program in programs:
            program.cache_clear()

    forget()
    monkeypatch.setattr(stationary, "mesh_platform", lambda: "tpu")
    yield
    forget()


def test_heads_first_and_padded_rows_change_no_token(tpu_programs, monkeypatch):
    padded, pad_single_row = set(), stationary.pad_single_row

    def record(x, layout):
        rows = pad_single_row(x, layout)
        padded.add((x.shape[1], rows.shape[1]))
        return rows

    monkeypatch.setattr(stationary, "pad_single_row", record)
    model = drawn_model(MeshShape(dp=4, tp=2), replace(PRESETS["tiny"], num_layers=1))
    requests = greedy_requests(prompts_of(4, vocab=256, longest=30), most_tokens=8)
    wanted = [model.generate([list(each.prompt)], max_tokens=each.max_tokens, stop_tokens=())[0] for each in requests]
    # A row on each device of dp, one token of which is decoded.
    engine = Engine(model, EngineSettings(rows=1, context=64, page_size=8, chunk_tokens=16))
    (stored,) = engine.runner._params["layers"]
    assert stored["query"].format.layout.major_to_minor == (1, 2, 0, 3)  # [embed, kv_heads, group, head_dim]
    assert stored["down"].format.layout.major_to_minor == (0, 1)
    engine.start()
    try:
        got = answers(engine, requests)
    finally:
        engine.close()
    assert (1, stationary.LEAST_TPU_ROWS) in padded
    assert [tokens_of(outputs) for outputs in got] == [each.tokens for each in wanted]
