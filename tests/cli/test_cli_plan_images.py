"""`meshwright plan` of image models, and the ops of a step."""

import json

import pytest

from meshwright.cli.main import main
from meshwright.description.step.images import RESNETS

RESNET50 = ["plan", "resnet50", "--on", "a100-80gb:8", "--batch", "256"]


def test_plan_chooses_data_parallelism_and_says_why(capsys):
    assert main(RESNET50) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == "resnet50 · train · 256 images of 224 × 224 · bf16 · SGD with momentum · a100-80gb:8"
    assert lines[1] == "4 meshes, 4 legal, 4 fit"
    assert lines[3].startswith("  dp=8   step ")
    assert "images/s" in lines[3]
    assert "why: 25.6 M parameters" in printed
    assert "all-reduce  dp    backward         51.2 MB" in printed
    assert max(map(len, lines)) <= 100


def test_plan_of_images_as_json(capsys):
    assert main([*RESNET50, "--json"]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    assert candidates[0]["mesh"]["dp"] == 8
    assert candidates[0]["images_per_second"] == pytest.approx(256 / candidates[0]["step_seconds"])
    assert [record["step_seconds"] for record in candidates] == sorted(record["step_seconds"] for record in candidates)


@pytest.mark.parametrize("name", RESNETS)
def test_every_resnet_is_planned_on_a_mesh_of_ones_own(name, capsys):
    assert main(["plan", name, "--on", "v5e:2x4", "--batch", "64", "--mesh", "dp=-1,fsdp=2"]) == 0
    printed = capsys.readouterr().out
    assert "1 mesh, 1 legal" in printed
    assert "dp=4,fsdp=2   step " in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--mesh", "tp=8"], "mesh tp=8 has tp=8, which would split nothing of resnet50; use tp=1"),
        (
            ["--seq-len", "2048"],
            "an option of a training plan, and this is a plan of a model of images; leave it out",
        ),
        (["--batch-tokens", "4M"], "--batch-tokens is an option of a training plan"),
        (["--num-layers", "2", "--ops"], "--num-layers is an option of a training plan"),
        (["--remat", "none"], "--remat is an option of a training plan"),
        (["--compare", "8,1,1,1", "1,8,1,1"], "--compare is an option of a training plan"),
        (["--num-microbatches", "2"], "--num-microbatches is an option of a training plan"),
        (["--sweep", "chips=8..16"], "--sweep is an option of a training plan"),
        (["--serve", "decode"], "resnet50 is a model of images"),
        (["-o", "plan.yaml"], "-o is an option of a training plan"),
    ],
)
def test_what_images_do_not_take_is_told_in_one_line(more, message, capsys):
    assert main([*RESNET50, *more]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet50", "--on", "a100-80gb:8"], "resnet50 needs --batch"),
        (["resnet50", "--batch", "256"], "resnet50 needs hardware: --on"),
        (["resnet51", "--on", "a100-80gb:8", "--batch", "8"], "no model 'resnet51'; did you mean resnet50, "),
        (["resnet50", "--on", "a100-80gb:8", "--batch", "250"], "batch 250 is not a multiple of dp*fsdp"),
    ],
)
def test_what_a_plan_of_images_wants_is_told(words, message, capsys):
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_images_are_not_trained(capsys):
    assert main(["verify", "resnet50", "--on", "cpu:8", "--batch", "8"]) == 2
    assert "resnet50 is a model of images" in capsys.readouterr().err


LLAMA = ["plan", "llama3-8b", "--on", "a100-80gb:8", "--batch", "64", "--seq-len", "2048"]
OPS = [*LLAMA, "--remat", "block", "--mesh", "fsdp=4,tp=2", "--ops"]


def test_ops_are_printed_in_the_notation_with_what_they_take(capsys):
    assert main(OPS) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    start = lines.index("   X[B_fsdp, S, D] @ Wquery[D_fsdp, K_tp, G, H] -> query[B_fsdp, S, K_tp, G, H]")
    assert lines[start - 1] == " layers.query"
    assert "[32768, 4096] @ [4096, 2048]" in lines[start + 1]
    assert "550 Gflop" in lines[start + 1]
    assert lines[start + 2].startswith("       all-gather over fsdp of Wquery, 16.8 MB: 32,768 flops a byte, of ")
    assert "attention is counted as computed" in printed
    first = next(place for place, line in enumerate(lines) if line.startswith("ops of a step on fsdp=4,tp=2"))
    assert max(map(len, lines[first:-1])) <= 100


def test_ops_as_json_sum_to_the_flops_of_the_record(capsys):
    assert main([*OPS, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    total = sum(op["flops"] * (op["times"] + op["times_again"]) for op in data["ops"])
    assert total == data["candidates"][0]["flops"]
