"""`--config`, options in a file under those that are typed; `--dry-run`; the file that begins a run again."""

import json
from dataclasses import replace

import pytest

from meshwright.cli.main import main
from meshwright.cli.train.args import Args
from meshwright.cli.words.read import read_words
from meshwright.errors import MeshwrightError
from meshwright.execution.training.library import new_run
from meshwright.execution.training.run_directory.resolved import resolved_yaml
from meshwright.planning.library import plan_to_run

RUN = """\
# A run
model: tiny
on: cpu:8
batch_tokens: 4Ki
mesh: {fsdp: 2, tp: 4}
seq-len: 64
learning_rate: 1e-3
rate: {embedding: 0.1, layers: 2}
no_decay: [query, "*norm*"]
data: a.txt
from_scratch: false
anyway: true
seed:
"""


def read(path, *words):
    return read_words(["--config", str(path), *words], Args, kinds={}, hints={})


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def test_a_file_has_options_as_they_would_be_typed(config):
    args, typed = read(config)
    assert args.model == "tiny"
    assert (args.workload.on, args.workload.batch_tokens, args.workload.seq_len) == ("cpu:8", "4Ki", "64")
    assert args.run.mesh == "fsdp=2,tp=4"
    assert args.optimizer.learning_rate == 0.001
    assert args.optimizer.rate == ("embedding=0.1", "layers=2")
    assert args.optimizer.no_decay == ("query", "*norm*")
    assert args.data.data == ("a.txt",)
    assert (args.run.anyway, args.start.from_scratch, args.start.seed) == (True, False, None)
    assert typed["batch_tokens"] == "--batch-tokens"
    assert not {"seed", "from_scratch", "config"} & set(typed)


def test_what_is_typed_counts_before_the_file(config):
    args, _ = read(config, "small", "--learning-rate", "2", "--data", "b.txt", "c.txt", "--seq-len=32")
    assert args.model == "small"
    assert (args.optimizer.learning_rate, args.data.data, args.workload.seq_len) == (2.0, ("b.txt", "c.txt"), "32")
    assert args.optimizer.rate == ("embedding=0.1", "layers=2")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stepz: 3", "run.yaml, line 14: there is no option 'stepz'; did you mean steps?"),
        ("config: other.yaml", "run.yaml, line 14: there is no option 'config'"),
        ("model: small", "run.yaml, line 14: model is given twice"),
        ("seed: x", "run.yaml, line 14: --seed is 'x'; it takes a whole number"),
        ("seed: [1, 2]", "run.yaml, line 14: seed takes one value, and has 2 values"),
        ("resume: 3", "run.yaml, line 14: resume takes true or false"),
        ("lr_schedule: cosin", "run.yaml, line 14: --lr-schedule is 'cosin'; did you mean cosine?"),
        ("steps: {a: {b: 1}}", "run.yaml, line 14: steps holds lists or mappings within another"),
        ("steps: [", "is not YAML: expected"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_its_place(config, line, said):
    config.write_text(RUN + line + "\n")
    with pytest.raises(MeshwrightError) as raised:
        read(config)
    assert said in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_that_is_not_there_or_says_nothing_is_one_line(config):
    with pytest.raises(MeshwrightError, match=r"cannot read .*none\.yaml: No such file"):
        read(config.parent / "none.yaml")
    for text in ("", "tiny", "- tiny"):
        config.write_text(text)
        with pytest.raises(MeshwrightError, match="has no options; it is YAML"):
            read(config)


def test_a_plans_file_is_the_model(tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    words = ["--on", "cpu:8", "--batch", "16", "--seq-len", "64", "--mesh", "fsdp=8"]
    assert main(["plan", "tiny", *words, "-o", str(plan)]) == 0
    capsys.readouterr()
    args, _ = read(plan, "--steps", "3")
    assert (args.model, args.run.steps) == (str(plan), "3")


def run_of(args, directory):
    """The config of the run that some arguments mean."""
    plan = plan_to_run(args.model, args.options)
    return new_run(args.model, plan, directory, steps=args.run.steps, settings=args.settings)


TINY = ["tiny", "--on", "cpu:8", "--batch", "32", "--seq-len", "64", "--mesh", "fsdp=2,tp=4"]


@pytest.mark.parametrize(
    "words",
    [
        TINY,
        [
            *TINY,
            "--optimizer",
            "muon",
            "--lr-schedule",
            "wsd",
            "--decay-share",
            "0.3",
            "--clip-norm",
            "0",
            "--seed",
            "5",
        ],
        [*TINY, "--rate", "query=0.5", "layers=2", "--no-decay", "layers", "--decay-steps", "90", "--steps", "40"],
        [*TINY, "--num-microbatches", "2", "--tp-stream", "whole", "--remat", "attention", "--on-bad-step", "skip"],
        [*TINY, "--lora-rank", "4", "--freeze", "embedding", "--dtype", "bf16", "--memory-headroom", "10%"],
        ["plan.yaml", "--steps", "7", "--zero-stage", "1", "--weight-decay", "0"],
    ],
    ids=lambda words: " ".join(words[9:]) or "tiny",
)
def test_a_run_leaves_options_that_mean_it_again(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *TINY, "-o", "plan.yaml"]) == 0
    capsys.readouterr()
    begun = run_of(read_words(words, Args, kinds={}, hints={})[0], tmp_path / "run")
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(begun))
    monkeypatch.chdir(tmp_path.parent)
    assert run_of(read(tmp_path / "resolved.yaml")[0], tmp_path / "again") == begun


@pytest.mark.parametrize(
    "written",
    ["fields: '[q],a'", "fields: {qa.jsonl: '[q],a', more.jsonl: a}", 'fields: ["qa.jsonl=[q],a", a]'],
)
def test_templates_by_source_begin_a_run_again(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("qa.jsonl", "more.jsonl"):
        (tmp_path / name).write_text('{"q": "why?", "a": "because of that"}\n' * 300)
    text = "model: tiny\non: cpu:8\nbatch: 8\nseq_len: 64\ndata: {qa.jsonl: 0.5, more.jsonl: 0.5}\n"
    (tmp_path / "run.yaml").write_text(f"{text}{written}\n")
    begun = run_of(read(tmp_path / "run.yaml")[0], tmp_path / "run")
    assert begun.data.template("qa.jsonl") == "[q],a"
    assert begun.data.template("more.jsonl") == ("[q],a" if written == "fields: '[q],a'" else "a")
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(begun))
    assert run_of(read(tmp_path / "resolved.yaml")[0], tmp_path / "again") == begun


def test_a_run_that_no_options_mean_leaves_none(tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    assert main(["plan", *TINY, "-o", str(plan)]) == 0
    begun = run_of(read_words([str(plan)], Args, kinds={}, hints={})[0], tmp_path / "run")
    assert resolved_yaml(replace(begun, source=None)) is None
    assert resolved_yaml(replace(begun, workload=replace(begun.workload, batch=64))) is None


@pytest.mark.slow
def test_a_dry_run_says_memory_and_time_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "tiny", "--on", "cpu:8", "--mesh", "fsdp=8", "--batch", "16", "--seq-len", "64", "--dry-run"]
    assert main([*words, "--steps", "1M", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["tokens"] == 16 * 64 * 10**6
    assert found["seconds"] == pytest.approx(found["step_seconds"] * 10**6)
    assert 0.5 < found["memory_bytes"]["compiled"] / found["memory_bytes"]["predicted"] < 2
    assert main([*words, "--steps", "1M"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny · train · 16 × 64 tokens · f32 · remat block · cpu:8"
    assert lines[2].startswith("memory: ")
    assert lines[4].startswith("to the end: 1,000,000 steps, 1,024,000,000 tokens, ")
    assert list(tmp_path.iterdir()) == []
    assert main([*words, "--process-id", "1"]) == 2
    assert capsys.readouterr().err == "error: --process-id has no effect with --dry-run; leave it out\n"
