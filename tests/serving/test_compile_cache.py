"""The cache of compiled programs: what a second start finds there, and how few programs a first one waits for."""

import os
from collections import Counter
from dataclasses import replace

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from serving_cases import alone, answers, drawn_model, tokens_of

from meshwright.description.families.registry import PRESETS
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.compile_cache import use_compile_cache
from meshwright.mesh import MeshShape
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.request import Request
from meshwright.serving.engine.settings import EngineSettings

SETTINGS = EngineSettings(rows=1, context=32, page_size=32, chunk_tokens=16)
OPTIONS = (
    "jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs", "jax_compilation_cache_include_metadata_in_key",
)  # fmt: skip


@pytest.fixture
def unchanged_options():
    """JAX's cache is the process's: it is off again for the tests that follow."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def events(unchanged_options):
    """How often JAX compiled a program, or found it in the cache, by name."""
    found = Counter()

    def count(event, **_):
        found[event.rsplit("/", 1)[-1]] += 1

    jax.monitoring.register_event_listener(count)
    yield found
    jax.monitoring.unregister_event_listener(count)


def test_a_second_start_compiles_nothing_and_answers_the_same(tmp_path, events):
    requests = [
        Request(prompt=[5, 6, 7], max_tokens=6),
        Request(prompt=[5, 6, 7, 8], max_tokens=2, prompt_logprobs=1),
    ]
    model = drawn_model(MeshShape(tp=2), replace(PRESETS["tiny"], num_layers=1))
    wanted = [alone(model, request).tokens for request in requests]
    found = []
    for _ in range(2):
        jax.clear_caches()
        assert use_compile_cache(str(tmp_path)) is not None
        events.clear()
        engine = Engine(model, SETTINGS)
        try:
            engine.start()
            at_ready = events["compile_requests_use_cache"]
            got = answers(engine, requests)
            engine.runner.wait_compiled()
        finally:
            engine.close()
        assert [tokens_of(outputs) for outputs in got] == wanted
        assert at_ready < events["compile_requests_use_cache"], "scoring is compiled once the server is ready"
        scores = [output.prompt_logprobs for output in got[1] if output.prompt_logprobs]
        found.append((events["cache_misses"], events["cache_hits"], scores))
    (misses, _, scores), (misses_again, hits, scores_again) = found
    assert misses_again == 0
    assert hits >= misses > 0
    assert scores == scores_again


@pytest.mark.parametrize(("shape", "before"), [(MeshShape(), 41), (MeshShape(tp=8), 41), (MeshShape(dp=8), 29)])
def test_a_server_is_ready_after_half_of_its_programs(shape, before):
    """before: the programs of steps that were compiled before a server was ready, of which all but 3 are such."""
    model = replace(drawn_model(shape, replace(PRESETS["tiny"], num_layers=1)), seq_len=4096)
    runner = Engine(model, EngineSettings(cache_tokens=8 * 4096)).runner
    first = runner.first_programs
    assert len(first) + 3 <= before / 2
    # What is compiled later has the same rows and lengths, by narrower tables.
    assert {(kind, shape.rows, shape.length) for kind, shape in first} == {
        (kind, shape.rows, shape.length) for kind, shape in runner.programs
    }
    assert {max(shape.entries) for _, shape in first} == {max(max(shape.entries) for _, shape in runner.programs)}


def test_a_cache_is_where_it_is_asked_for_or_nowhere(tmp_path, monkeypatch, unchanged_options):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    jax.config.update("jax_compilation_cache_dir", None)
    found = use_compile_cache()
    assert found is not None
    assert found.parent == tmp_path / "user" / "meshwright" / "executables"
    assert found.stat().st_mode & 0o077 == 0, "who can write there can run code"
    assert use_compile_cache(str(tmp_path / "own")).parent == tmp_path / "own"
    assert use_compile_cache("off") is None
    assert not jax.config.jax_enable_compilation_cache
    (tmp_path / "file").write_text("")
    with pytest.raises(MeshwrightError, match=r"--compile-cache .*file cannot be written: not a directory; give a"):
        use_compile_cache(str(tmp_path / "file"))


def test_what_was_not_used_for_longest_is_deleted_at_a_start(tmp_path, monkeypatch, unchanged_options):
    monkeypatch.setattr("meshwright.execution.runtime.compile_cache.MAX_BYTES", 25)
    directory = use_compile_cache(str(tmp_path))
    for age, name in enumerate(("new-cache", "old-cache", "oldest-cache")):
        (directory / name).write_bytes(b"0123456789")
        os.utime(directory / name, (1e9 - age, 1e9 - age))
    (directory / "autotuning").mkdir()
    os.utime(directory / "autotuning", (1, 1))
    # Read since it was written.
    os.utime(directory / "oldest-cache", (2e9, 1e9 - 2))
    use_compile_cache(str(tmp_path))
    assert sorted(path.name for path in directory.iterdir()) == ["autotuning", "new-cache", "oldest-cache"]


def test_a_directory_that_jax_was_told_of_is_kept(tmp_path, unchanged_options):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert use_compile_cache() == tmp_path
