"""Tasks that a run answers as it trains: what `meshwright eval --task` finds of the checkpoint of the same step."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from data_files import write_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import CONFIG

from meshwright.cli.main import main
from meshwright.description.step.strategy import Strategy
from meshwright.errors import MeshwrightError
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.run import read_metrics
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.settings import with_settings
from meshwright.execution.training.watch.tasks import Tasks
from meshwright.execution.training.watching import EvaluationConfig
from meshwright.mesh import MeshShape
from meshwright.planning.options import read_adapters

QUESTIONS = 60


def write_task(path):
    """Questions with choices of several lengths, about which drawn parameters know nothing."""
    rng = np.random.default_rng(3)
    words = ["one", "fourteen", "a", "the question", "be", "not to be", "seven hundred"]
    lines = [
        {
            "query": " ".join(rng.choice(words, rng.integers(1, 4))),
            "choices": rng.choice(words, 4, replace=False).tolist(),
            "gold": int(rng.integers(4)),
        }
        for _ in range(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config_of(tmp_path, **changes):
    """A run that is evaluated and saved after each second of four steps, on tasks alone."""
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question.\n" * 200)
    config = replace(
        CONFIG,
        steps=4,
        optimizer=replace(CONFIG.optimizer, learning_rate=0.05, warmup_steps=1, decay_steps=4),
        data=DataConfig(sources=(str(text),)),
        saving=Saving(every=2),
        evaluating=EvaluationConfig(every=2, tasks=(str(write_task(tmp_path / "words.jsonl")),)),
    )
    return replace(config, **changes)


def evaluated(run, task, capsys):
    """The figures of `meshwright eval`, the log likelihoods left out."""
    assert main(["eval", str(run), "--task", str(task), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    del found["log_likelihoods"]
    return found


def with_adapters(config):
    model = read_adapters(config.workload.model, {"lora_rank": 2, "lora_alpha": 4.0})
    return {"workload": replace(config.workload, model=model)}


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": MeshShape(fsdp=4, tp=2)},
        *(
            pytest.param(changes, marks=pytest.mark.matrix)
            for changes in (
                {"mesh": MeshShape(dp=2, tp=2, sp=2), "strategy": Strategy(tp_stream="whole")},
                {"mesh": MeshShape(fsdp=8), "strategy": Strategy(zero_stage=0, dropout=0.1)},
                {"mesh": MeshShape(fsdp=4, tp=2), "strategy": Strategy(zero_stage=1, num_microbatches=2)},
                with_adapters(CONFIG),
                {"workload": replace(CONFIG.workload, compute_dtype="bf16", param_dtype="bf16")},
            )
        ),
    ],
)
def test_a_run_answers_as_eval_does_with_the_checkpoint_of_the_step(tmp_path, capsys, changes):
    config, run = config_of(tmp_path, **changes), tmp_path / "run"
    run_steps(config, run)
    rows = {row["step"] + 1: row for row in read_metrics(run) if "eval_tasks" in row}
    assert list(rows) == [2, 4]
    found = [row["eval_tasks"]["words"] for row in rows.values()]
    assert found[0] != found[1]  # So that equal figures are of the same parameters.
    assert all(each["questions"] == QUESTIONS and each["acc_stderr"] > 0 for each in found)
    assert all("eval_loss" not in row and row["eval_seconds"] > 0 for row in rows.values())
    task = tmp_path / "words.jsonl"
    assert evaluated(run, task, capsys) == found[1]
    shutil.rmtree(run / "checkpoints" / "4")
    assert evaluated(run, task, capsys) == found[0]
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    curve = events.Scalars("eval/words/acc_norm")
    assert [(event.step, event.value) for event in curve] == [
        (step, pytest.approx(each["acc_norm"])) for step, each in zip(rows, found, strict=True)
    ]


@pytest.mark.matrix
def test_several_processes_answer_as_one_does(tmp_path, capsys):
    config, task = config_of(tmp_path), tmp_path / "words.jsonl"
    words = ["train", "tiny", "--num-layers", "1", "--on", "cpu:8", "--mesh", "2,2,2,1", "--batch", "8"]
    words += ["--seq-len", "16", "--steps", "4", "--learning-rate", "0.05", "--data", *config.data.sources]
    words += ["--eval-every", "2", "--eval-tasks", str(task), "-o", str(tmp_path / "run")]
    command = [sys.executable, "-m", "meshwright", "launch", "-n", "4", "--", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    figures = read_metrics(tmp_path / "run")[-1]["eval_tasks"]["words"]
    assert evaluated(tmp_path / "run", task, capsys) == figures
    assert done.stdout.count("words, after step 4: acc ") == 1


@pytest.mark.matrix
def test_a_run_on_preferences_answers_tasks_too(tmp_path, capsys):
    """It has no held-out loss, and is evaluated by tasks alone."""
    pairs = [{"prompt": f"{n}?", "chosen": f" {n}.", "rejected": f" {n + 1}."} for n in range(40)]
    workload = replace(CONFIG.workload, objective="dpo")
    data = DataConfig(sources=(str(write_lines(tmp_path / "pairs.jsonl", pairs)),))
    run_steps(config_of(tmp_path, workload=workload, data=data), tmp_path / "run")
    figures = read_metrics(tmp_path / "run")[-1]["eval_tasks"]["words"]
    assert evaluated(tmp_path / "run", tmp_path / "words.jsonl", capsys) == figures


def test_the_runs_parameters_are_not_copied(tmp_path, monkeypatch):
    config, params, seen = config_of(tmp_path), {"embedding": object()}, []

    def losses(model, texts):
        seen.append(model.params)
        return [np.zeros(len(text) - 1) for text in texts]

    monkeypatch.setattr(LoadedModel, "losses", losses)
    Tasks(config, build_mesh(config.mesh), None)(params)
    assert seen[0] is params


@pytest.mark.parametrize(
    ("changes", "lines", "said"),
    [
        (
            {"mesh": MeshShape(fsdp=4, pp=2)},
            None,
            r"--eval-tasks has .* all layers, and mesh .* 2 stages",
        ),
        ({}, '{"query": "a", "choices": ["b"], "gold": 0}\n', "choices is .*; it is a list of two texts or more"),
        ({}, '{"query": "a", "choices": ["b", "%s"], "gold": 0}\n' % ("b" * 40), "' bbb.* has 41 tokens of 42"),
        (
            {"evaluating": EvaluationConfig(every=2, tasks=("words.jsonl", "a/words.jsonl"))},
            None,
            "two files called words",
        ),
    ],
)
def test_tasks_that_cannot_be_answered_are_one_line_before_the_first_step(tmp_path, monkeypatch, changes, lines, said):
    config = config_of(tmp_path, **changes)
    monkeypatch.chdir(tmp_path)
    if "pp" in str(config.mesh):
        config = replace(
            config, workload=replace(config.workload, model=replace(config.workload.config, num_layers=2)),
            strategy=Strategy(num_microbatches=2),
        )  # fmt: skip
    if lines is not None:
        (tmp_path / "words.jsonl").write_text(lines)
    with pytest.raises(MeshwrightError, match=said) as error:
        run_steps(config, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_tasks_need_an_interval_and_batches_need_text(tmp_path):
    with pytest.raises(MeshwrightError, match="eval_tasks has no effect without eval_every"):
        EvaluationConfig(tasks=("words.jsonl",))
    config = config_of(tmp_path)
    with pytest.raises(MeshwrightError, match="--eval-batches needs text that is not trained on"):
        run_steps(replace(config, evaluating=replace(config.evaluating, batches=2)), tmp_path / "run")


def test_options_of_an_evaluation_are_taken_in_any_order_and_end_with_it():
    config = with_settings(CONFIG, {"eval_tasks": ("words.jsonl",), "eval_batches": 2, "eval_every": 3})
    assert config.evaluating == EvaluationConfig(every=3, batches=2, tasks=("words.jsonl",))
    assert with_settings(config, {"eval_every": 0}).evaluating == EvaluationConfig()
    with pytest.raises(MeshwrightError, match="eval_tasks has no effect without eval_every"):
        with_settings(config, {"eval_every": 0, "eval_tasks": ("words.jsonl",)})
