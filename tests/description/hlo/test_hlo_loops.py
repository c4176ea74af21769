import re

import jax
import jax.numpy as jnp
import pytest
import toy_programs as toys

from meshwright.description.hlo.loops import count_executions, trip_count
from meshwright.description.hlo.parser import parse_hlo

LOOP = """HloModule m

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %t = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4]{{0}} get-tuple-element(%t), index=1
  %step = s32[] constant({step})
  %next = s32[] {operation}(%i, %step)
  %y = f32[4]{{0}} sine(%x)
  ROOT %result = (s32[], f32[4]{{0}}) tuple(%next, %y)
}}

%condition (u: (s32[], f32[4])) -> pred[] {{
  %u = (s32[], f32[4]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  %limit = s32[] constant({limit})
  ROOT %more = pred[] compare({compared}), direction={direction}
}}

ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  %start = s32[] constant({start})
  %init = (s32[], f32[4]{{0}}) tuple(%start, %p)
  %loop = (s32[], f32[4]{{0}}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[4]{{0}} get-tuple-element(%loop), index=1
}}
"""
UP = {"start": 0, "step": 1, "limit": 24, "operation": "add", "compared": "%j, %limit", "direction": "LT"}


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ({}, 24),
        ({"direction": "LE"}, 25),
        ({"direction": "NE"}, 24),
        ({"compared": "%limit, %j", "direction": "GT"}, 24),
        ({"start": 4, "step": 3}, 7),
        ({"start": 24, "limit": 0, "step": -1, "direction": "GT"}, 24),
        ({"start": 24, "limit": 0, "operation": "subtract", "direction": "GT"}, 24),
        ({"start": 23, "limit": 0, "step": -1, "direction": "GE"}, 24),
        ({"start": 30}, 0),
        ({"step": 0}, None),
        ({"step": -1}, None),
        ({"step": 5, "direction": "NE"}, None),
        ({"direction": "EQ"}, None),
        ({"operation": "multiply"}, None),
        ({"compared": "%j, %j"}, None),
    ],
)
def test_trips_are_read_from_a_condition_that_compares_a_counter_with_a_constant(changes, trips):
    module = parse_hlo(LOOP.format(**(UP | changes)))
    assert trip_count(module, module.computations["main"].instructions["loop"]) == trips


def test_a_loop_that_may_end_sooner_has_the_most_trips_there_are():
    """As the blocks of an expert's rows: a condition beside that of the counter depends on data."""
    text = LOOP.format(**UP).replace("ROOT %more = ", "%counts = ").replace("direction=LT", "direction=LT\n  {others}")
    others = """%k = f32[4]{0} get-tuple-element(%u), index=1
  %sooner = pred[] custom-call(%k), custom_call_target="of_data"
  ROOT %more = pred[] and(%sooner, %counts)"""
    module = parse_hlo(text.replace("{others}", others))
    assert trip_count(module, module.computations["main"].instructions["loop"]) == 24


def test_a_count_that_the_backend_knows_is_believed():
    known = 'while(%init), backend_config={"known_trip_count":{"n":"7"}}'
    module = parse_hlo(LOOP.format(**UP).replace("while(%init)", known))
    assert trip_count(module, module.computations["main"].instructions["loop"]) == 7


def test_a_body_runs_once_a_trip_and_its_condition_once_more():
    runs = count_executions(parse_hlo(LOOP.format(**UP)))
    assert runs.times == {"body": 24, "condition": 25, "main": 1}
    assert runs.notes == ()


def test_a_loop_that_cannot_be_read_runs_once_and_is_named():
    runs = count_executions(parse_hlo(LOOP.format(**(UP | {"step": 0}))))
    assert runs.times["body"] == 1
    assert runs.notes == ("loop loop: its trips depend on data; counted as one",)


def test_the_conditions_of_compiled_scans_give_the_trips_the_backend_knows():
    def nested(x):
        def outer(x, _):
            return jax.lax.scan(lambda x, _: (jnp.sin(x) @ x, None), x, None, length=5)[0], None

        return jax.lax.scan(outer, x, None, length=3)[0]

    programs = [
        toys.train_step(toys.cpu_mesh(fsdp=2, tp=4), layers=6),
        jax.jit(nested).lower(jax.ShapeDtypeStruct((16, 16), jnp.float32)),
        jax.jit(lambda x: jax.lax.fori_loop(2, 9, lambda i, x: x * i, x)).lower(1.0),
    ]
    found = []
    for program in programs:
        text = program.compile().as_text()
        known = parse_hlo(text)
        bare = parse_hlo(re.sub(r'"known_trip_count":\{"n":"\d+"\}', "", text))
        found += [
            sorted(str(trip_count(module, i)) for i in module.instructions() if i.opcode == "while")
            for module in (known, bare)
        ]
    assert found == [["6", "6"], ["6", "6"], ["3", "5"], ["3", "5"], ["7"], ["7"]]


def test_computations_applied_to_single_elements_do_not_run():
    text = jax.jit(lambda x: x.sum()).lower(jnp.ones(64)).compile().as_text()
    module = parse_hlo(text)
    runs = count_executions(module)
    adders = [i.called("to_apply")[0] for i in module.instructions() if i.opcode == "reduce"]
    assert adders
    assert all(runs.times[name] == 0 for name in adders)
