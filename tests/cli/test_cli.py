"""The commands as users type them: exit codes, one-line errors, JSON, files."""

import json
import subprocess
import sys

import pytest

from meshwright.cli.main import COMMANDS, main
from meshwright.proof.verification.differences import Difference

TRAIN = ["train", "tiny", "--on", "cpu:8", "--seq-len", "256"]

MISTAKES = [
    ([*TRAIN, "--batch", "16", "--mesh", "1,3,2,1"], ["6 devices", "there are 8", "-1"]),
    ([*TRAIN, "--batch", "12", "--mesh", "8,1,1,1"], ["batch 12", "dp*fsdp = 8*1 = 8", "8 or 16"]),
    (["train", "tinny", "--on", "cpu:8", "--batch", "16"], ["no model 'tinny'", "tiny"]),
    (["train", "tiny", "--on", "v9:8", "--batch", "16"], ["chip 'v9'", "v3"]),
    ([*TRAIN, "--batch", "16", "--data", "/no/such/file.txt"], ["there is no file '/no/such/file.txt'"]),
    ([*TRAIN], ["--batch"]),
    ([*TRAIN, "--batch", "16", "--batch-tokens", "4k"], ["--batch"]),
    (["plan", "tiny", "--batch", "16"], ["--on"]),
    (["plan", "tiny", "--on", "cpu:8", "--batch-tokens", "4M", "--seq-len", "3000"], ["4000000", "3000"]),
    (["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--mesh", "pp=8"], ["pp=8", "split nothing"]),
    (["plan", "tiny", "--on", "v5p:4x4", "--batch", "16"], ["v5p"]),
    (["verify", "none.yaml"], ["no plan 'none.yaml'"]),
    (["train", "nowhere", "--resume"], ["no run in 'nowhere'"]),
    (["generate", "nowhere"], ["no directory 'nowhere'"]),
    (["generate", "nowhere", "--num-tokens", "0"], ["--num-tokens is 0"]),
    (["fly"], ["no command 'fly'", "plan"]),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=lambda v: " ".join(v))
def test_a_mistake_ends_with_code_2_and_one_line_that_has_the_numbers(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert all(word in printed.err for word in said), printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name, capsys):
    assert main([name, "--help"]) == 0
    examples = capsys.readouterr().out.partition("\nexamples\n")[2].splitlines()
    assert examples
    assert all(line.startswith(f"  meshwright {name}") for line in examples)


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_plan_prints_candidates_best_first_as_records(capsys):
    assert main(["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--seq-len", "8192", "--json"]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    assert candidates[0]["mesh"] == {"dp": 1, "fsdp": 64, "tp": 1, "sp": 1, "ep": 1, "pp": 1}
    wanted = {"mesh", "step_seconds", "mfu", "flops", "memory_bytes", "fits", "bound", "collectives"}
    assert all(wanted <= set(record) for record in candidates)
    assert {"kind", "axes", "phase", "bytes", "count", "seconds", "exposed_seconds"} <= set(
        candidates[0]["collectives"][0]
    )
    assert {"parameters", "gradients", "optimizer", "activations", "peak"} <= set(candidates[-1]["memory_bytes"])


def test_plan_prints_a_table_that_says_why(capsys):
    assert main(["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "4M", "--seq-len", "8000"]) == 0
    printed = capsys.readouterr().out
    assert "why: " in printed
    assert "compared with the first" in printed
    assert all(len(line) <= 100 for line in printed.splitlines())


def test_plan_writes_a_file_that_verify_compiles(tmp_path, capsys):
    path = str(tmp_path / "plan.yaml")
    words = ["tiny", "--on", "cpu:8", "--batch", "8", "--seq-len", "64", "--mesh", "1,2,4,1"]
    assert main(["plan", *words, "-o", path]) == 0
    capsys.readouterr()
    assert main(["verify", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"]["flops"] == found["compiled"]["flops"]
    timed = {"step", "tokens a second", "MFU"}
    differing = {row["quantity"] for row in found["differences"]} - timed
    assert all(name.startswith("memory") for name in differing)
    assert main(["verify", path, "--tolerance", "1e-9"]) == 1
    printed = capsys.readouterr().out
    assert "all-reduce + slice" in printed
    assert main(["verify", path, "--batch", "8"]) == 2


@pytest.mark.slow
def test_train_verify_and_generate_go_from_command_to_command(tmp_path):
    def meshwright(*words):
        done = subprocess.run(
            [sys.executable, "-m", "meshwright.cli.main", *words], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    model = ("tiny", "--on", "cpu:4", "--mesh", "1,2,2,1", "--batch", "4", "--seq-len", "64")
    assert "measured: step" in meshwright("train", *model, "--steps", "3", "-o", "run")
    resumed = meshwright("train", "run", "--resume", "--steps", "5", "--on", "cpu:2", "--mesh", "1,2,1,1", "--json")
    assert json.loads(resumed)["origin"] == "measured"
    found = json.loads(meshwright("verify", "run", "--json"))
    assert set(found) == {"predicted", "compiled", "measured", "rows", "differences"}
    text = json.loads(meshwright("generate", "run", "--num-tokens", "8", "--num-samples", "2", "--json"))
    assert [piece["prompt"] for piece in text["texts"]] == ["def ", "def "]
    assert [len(piece["tokens"]) for piece in text["texts"]] == [8, 8]
    assert text["measured"].keys() == text["predicted"].keys()


@pytest.mark.matrix  # `tests/verification` has TPUs' reduce-scatters and kernels, and `test_cli_verify.py` the screen.
def test_a_tpu_slice_that_is_not_there_has_the_planned_collectives(capsys):
    """The TPU compiler makes real reduce-scatters; of small sums it makes one over two axes out of two. Attention is in
    a kernel where nothing else is said."""
    words = ["tiny", "--on", "v5e:4x4", "--mesh", "1,4,4,1", "--batch", "16", "--seq-len", "128"]
    assert main(["verify", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["quantity"]: row for row in found["differences"]}
    kinds = {(c["kind"], tuple(c["axes"])) for c in found["compiled"]["collectives"]}
    assert ("reduce-scatter", ("fsdp",)) in kinds
    assert rows["flops"]["causes"] == [{"difference": Difference.OPAQUE_KERNELS}]
    assert not [name for name in rows if name.startswith(("all-gather", "reduce-scatter"))]
