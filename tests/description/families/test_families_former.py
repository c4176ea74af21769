"""Models in plans and runs from when each feature was a field of its own are read as today's.

`tests/data/former_models.json` and `former_plan.yaml` were written then, by commit dffd58e8.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.description.families.registry import PRESETS, model_from_data, model_from_hugging_face
from meshwright.description.step.model import AttentionConfig
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.plan import read_plan

TESTS = Path(__file__).parents[2]
FORMER = json.loads((TESTS / "data" / "former_models.json").read_text())
"""Plain data of presets, and of the models of `tests/references`."""


def today(name):
    """A model as it is now."""
    config = TESTS / "references" / name / "config.json"
    return PRESETS.get(name) or model_from_hugging_face(json.loads(config.read_text()), name=name)


@pytest.mark.parametrize("name", FORMER)
def test_a_former_model_is_the_one_of_today(name):
    assert model_from_data(FORMER[name]) == today(name)


def test_a_former_plan_is_read():
    plan = read_plan(TESTS / "data" / "former_plan.yaml")
    assert plan.workload.model == PRESETS["tiny-gemma3"]
    assert (plan.mesh, plan.hardware) == (MeshShape(fsdp=4, tp=2), "cpu:8")


def test_what_a_former_file_leaves_out_has_its_default():
    sizes = {name: FORMER["tiny"][name] for name in ("name", "num_layers", "embed", "mlp", "num_heads", "num_kv_heads")}
    sizes |= {name: FORMER["tiny"][name] for name in ("head_dim", "vocab", "family")}
    wanted = replace(PRESETS["tiny"], attention=AttentionConfig(windows=(8, None), qk_norm="head"))
    assert model_from_data(sizes | {"qk_norm": True, "sliding_window": 8, "full_attention_every": 2}) == wanted


@pytest.mark.parametrize("name", FORMER["tiny-gemma3"])
def test_any_value_in_a_former_field_is_read_or_refused_in_one_line(name):
    said = []
    for value in ("x", "", -1, 0, 1.5, True, None, [], {}, ["a"], {"a": 1}, 10**12):
        try:
            model_from_data(FORMER["tiny-gemma3"] | {name: value}, "workload.model")
        except MeshwrightError as error:
            said.append(str(error))
    assert not any("\n" in message for message in said)
