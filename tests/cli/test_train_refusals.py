"""`train` and `generate`: a mistake is one line and exit code 2, and nothing is made; an interruption is 130."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from meshwright.cli.main import main
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.execution.training.run_directory.run import RunConfig, begin_run
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape

TINY = ["tiny", "--on", "cpu:8", "--mesh", "1,8,1,1", "--batch", "16", "--seq-len", "64"]
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "hidden_act": "silu",
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
RUN = RunConfig(
    workload=Workload(model=PRESETS["tiny"], batch=16, seq_len=64, compute_dtype="f32"),
    mesh=MeshShape(fsdp=8),
    hardware="cpu:8",
    optimizer=Optimizer(),
    steps=200,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, texts and a run to begin from."""
    root = tmp_path_factory.mktemp("folder")
    for name, more in {"hf": {}, "large": {"vocab_size": 512}, "small": {"vocab_size": 128}, "bare": {}}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(LLAMA | more))
    (root / "hf" / "model.safetensors").write_bytes(b"")
    (root / "hf" / "tokenizer.json").write_text("{}")
    (root / "cut").mkdir()
    (root / "cut" / "config.json").write_text(json.dumps(LLAMA))
    (root / "cut" / "model.safetensors").write_bytes(b"")
    (root / "words").mkdir()
    (root / "words" / "config.json").write_text(json.dumps(LLAMA))
    (root / "words" / "tokenizer.json").write_text("{}")
    (root / "short.txt").write_text("abc" * 100)
    (root / "random.txt").write_bytes(bytes(range(256)) * 100)
    (root / "zero.txt").write_bytes(b"abc\0" * 1000)
    (root / "lines.jsonl").write_text('{"text": "a"}\n' * 1000)
    (root / "empty.txt").write_text("\n\n")
    (root / "bad.jsonl").write_text('{"prompt": [1]}\n{"prompt": [1.5]}\n')
    (root / "folder" / "is").mkdir(parents=True)
    begin_run(root / "folder", RUN, 0)
    model = replace(PRESETS["tiny"], vocab=512)
    (root / "large_run").mkdir()
    begin_run(root / "large_run", replace(RUN, workload=replace(RUN.workload, model=model)), 0)
    return root


TRAIN = [
    (["--learning-rate", "nan"], "learning-rate is"),
    (["--learning-rate", "-1"], "learning_rate is -1.0"),
    (["--learning-rate", "0"], "learning_rate is 0.0"),
    (["--learning-rate", "inf"], "learning-rate is"),
    (["--seed", "-1"], "seed is -1"),
    (["--seed", "99999999999999999999999"], "seed is 99999999999999999999999"),
    (["--save-every", "-1"], "save_every is -1"),
    (["--steps", "0"], "steps is '0'"),
    (["--steps", "-5"], "steps is '-5'"),
    (["--data", "short.txt"], "the data has 300 bytes, 4 windows of 64; a batch has 16"),
    (["--data", "random.txt"], "random.txt is not UTF-8 text"),
    (["--data", "zero.txt"], "zero.txt is binary (a zero byte at 3)"),
    (["--data", "lines.jsonl", "--fields", "b"], "lines.jsonl, line 1: the field b is missing; there are text"),
    (["-o", "short.txt"], "short.txt is not a directory"),
    (["-o", ""], "-o"),
    (["-o", "."], "without a name"),
    (["-o", "/proc/x"], "no file can be made in /proc"),
    (["-o", "/dev/null/x"], "/dev/null is not a directory"),
    (["-o", "x" * 300], ""),
    (["-o", "folder"], "folder holds a run that wrote no checkpoint"),
    (["--change"], "--change is for a run that continues"),
    (["--weights", "nowhere"], "there is no directory 'nowhere'; --weights takes one with config.json"),
    (["--weights", "short.txt"], "there is no directory 'short.txt'"),
    (["--weights", "folder"], "it is that of a run"),
    (["--weights", "cut"], "tiny is not the model of"),
    (["--weights", "cut", "--from-scratch"], "--from-scratch draws new parameters, and --weights cut are given"),
    (["--start-seconds", "60"], "--start-seconds goes with --coordinator"),
    (["--coordinator", "garbage", "--num-processes", "2", "--process-id", "0"], "garbage is not HOST:PORT"),
]


def one_line(capsys, words, code=2):
    """The line with which a command ends."""
    assert main(words) == code
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1, said
    return said


@pytest.mark.parametrize(("words", "message"), TRAIN, ids=lambda value: str(value)[:40])
def test_what_cannot_be_meant_is_one_line(folder, monkeypatch, capsys, words, message):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    output = [] if "-o" in words else ["-o", "new"]
    assert message in one_line(capsys, ["train", *TINY, *output, *words])
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("hf", 2, "hf/tokenizer.json is not a tokenizer"),
        ("hf/config.json", 2, "hf/tokenizer.json is not a tokenizer"),
        ("cut", 2, "cut/model.safetensors is cut short or no safetensors file"),
        ("words", 2, "words holds tokenizer.json and no weights; --from-scratch"),
        ("large", 2, "large has a vocabulary of 512; text is read and written as bytes, which are 256"),
        ("small", 2, "128"),
        ("llama3-8b", 1, "does not fit: a device needs 21.8 GB of the 875 MB it has"),
    ],
)
def test_a_model_that_cannot_be_trained_so_is_named(folder, monkeypatch, capsys, model, code, message):
    monkeypatch.chdir(folder)
    assert message in one_line(capsys, ["train", model, *TINY[1:], "-o", "new"], code)
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "32"], "batch is 32; folder was begun with 16: --change"),
        (["--learning-rate", "0.5"], "learning_rate is 0.5; folder was begun with 0.003"),
        (["--remat", "none"], "remat is 'none'"),
        (["--optimizer", "sgd", "--change"], "optimizer is 'sgd'; the checkpoints"),
        (["-o", "elsewhere"], "stays in its directory"),
        (["--from-scratch"], "--from-scratch is for a new run"),
        (["--weights", "hf"], "--weights is for a new run"),
    ],
)
def test_a_run_that_goes_on_refuses_what_it_cannot_take(folder, monkeypatch, capsys, words, message):
    monkeypatch.chdir(folder)
    assert message in one_line(capsys, ["train", "folder", "--resume", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["folder", "--temperature", "nan"], "temperature is"),
        (["folder", "--temperature", "inf"], "temperature is"),
        (["folder", "--temperature", "-1"], "temperature is -1"),
        (["folder", "--num-tokens", "100000000000"], "need a cache of 205 TB"),
        (["folder", "--num-tokens", "0"], "num-tokens is 0"),
        (["folder", "--seed", "-1"], "seed is -1"),
        (["folder", "--prompt", ""], "prompt"),
        (["folder", "--top-p", "0"], "top_p is 0.0"),
        (["folder", "--top-k", "2", "--temperature", "0"], "--top-k has no effect at --temperature 0"),
        (["folder", "x", "--prompt", "y"], "PROMPT and --prompt both give prompts"),
        (["folder", "--chat"], "--chat without a prompt"),
        (["folder", "--prompts", "empty.txt"], "empty.txt has no prompt"),
        (["folder", "--prompts", "none.txt"], "cannot read none.txt"),
        (["folder", "--prompts", "lines.jsonl"], "lines.jsonl, line 1: the object has text; it has prompt, or"),
        (["folder", "--prompts", "bad.jsonl"], "bad.jsonl, line 2: prompt is '[1.5]'; it is a text or a list of"),
        (["folder"], "has no checkpoint yet"),
        (["hf"], "needs hardware: --on"),
        (["hf", "--on", "cpu:8"], "hf/model.safetensors is cut short"),
        (["bare", "--on", "cpu:8"], "bare holds no weights"),
    ],
)
def test_what_cannot_be_generated_is_one_line(folder, monkeypatch, capsys, words, message):
    monkeypatch.chdir(folder)
    assert message in one_line(capsys, ["generate", *words])


def train(directory, *more):
    """A process that trains."""
    command = [sys.executable, "-u", "-m", "meshwright.cli.main", "train", *more]
    return subprocess.Popen(command, cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def interrupt(process, *, after, number=signal.SIGINT, wait=0.0):
    """Send a signal once a line is printed; all lines, and the seconds until the end."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if after in line:
            break
    time.sleep(wait)
    began = time.monotonic()
    process.send_signal(number)
    rest, _ = process.communicate(timeout=300)
    return "".join(lines) + rest, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupted_run_says_where_it_stopped_and_how_it_goes_on(tmp_path):
    begun = train(tmp_path, *TINY, "--num-layers", "1", "--steps", "2000", "-o", "run")
    said, seconds = interrupt(begun, after="compiling", wait=0.5)
    assert begun.returncode == 130
    assert seconds < 5  # Python and the compiler may be in one another's way for a moment.
    assert said.endswith("stopped before the first step\n")
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
    begun = train(tmp_path, *TINY, "--num-layers", "1", "--steps", "2000", "-o", "run")
    # A terminal that was closed ends a run as SIGTERM does, unless the tests themselves run under nohup.
    number = signal.SIGTERM if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else signal.SIGHUP
    said, _ = interrupt(begun, after="step    1/2000", number=number)
    assert begun.returncode == 0, said
    assert "stopping after this step; once more stops at once" in said
    assert said.endswith(" of 2000; `meshwright train run --resume` continues\n")
    assert "Traceback" not in said
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"checkpoints", "compiled.json", "config.json", "metrics.jsonl", "resolved.yaml", "tensorboard"}
