"""Dataclasses from plain data that people edit: a wrong type, a missing and an unknown field are one line each."""

import json
import math
from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.model import Norms
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.plan import make_plan, plan_from_data, plan_to_data

PLAN = make_plan(
    Workload(model=PRESETS["tiny"], batch=16, seq_len=64, compute_dtype="f32"),
    MeshShape(fsdp=8),
    parse_system("cpu:8"),
    Strategy(),
)
WRONG = ("x", "", -1, 1.5, math.nan, True, None, [], {}, ["a"], {"a": 1}, 10**12)


def edited(path, value):
    """The plan's plain data with one field changed."""
    data = json.loads(json.dumps(plan_to_data(PLAN)))
    *parents, last = path
    inner = data
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return data


def paths(data, start=()):
    for name, value in data.items():
        yield (*start, name)
        if isinstance(value, dict) and name != "predicted":
            yield from paths(value, (*start, name))


@pytest.mark.parametrize("path", list(paths(plan_to_data(PLAN))), ids=".".join)
def test_a_plan_with_any_value_in_any_field_is_read_or_refused_in_one_line(path):
    read = 0
    for value in WRONG:
        try:
            plan = plan_from_data(edited(path, value), name="plan.yaml")
        except MeshwrightError as error:
            said = str(error)
        else:
            said, read = "", read + 1
        if said:
            assert said.startswith("plan.yaml is not a"), (value, said)
            assert "\n" not in said
            continue
        inner = json.loads(json.dumps(plan_to_data(plan)))
        for name in path:
            inner = inner[name]
        assert inner == value or value in ([], {}), (path, value)
    assert read < len(WRONG) - 2, path


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("workload", "model", "embed"), "x", "workload.model.embed is 'x'; it is a whole number"),
        (("workload", "remat"), "blok", "workload.remat is 'blok'; did you mean block?"),
        (("workload", "bacth"), 8, "workload.bacth is not a known field; did you mean batch?"),
        (("strategy", "dropout"), math.nan, "strategy.dropout is nan; it is a number"),
        (("strategy", "zero_stage"), True, "strategy.zero_stage is True; it is one of 0, 1, 2, 3"),
        (("mesh",), {"fsdp": 4}, "mesh fsdp=4 has 4 devices; the hardware has 8"),
        (("mesh", "dp"), True, "mesh.dp is True; it is a whole number"),
        (("hardware",), 8, "hardware is 8; it is text"),
        (("memory_headroom",), -1, "memory_headroom is -1; it is a share from 0 to below 1"),
        (("workload", "model", "norms", "epsilon"), -1, "model tiny has norms.epsilon=-1; it takes a number above 0"),
        (("workload", "model", "num_layers"), 10**12, "it takes a whole number from 1 to 10,000"),
        (("workload", "model", "family", "name"), "nope", "workload.model.family.name is 'nope'; it is one of llama"),
        (("workload", "model", "family", "name"), "lama", "workload.model.family.name is 'lama'; did you mean llama?"),
        (("predicted", "step_seconds"), -1, "predicted.step_seconds is -1; it is a number above 0"),
        (("predicted", "step_seconds"), None, "predicted.step_seconds is None; it is a number above 0"),
        (("predicted", "step_seconds"), math.inf, "predicted.step_seconds is inf; it is a number"),
        (("predicted", "fits"), None, "predicted.fits is None; it is True or False"),
        (("predicted", "mesh"), {"tp": 8}, "predicted.mesh is tp=8; it is the plan's, fsdp=8"),
        (("predicted", "step_seconds"), "x", "predicted.step_seconds is 'x'; it is a number or None"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(path, value, said):
    with pytest.raises(MeshwrightError) as error:
        plan_from_data(edited(path, value), name="plan.yaml")
    assert said in str(error.value)


def test_a_plan_without_a_strategy_is_refused():
    data = plan_to_data(PLAN)
    del data["strategy"]
    with pytest.raises(MeshwrightError, match=r"plan.yaml is not a whole plan: strategy is missing"):
        plan_from_data(data, name="plan.yaml")


def test_a_number_that_yaml_reads_as_text_is_a_number():
    assert plan_from_data(
        edited(("workload", "model", "norms", "epsilon"), "1e-6"), name="it"
    ).workload.model == replace(PRESETS["tiny"], norms=Norms(epsilon=1e-6))


def test_what_is_predicted_of_an_edited_plan_is_predicted_again_and_said():
    found = plan_from_data(edited(("workload", "batch"), 32), name="plan.yaml")
    wanted = make_plan(replace(PLAN.workload, batch=32), PLAN.mesh, PLAN.system, PLAN.strategy)
    note, *_ = found.predicted.notes
    assert note.startswith("predicted again: plan.yaml was edited, or written by another version, and has step ")
    assert replace(found.predicted, notes=()) == replace(wanted.predicted, notes=())
    assert plan_from_data(plan_to_data(PLAN), name="plan.yaml") == PLAN


def test_an_object_made_in_python_is_held_to_the_same_types():
    for make, said in (
        (lambda: Workload(model="tiny", batch=8, seq_len=8), "model is 'tiny'; it is a ModelConfig or a ProgramModel"),
        (lambda: Workload(model=PRESETS["tiny"], batch="8", seq_len=8), "batch is '8'; it is a whole number"),
        (lambda: MeshShape(dp=True), "mesh axis dp=True"),
        (lambda: Strategy(dropout=math.nan), "dropout is nan; it is a number"),
    ):
        with pytest.raises(MeshwrightError, match=said):
            make()
