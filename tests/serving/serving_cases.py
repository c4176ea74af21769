"""Engines for tests, and what they make beside what the same prompts make alone."""

import queue
import random
import time
from dataclasses import replace

import jax
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.parameter_tree import parameters
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.execution.runtime.arrays import initialise
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.text.tokenizer import byte_tokenizer
from meshwright.mesh import MeshShape
from meshwright.serving.engine import layout
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.request import Request
from meshwright.serving.engine.settings import EngineSettings

ONE = MeshShape()
SMALL = replace(PRESETS["tiny"], num_layers=1)
# Room for two texts of the longest kind, so that texts lose their pages to older ones.
TIGHT = EngineSettings(rows=8, context=64, page_size=4, cache_tokens=144, chunk_tokens=16)


def drawn_model(shape=ONE, config=None, dtype="f32", seed=0):
    """A model of bytes with drawn parameters."""
    config = config or PRESETS["tiny"]
    devices = build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(devices):
        params = initialise(parameters(config), jax.random.key(seed), devices, ShardingContext(shape), dtype)
    return LoadedModel(
        config=config, params=params, mesh=devices, mesh_shape=shape, system=parse_system(f"cpu:{shape.num_devices}"),
        dtype=dtype, stored_dtype=dtype, tokenizer=byte_tokenizer(), source={}, seq_len=512,
    )  # fmt: skip


def engine_of_few_programs(*arguments, halvings=0):
    """An engine with decode programs of all rows alone, or also of half of them and so on: it starts in less time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layout, "HALVINGS", halvings)
        return Engine(*arguments)


def small_engine(model=None):
    """An engine whose programs all tests that need no other share, so that they are compiled once a session."""
    return engine_of_few_programs(model or drawn_model(config=SMALL), TIGHT, halvings=1)


def prompts_of(count, *, vocab, longest, seed=0):
    """Prompts of many lengths; a third begin as one before does."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        rest = [draw.randrange(vocab) for _ in range(draw.randint(1, longest // 2))]
        begin = draw.choice(made)[: draw.randint(1, longest // 2)] if made and draw.random() < 0.33 else []
        made.append([*begin, *rest])
    return made


def answers(engine, requests, *, spread_seconds=0.0, seed=0):
    """The outputs of each request, which come at random within some seconds."""
    found, draw = queue.Queue(), random.Random(seed)
    got = [[] for _ in requests]
    for number, request in enumerate(requests):
        engine.submit(request, lambda outputs, number=number: found.put((number, outputs)))
        if spread_seconds:
            time.sleep(draw.random() * 2 * spread_seconds / len(requests))
    left = sum(request.num_completions for request in requests)
    while left:
        number, outputs = found.get(timeout=120)
        got[number] += outputs
        left -= sum(output.done is not None for output in outputs)
    return got


def tokens_of(outputs, completion=0):
    """The tokens of one text."""
    return tuple(token for output in outputs if output.completion == completion for token in output.tokens)


def alone(model, request, completion=0):
    """What `generate` makes of a request's prompt alone."""
    sampling = replace(request.sampling, seed=request.sampling.seed + completion)
    options = {"max_tokens": request.max_tokens, "stop": request.stop, "stop_tokens": request.stop_tokens}
    return model.generate([list(request.prompt)], sampling=sampling, **options)[0]


def greedy_requests(prompts, *, most_tokens, seed=0):
    """A request for each prompt, with a length of its own."""
    draw = random.Random(seed)
    return [Request(prompt=prompt, max_tokens=draw.randint(1, most_tokens)) for prompt in prompts]
