"""What the engine does for GPUs or TPUs alone, done here with an interpreted kernel: tokens are the same."""

from dataclasses import replace

import pytest
from serving_cases import answers, drawn_model, greedy_requests, prompts_of, tokens_of

from meshwright.description.families.registry import PRESETS
from meshwright.execution.models.generation import cached_attention, paged_cache, stationary
from meshwright.execution.models.generation.paged_kernel import attend_to_pages
from meshwright.execution.models.generation.paged_kernel_tpu import attend_to_pages_on_tpu
from meshwright.mesh import MeshShape
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.programs import greedy_program, sampling_program, scoring_program
from meshwright.serving.engine.settings import EngineSettings


@pytest.fixture
def called(monkeypatch):
    """The shapes of queries that the kernel gets, as on GPUs; no other test gets these programs from their caches."""
    programs, called = (greedy_program, sampling_program, scoring_program), list[tuple[int, ...]]()

    def forget():
        for program in programs:
            program.cache_clear()

    forget()

    def interpret(kernel):
        def interpreted(*args, **options):
            called.append(args[0].shape)
            return kernel(*args, **options, is_interpreted=True)

        return interpreted

    for kernel in (attend_to_pages, attend_to_pages_on_tpu):
        monkeypatch.setattr(cached_attention, kernel.__name__, interpret(kernel))
    yield called
    forget()


SETTINGS = {"rows": 2, "context": 64, "page_size": 8, "chunk_tokens": 16}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "shape", "settings"),
    [
        ("tiny-gemma3", MeshShape(dp=2, tp=2), {}),
        ("tiny-gpt-oss", MeshShape(fsdp=2, sp=2, tp=2), {}),
        ("tiny-gpt-oss", MeshShape(fsdp=2, tp=2), {"cache_split": "sequence", "page_size": 16}),
        ("tiny", MeshShape(), {}),
        ("tiny-deepseek", MeshShape(tp=2), {}),
        ("tiny-deepseek", MeshShape(tp=2), {"cache_split": "sequence", "page_size": 16}),
        ("tiny", MeshShape(fsdp=2, tp=2), {"kv_dtype": "int8"}),
        ("tiny-deepseek", MeshShape(tp=2), {"kv_dtype": "int8"}),
        ("tiny", MeshShape(fsdp=2, tp=2), {"kv_dtype": "fp8"}),
        ("tiny-deepseek", MeshShape(tp=2), {"kv_dtype": "fp8"}),
    ],
)
def test_the_kernel_and_padded_pages_of_tpus_change_no_token(model, shape, settings, called, monkeypatch):
    """Narrow pages are compared with those that are gathered, all others with one device's contiguous cache."""
    loaded = drawn_model(shape, replace(PRESETS[model], num_layers=2))
    requests = greedy_requests(prompts_of(4, vocab=256, longest=30), most_tokens=8)
    if "kv_dtype" in settings:
        wanted = tokens_of_engine(loaded, settings, requests)
        assert not called
        for program in (greedy_program, sampling_program, scoring_program):
            program.cache_clear()
    else:
        alone = drawn_model(MeshShape(), replace(PRESETS[model], num_layers=2))
        wanted = [
            alone.generate([list(each.prompt)], max_tokens=each.max_tokens, stop_tokens=())[0].tokens
            for each in requests
        ]
    for module in (cached_attention, paged_cache):
        monkeypatch.setattr(module, "mesh_platform", lambda: "tpu")
    assert tokens_of_engine(loaded, settings, requests) == wanted
    lengths = {length for _, length, *_ in called}
    assert min(lengths) == 1 < max(lengths)


def tokens_of_engine(loaded, settings, requests):
    engine = Engine(loaded, EngineSettings(**SETTINGS | settings))
    engine.start()
    try:
        return [tokens_of(outputs) for outputs in answers(engine, requests)]
    finally:
        engine.close()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "shape", "cache"),
    [
        ("tiny-gemma3", MeshShape(dp=2, tp=2), None),
        ("tiny", MeshShape(fsdp=2, tp=2), "sequence"),
        ("tiny-gpt-oss", MeshShape(), None),
        ("tiny-deepseek", MeshShape(tp=2), None),
        ("tiny-deepseek", MeshShape(tp=2), "sequence"),
    ],
)
def test_weights_of_each_layer_and_a_kernel_change_no_token(model, shape, cache, called, monkeypatch):
    for module in (stationary, cached_attention):
        monkeypatch.setattr(module, "mesh_platform", lambda: "gpu")
    settings = {} if cache is None else {"cache_split": cache}
    config = replace(PRESETS[model], num_layers=2)
    if latent := config.attention.latent:  # Triton's matmuls sum at least 16 products.
        config = replace(config, attention=replace(config.attention, latent=replace(latent, rope_head_dim=16)))
    loaded = drawn_model(shape, config)
    requests = greedy_requests(prompts_of(4, vocab=256, longest=30), most_tokens=8)
    wanted = [loaded.generate([list(each.prompt)], max_tokens=each.max_tokens, stop_tokens=())[0] for each in requests]
    engine = Engine(loaded, EngineSettings(**SETTINGS, **settings))
    stacks = [stack for name, stack in engine.runner._params.items() if name.endswith("layers")]
    assert [layer["attention_norm"].ndim for stack in stacks for layer in stack] == [1, 1]
    assert all(leaf.is_deleted() for leaf in loaded.params["layers"].values())
    engine.start()
    try:
        got = answers(engine, requests)
    finally:
        engine.close()
    assert [tokens_of(outputs) for outputs in got] == [each.tokens for each in wanted]
    assert 1 in {length for _, length, *_ in called}
