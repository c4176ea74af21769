"""The published runs that a plan prints as its evidence, and the range that they give its step."""

import json
import sys
from pathlib import Path

import pytest

from meshwright import plan
from meshwright.cli.main import main
from meshwright.planning.evidence.runs import FILE, nearest_runs, published_runs, step_range

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from published_evidence import evidence  # noqa: E402

LLAMA = {"batch": 512, "seq_len": 8192}


def test_the_stored_predictions_are_those_of_today():
    """Otherwise `python benchmarks/published_evidence.py` writes them."""
    stored = {run["name"]: run for run in json.loads(FILE.read_text())}
    today = {run["name"]: run for run in evidence()}
    assert stored.keys() == today.keys()
    for name, run in today.items():
        assert stored[name]["predicted_seconds"] == pytest.approx(run["predicted_seconds"], rel=0.02), name
        assert {**stored[name], "predicted_seconds": 0} == {**run, "predicted_seconds": 0}


def test_a_range_is_of_the_runs_most_like_the_plan():
    found = plan("llama3-8b", on="v5p:4x4x4", mesh="fsdp=64", **LLAMA)
    ours = step_range(found)
    assert ours is not None
    assert ours.like == "of dense models with JAX on v5p"
    runs = [run for run in published_runs() if run.chip == "v5p" and not run.has_experts]
    assert ours.num_runs == len(runs)
    measured = sorted((found.predicted.step_seconds or 0) / (1 + run.error) for run in runs)
    assert measured[0] <= ours.shortest < ours.longest <= measured[-1]


def test_another_framework_has_the_range_of_its_own_runs():
    found = plan(
        "llama3-70b", on="h100:64", mesh="fsdp=2,tp=8,pp=4", framework="megatron-core", batch=128, seq_len=8192
    )
    ours = step_range(found)
    assert ours is not None
    assert ours.like == "of dense models with megatron-core on h100"


def test_simulated_devices_have_no_range():
    assert step_range(plan("tiny", on="cpu:8", mesh="fsdp=8", batch=16, seq_len=64)) is None


def test_the_nearest_runs_are_of_the_same_chip_and_kind_of_model():
    found = nearest_runs(plan("llama3-70b", on="v5p:8x8x8", mesh="fsdp=512", batch=1024, seq_len=8192), 3)
    assert {run.chip for run in found} == {"v5p"}
    assert not any(run.has_experts for run in found)


def test_evidence_is_on_the_screen_and_in_the_json(capsys):
    words = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--seq-len", "8192", "--top", "1"]
    assert main([*words, "--evidence"]) == 0
    said = capsys.readouterr().out
    assert "range: " in said
    assert "maxtext-v5p-32b-1x64" in said
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    low, high = data["range"]["step_seconds"]
    assert low < data["candidates"][0]["step_seconds"] < high
    assert data["evidence"][0]["error"] == pytest.approx(
        data["evidence"][0]["predicted_seconds"] / data["evidence"][0]["measured_seconds"] - 1
    )
