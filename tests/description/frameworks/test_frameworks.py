"""Frameworks as files: each loads, every field has a source, and a plan says for which one it is."""

import tomllib
from dataclasses import replace

import pytest

from meshwright import MeshwrightError, plan
from meshwright.description.frameworks.framework import DATA, find_framework, framework_names, load_framework
from meshwright.description.step.passes.rematerialize import NAMED
from meshwright.description.step.strategy import XLA, Strategy
from meshwright.planning.prediction import predict

OPTIONS = {"on": "h100:64", "batch": 64, "seq_len": 4096, "num_layers": 8}


@pytest.mark.parametrize("name", framework_names())
def test_a_framework_loads_and_each_field_has_its_source(name):
    framework = load_framework(name)
    assert framework.words
    assert set(" ".join(framework.saved.values()).split()) <= {*NAMED}
    tables = [table for table in tomllib.loads((DATA / f"{name}.toml").read_text()).values() if isinstance(table, dict)]
    for entry in (entry for table in tables for entry in table.values()):
        assert set(entry) == {"value", "source"}
        assert len(entry["source"]) > 8
    assert (framework.profile == XLA) == (name == "meshwright")


def test_the_longest_name_in_the_first_text_that_names_one_counts():
    assert find_framework("dgxc-maxtext-llama3", "NVIDIA dgxc") == "maxtext"
    assert find_framework("a row", "Megatron-Bridge recipes") == "megatron-core"
    assert find_framework("megatron-lm of 2023") == "megatron-2022"
    assert find_framework("nothing") is None


def test_an_unknown_framework_is_refused_with_the_nearest():
    with pytest.raises(MeshwrightError, match="no framework 'megatron'; did you mean megatron-2021"):
        plan("llama3-8b", framework="megatron", **OPTIONS)


def test_a_plan_for_a_framework_says_so_and_does_not_run():
    found = plan("llama3-8b", framework="megatron-core", mesh="dp=16,tp=4", **OPTIONS)
    assert found.strategy.profile.name == "megatron-core"
    assert "as megatron-core runs it" in found.planned_only
    assert found.strategy.attention == "cudnn"
    assert any("megatron-core" in note for note in found.predicted.notes)
    best = plan("llama3-8b", framework="megatron-core", **OPTIONS)
    assert best.strategy.zero_stage == 1 or best.mesh.fsdp == 1


def test_the_host_time_of_a_framework_is_in_the_step():
    ours, theirs = (plan("llama3-8b", framework=name, mesh="fsdp=64", **OPTIONS) for name in ("meshwright", "fsdp"))
    assert "host" not in ours.predicted.breakdown_seconds
    assert theirs.predicted.breakdown_seconds["host"] == 0.08
    assert theirs.predicted.memory_bytes["framework"] == 6e9


def test_saved_values_are_not_recomputed():
    seconds = {}
    for saved in ((), ("query", "key", "value"), ("query", "key", "value", "context", "output", "mlp", "down")):
        base = plan("llama3-8b", mesh="fsdp=64", remat="block", **OPTIONS)
        strategy = Strategy(attention="flash", profile=replace(XLA, saved_values=saved))
        record = predict(replace(base.workload, remat="named"), base.mesh, base.system, strategy)
        seconds[len(saved)] = record.breakdown_seconds["recompute"], record.memory_bytes["peak"]
    assert seconds[0][0] > seconds[3][0] > seconds[7][0]
    assert seconds[0][1] < seconds[3][1] < seconds[7][1]
