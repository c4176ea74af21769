"""`meshwright plan` as users type it: the classics, meshes beside each other, own hardware, nothing that fits."""

import json
from pathlib import Path

import pytest

import meshwright.hardware
from meshwright.cli.main import main
from meshwright.planner import read_plan

DATA = Path(meshwright.hardware.__file__).parent / "data"
GPT3 = ["plan", "gpt3-175b", "--on", "a100-80gb:1024", "--batch", "1536"]
SCREENS = [
    ["plan", "gpt2-xl", "--on", "a100-80gb:4", "--batch", "64"],
    [*GPT3, "--mesh", "dp=8,tp=8,pp=16"],
    ["plan", "mixtral-8x7b", "--on", "h100:64", "--batch", "512"],
    ["plan", "llama3-8b", "--on", "v5e:4x4", "--batch", "64", "--runnable"],
    ["plan", "llama3-8b", "--on", "h100:64", "--batch", "512", "--compare", "1,64,1,1", "8,8,1,1", "dp=8,tp=8"],
    ["plan", "llama3-70b", "--on", "v5e:2x4", "--batch", "8"],
    ["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--seq-len", "256", "--ops"],
]

MISTAKES = [
    (["plan", "gpt2-xl", "--on", "h100:8", "--batch", "8", "--seq-len", "2048"], ["2048", "1024 positions", "gpt2-xl"]),
    (["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--runnable", "--attention", "flash"], ["--attention"]),
    (["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--num-microbatches", "3"], ["multiple of 3 sequences"]),
    (["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--compare", "1,3,1,1"], ["wants 3 devices", "8 are there"]),
    (["plan", "bloom-176b", "--on", "cpu:8", "--batch", "16", "--runnable"], ["bloom-176b has positions='alibi'"]),
    (["plan", "tiny", "--on", "mine:8", "--batch", "16", "--hardware", "none.toml"], ["none.toml"]),
]


@pytest.mark.parametrize("words", SCREENS, ids=" ".join)
def test_a_screen_says_the_answer_first_in_100_columns(words, capsys):
    fits = main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{words[1]} · train · ")
    assert any("step " in line and "MFU" in line for line in lines[:5])
    assert fits == ("DOES NOT FIT" not in lines[3])
    assert max(map(len, lines)) <= 100
    assert any(line.startswith(" next") for line in lines[-12:])


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=lambda v: " ".join(v))
def test_a_mistake_is_one_line_with_the_numbers(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert all(word in printed for word in said), printed


def test_a_mesh_that_is_asked_for_is_laid_beside_the_best(capsys):
    assert main([*GPT3, "--mesh", "dp=8,tp=8,pp=16"]) == 0
    printed = capsys.readouterr().out
    assert "asked for: dp=8,tp=8,pp=16" in printed
    assert "loses because: " in printed
    (header,) = [
        line for line in printed.splitlines() if line.strip().endswith("dp=8,tp=8,pp=16") and "asked" not in line
    ]
    assert len(header.split()) == 2
    for row in ("step", "MFU", "  pipeline bubble", "memory", "  parameters", "  exposed over tp"):
        assert any(line.startswith(row + " ") for line in printed.splitlines()), row


def test_the_data_has_the_candidates_how_they_run_and_what_is_near(capsys):
    assert main(["plan", "llama3-8b", "--on", "h100:16", "--batch", "64", "--mesh", "fsdp=8,pp=2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    first = answer["candidates"][0]
    assert {"mesh", "step_seconds", "remat", "strategy", "gap_to_best", "planned_only"} <= set(first)
    assert first["strategy"]["attention"] == "flash"
    assert answer["requested"]["mesh"]["pp"] == 2
    assert "can be planned" in answer["requested"]["planned_only"]
    assert len(answer["nearby"]) == len(answer["rules_of_thumb"]) == 3
    steps = [record["step_seconds"] for record in answer["candidates"] if record["fits"]]
    assert steps == sorted(steps)
    assert answer["num_ways"] > len(answer["candidates"])


def test_compare_lays_meshes_in_the_order_asked(capsys):
    words = ["plan", "llama3-8b", "--on", "h100:64", "--batch", "512", "--compare", "8,8,1,1", "1,64,1,1", "--json"]
    assert main(words) == 0
    compared = json.loads(capsys.readouterr().out)["compared"]
    assert [record["mesh"]["fsdp"] for record in compared] == [8, 64]
    assert [record["gap_to_best"]["kind"] for record in compared].count("best") == 1


def test_the_way_that_is_said_is_the_way_that_is_planned(capsys):
    said = ["--remat", "block", "--num-microbatches", "2", "--zero-stage", "3", "--attention", "scores",
            "--optimizer", "sgd", "--param-dtype", "bf16"]  # fmt: skip
    assert main(["plan", "llama3-8b", "--on", "h100:16", "--batch", "64", *said, "--json"]) == 0
    for record in json.loads(capsys.readouterr().out)["candidates"]:
        way = record["strategy"]
        assert (record["remat"], way["num_microbatches"], way["attention"]) == ("block", 2, "scores")
        assert (way["zero_stage"], way["optimizer"]) == (3, "sgd")


def test_runnable_plans_what_train_runs(capsys):
    assert main(["plan", "llama3-8b", "--on", "v5e:4x4", "--batch", "64", "--runnable", "--json"]) == 0
    for record in json.loads(capsys.readouterr().out)["candidates"]:
        assert record["planned_only"] is None
        assert record["mesh"]["ep"] == 1
        assert record["strategy"]["attention"] == "flash"


def test_a_choice_that_train_cannot_run_says_so_and_names_one_that_it_can(capsys):
    assert main(["plan", "llama3-8b", "--on", "h100:16", "--batch", "64", "--optimizer", "adamw-8bit"]) == 0
    printed = capsys.readouterr().out
    assert "train: optimizer adamw-8bit can be planned" in printed
    assert "the best that it runs today: " in printed


def test_hardware_of_ones_own_is_planned_for_and_kept_in_the_plan(tmp_path, capsys):
    file, written = tmp_path / "mine.toml", tmp_path / "plan.yaml"
    text = (DATA / "h100.toml").read_text()
    file.write_text(text.replace('name = "h100"', 'name = "mine"').replace("bytes = 80e9", "bytes = 160e9"))
    words = ["plan", "llama3-8b", "--on", "mine:8", "--batch", "64", "--hardware", str(file), "-o", str(written)]
    assert main(words) == 0
    assert "mine:8 (8 devices" in capsys.readouterr().out
    plan = read_plan(written)
    assert plan.system.chip.name == "mine"
    file.write_text(text.replace("bytes_per_second = 3.35e12", "bytes_per_second = -1"))
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert "mine.toml" in printed
    assert "bytes_per_second" in printed


def test_where_nothing_fits_it_says_by_how_much_and_what_would_help(capsys):
    assert main(["plan", "llama3-8b", "--on", "v5e:2x4", "--batch", "8", "--optimizer", "adamw"]) == 1
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" in printed
    assert "nothing fits: this is the closest, and wants " in printed
    assert "to fit: " in printed


def test_the_usual_sequence_of_a_model_is_taken_where_none_is_said(capsys):
    for model, tokens in (("gpt2-xl", "1,024"), ("llama2-7b", "4,096"), ("llama3-8b", "8,192")):
        assert main(["plan", model, "--on", "h100:64", "--batch", "64"]) == 0
        assert f"64 × {tokens} tokens" in capsys.readouterr().out.splitlines()[0]
    assert main(["plan", "llama2-7b", "--on", "h100:64", "--batch", "64", "--seq-len", "8192"]) == 0
    assert "llama2-7b was trained on 4,096 tokens" in " ".join(capsys.readouterr().out.split())
