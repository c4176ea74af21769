"""A mesh or a way that cannot be ends plan, verify and train alike: code 2, one line that says why, nothing made."""

import pytest

from meshwright.cli.main import main

REFUSED = [
    ("cpu:2", ["--mesh", "ep=2"], "mesh ep=2 has ep=2, which would split nothing of tiny; use ep=1"),
    ("cpu:16", ["--mesh", "tp=16"], "tp=16 cannot split kv_heads=8 of layers.query: 8 % 16 = 8; use tp=8"),
    ("cpu:3", ["--mesh", "dp=3"], "batch 16 is not a multiple of dp*fsdp = 3*1 = 3; use 15 or 18"),
    ("cpu:4", ["--mesh", "pp=4"], "so that some would split nothing; use pp in 1 to 2"),
    (
        "cpu:8",
        ["--mesh", "sp=8", "--seq-len", "60"],
        "sequence length 60 is not a multiple of sp = 8; use 56 or 64",
    ),
    ("cpu:8", ["--mesh", "model=8"], "names axis 'model'; here that is tp; the axes are dp, fsdp, tp, sp, ep or pp"),
]

WAYS = [
    (
        "plan",
        ["--num-microbatches", "8"],
        "num_microbatches=8 cannot cut a device's share of the batch, 16 over dp*fsdp=4",
    ),
    (
        "train",
        ["--num-microbatches", "8"],
        "num_microbatches=8 cannot cut a device's share of the batch, 16 over dp*fsdp=4",
    ),
    ("plan", ["--zero-stage", "1"], "zero_stage=1 would have no effect on mesh dp=4"),
    ("train", ["--zero-stage", "1"], "zero_stage=1 would have no effect on mesh dp=4"),
    ("train", ["--master-weights"], "master_weights=True would have no effect on mesh dp=4"),
]


def refused(words, capsys):
    """The one line that a command ends with."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("command", ["plan", "verify", "train"])
@pytest.mark.parametrize(("on", "more", "said"), REFUSED, ids=[on + more[1] for on, more, _ in REFUSED])
def test_a_mesh_that_cannot_be_ends_every_command(command, on, more, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    length = [] if "--seq-len" in more else ["--seq-len", "64"]
    base = [command, "tiny", "--on", on, "--batch", "16", *length]
    assert said in refused(base + more, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "more", "said"), WAYS, ids=lambda value: str(value)[:24])
def test_a_way_that_would_do_nothing_ends_a_command(command, more, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = [command, "tiny", "--on", "cpu:4", "--batch", "16", "--seq-len", "64", "--mesh", "dp=4"]
    assert said in refused(base + more, capsys)
    assert list(tmp_path.iterdir()) == []
