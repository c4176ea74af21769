"""An exception of a request ends that request, and no other: the same engine answers the next one."""

import logging
import re
from dataclasses import replace

import pytest
from serving_cases import answers, drawn_model, engine_of_few_programs, tokens_of

from meshwright.description.families.registry import PRESETS
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.execution.models.inference.stream import GrowingText
from meshwright.serving.engine import active_request
from meshwright.serving.engine import engine as engines
from meshwright.serving.engine.active_request import ActiveRequest
from meshwright.serving.engine.constraints import Matcher
from meshwright.serving.engine.drafts import NgramDrafts
from meshwright.serving.engine.prefix import PrefixCache
from meshwright.serving.engine.request import Constraint, Request
from meshwright.serving.engine.runner import Runner
from meshwright.serving.engine.scheduler import Scheduler
from meshwright.serving.engine.settings import EngineSettings

PLAIN = Request(prompt=[1, 2, 3], max_tokens=3)
BAD = replace(PLAIN, prompt=[9, 9, 9])
SAMPLED = replace(BAD, sampling=Sampling(temperature=1.0, seed=1))
WORDS = Constraint("regex", "[a-z]+")

HOOKS = [
    (GrowingText, "add", BAD),
    (ActiveRequest, "begin", BAD),
    (ActiveRequest, "grow", BAD),
    (ActiveRequest, "output", BAD),
    (ActiveRequest, "add_scores", replace(BAD, max_tokens=0, prompt_logprobs=1)),
    (active_request, "token_logprob", replace(BAD, prompt_logprobs=1)),
    (engines, "token_logprob", replace(BAD, logprobs=1)),
    (Matcher, "mask", replace(BAD, constraint=WORDS)),
    (Matcher, "accept", replace(BAD, constraint=WORDS)),
    (NgramDrafts, "draft", BAD),
    (NgramDrafts, "extend", BAD),
    (Runner, "row_state", SAMPLED),
    (Runner, "run", BAD),
    (PrefixCache, "match", BAD),
    (PrefixCache, "insert", replace(BAD, max_tokens=12)),
    (engines, "packed_inputs", BAD),
    (engines, "mask_of", SAMPLED),
    (engines, "targets_of", replace(BAD, max_tokens=0, prompt_logprobs=1)),
    (Scheduler, "add", BAD),
    (Scheduler, "end", BAD),
    (Scheduler, "tables", BAD),
    (Scheduler, "append_tokens", BAD),
]


@pytest.fixture(scope="module")
def engine():
    settings = EngineSettings(rows=2, context=32, page_size=4, chunk_tokens=16, num_drafts=1)
    found = engine_of_few_programs(drawn_model(config=replace(PRESETS["tiny"], num_layers=1)), settings)
    found.start()
    found.good = tokens_of(answers(found, [PLAIN])[0])
    yield found
    found.close()


@pytest.mark.parametrize(("owner", "name", "request_"), HOOKS, ids=lambda each: getattr(each, "__name__", None))
def test_an_exception_in_a_hook_ends_its_request_alone(engine, monkeypatch, caplog, owner, name, request_):
    def fail(*arguments, **options):
        raise ZeroDivisionError("a hook is broken")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(owner, name, fail)
        (outputs,) = answers(engine, [request_])
    (error,) = [output.error for output in outputs if output.done]
    assert outputs[-1].done == "failed"
    (fault,) = re.findall(r"internal error (\w+) \(ZeroDivisionError\)", error)
    assert fault in caplog.text
    assert "a hook is broken" in caplog.text
    assert tokens_of(answers(engine, [PLAIN])[0]) == engine.good
    assert engine.is_idle


@pytest.mark.parametrize("name", ["grow", "output"])
def test_the_requests_beside_one_that_raises_are_answered(engine, monkeypatch, name):
    before = getattr(ActiveRequest, name)

    def fail(active, *arguments, **options):
        if active.request.prompt == BAD.prompt:
            raise ZeroDivisionError
        return before(active, *arguments, **options)

    monkeypatch.setattr(ActiveRequest, name, fail)
    good, bad, other = answers(engine, [PLAIN, BAD, PLAIN])
    assert bad[-1].done == "failed"
    assert tokens_of(good) == tokens_of(other) == engine.good


def test_a_step_without_the_request_that_cannot_be_in_it_runs(engine, monkeypatch):
    before = engines.packed_inputs

    def fail(step, *arguments):
        if any(part.sequence.request.prompt == BAD.prompt for part in step.slices):
            raise ZeroDivisionError
        return before(step, *arguments)

    monkeypatch.setattr(engines, "packed_inputs", fail)
    good, bad = answers(engine, [PLAIN, BAD])
    assert bad[-1].done == "failed"
    assert tokens_of(good) == engine.good


def test_who_cannot_be_told_is_no_matter_of_others(engine, caplog):
    def refuse(outputs):
        raise OSError("nobody is there")

    engine.submit(replace(BAD, max_tokens=20), refuse)
    assert tokens_of(answers(engine, [PLAIN])[0]) == engine.good
    assert "nobody is there" in caplog.text


def test_a_constraint_that_fails_in_the_middle_is_a_refusal(engine, monkeypatch):
    def fail(*arguments):
        raise MeshwrightError("the constraint refuses token 5")

    monkeypatch.setattr(Matcher, "accept", fail)
    (outputs,) = answers(engine, [replace(BAD, constraint=WORDS)])
    assert (outputs[-1].done, outputs[-1].error) == ("refused", "the constraint refuses token 5")
