"""`meshwright plan` as users type it: the classics, meshes beside each other, own hardware, nothing that fits."""

import json
import re
from pathlib import Path

import pytest

import meshwright.description.hardware
from meshwright.cli.main import main
from meshwright.description.hardware.system import parse_system
from meshwright.planning.plan import read_plan

DATA = Path(meshwright.description.hardware.__file__).parent / "data"
GPT3 = ["plan", "gpt3-175b", "--on", "a100-80gb:1024", "--batch", "1536"]
SCREENS = [
    ["plan", "gpt2-xl", "--on", "a100-80gb:4", "--batch", "64"],
    [*GPT3, "--mesh", "dp=8,tp=8,pp=16"],
    ["plan", "mixtral-8x7b", "--on", "h100:64", "--batch", "512"],
    ["plan", "llama3-8b", "--on", "v5e:4x4", "--batch", "64", "--include-planned"],
    ["plan", "llama3-8b", "--on", "h100:64", "--batch", "512", "--compare", "1,64,1,1", "8,8,1,1", "dp=8,tp=8"],
    ["plan", "llama3-70b", "--on", "v5e:2x4", "--batch", "8"],
    ["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--seq-len", "256", "--ops"],
]

MISTAKES = [
    (["plan", "gpt2-xl", "--on", "h100:8", "--batch", "8", "--seq-len", "2048"], ["2048", "1024 positions", "gpt2-xl"]),
    (["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--price", "4.2"], ["--price has no effect here"]),
    (["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--tokens", "1M", "--price", "nan"], ["price 'nan'"]),
    (["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--memory-headroom", "x"], ["a share from 0 to below 1"]),
    (["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--num-microbatches", "3"], ["multiple of 3 sequences"]),
    (["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--compare", "1,3,1,1"], ["needs 3 devices", "there are 8"]),
    (["plan", "tiny", "--on", "mine:8", "--batch", "16", "--hardware", "none.toml"], ["none.toml"]),
]


@pytest.mark.parametrize("words", SCREENS, ids=" ".join)
def test_a_screen_says_the_answer_first_in_100_columns(words, capsys):
    fits = main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{words[1]} · train · ")
    assert any("step " in line and ("MFU" in line) == ("cpu" not in words[3]) for line in lines[:5])
    assert fits == ("DOES NOT FIT" not in lines[2])
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
    assert first["strategy"]["attention"] == "cudnn"
    assert answer["requested"]["mesh"]["pp"] == 2
    assert answer["requested"]["planned_only"] is None
    assert len(answer["nearby"]) == len(answer["rules_of_thumb"]) == 3
    steps = [record["step_seconds"] for record in answer["candidates"] if record["fits"]][answer["num_tied"] :]
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


def test_a_plan_leads_with_what_runs_and_says_what_could_be_planned_beyond_it(capsys):
    words = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--json"]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert all(record["planned_only"] is None for record in data["candidates"])
    assert {record["strategy"]["attention"] for record in data["candidates"]} == {"flash"}
    assert "physical axes" in data["beyond"]["planned_only"]
    assert data["beyond"]["step_seconds"] < min(record["step_seconds"] for record in data["candidates"])
    assert main([*words, "--include-planned"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert "beyond" not in everything
    assert any(record["planned_only"] for record in everything["candidates"])
    assert everything["num_meshes"] > data["num_meshes"]


def test_of_plans_that_tie_the_simplest_is_first(capsys):
    assert main(["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    first, *others = data["candidates"][: data["num_tied"]]
    assert sum(degree > 1 for degree in first["mesh"].values()) == 1
    faster = [record for record in others if record["step_seconds"] < first["step_seconds"]]
    assert {record["gap_to_best"]["kind"] for record in faster} == {"tied"}
    assert min(record["step_seconds"] for record in faster) > first["step_seconds"] / 1.06


def test_a_training_has_its_days_its_chip_hours_and_its_cost(capsys):
    words = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--json"]
    assert main([*words, "--tokens", "15T", "--price", "4.2"]) == 0
    data = json.loads(capsys.readouterr().out)
    run, rate = data["training_run"], data["candidates"][0]["tokens_per_second"]
    assert run["seconds"] == pytest.approx(15e12 / rate)
    assert run["chip_hours"] == pytest.approx(run["seconds"] / 3600 * 64)
    assert run["cost"] == pytest.approx(4.2 * run["chip_hours"])


def test_memory_beyond_the_headroom_does_not_fit(capsys):
    words = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--mesh", "fsdp=64", "--remat", "none"]
    peaks = {}
    for headroom in ("0", "5.81%", "50%"):
        assert main([*words, "--memory-headroom", headroom, "--json"]) in (0, 1)
        record = json.loads(capsys.readouterr().out)["requested"]
        peaks[headroom] = record["memory_bytes"]["peak"]
    usable = parse_system("v5p:4x4x4").usable_bytes
    assert peaks["50%"] <= usable / 1.5 < peaks["0"] <= usable
    assert main(words) == 0
    assert "(5.81% headroom for the error of the prediction)" in capsys.readouterr().out.replace("\n        ", " ")


def test_mfu_of_the_screen_is_of_what_is_computed_and_the_usual_one_is_explained(capsys):
    words = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "4", "--seq-len", "1048576"]
    assert main([*words, "--explain"]) in (0, 1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "with all attention scores counted" in printed
    shown, usual = (float(share) for share in re.findall(r"MFU (?:is )?([0-9.]+)%", printed)[:2])
    assert shown < 100 < usual


def test_a_plan_is_about_20_lines_and_all_of_it_on_demand(capsys):
    words = ["plan", "llama3-8b", "--on", "h100:64", "--batch", "128"]
    assert main(words) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 22
    assert main([*words, "--explain"]) == 0
    full = capsys.readouterr().out
    for heading in ("rules of thumb", "nearby", "collective  "):
        assert heading in full, heading
        assert heading not in short, heading
    answer = [line for line in short.splitlines() if not line.startswith((" next", "why:"))]
    assert set(answer) <= set(full.splitlines()), "what both say is said in the same words"


def test_a_plan_says_what_to_set_where_it_wants_more_than_jax_takes_of_a_gpu(capsys):
    assert main(["plan", "llama3-8b", "--on", "h100:64", "--batch", "128"]) == 0
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.97" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "tiny", "--on", "h100:8", "--batch", "8"]) == 0
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in capsys.readouterr().out


def test_simulated_devices_have_no_mfu(capsys):
    """They share the cores of one machine, whose peak is not 8 times a core's."""
    assert main(["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--seq-len", "64"]) == 0
    assert "MFU" not in capsys.readouterr().out


def test_a_choice_that_train_cannot_run_says_so(capsys):
    assert main(["plan", "llama3-8b", "--on", "h100:16", "--batch", "64", "--optimizer", "adamw-8bit"]) == 0
    assert "train: optimizer adamw-8bit can be planned" in capsys.readouterr().out


def test_hardware_of_ones_own_is_planned_for_and_kept_in_the_plan(tmp_path, capsys):
    file, written = tmp_path / "mine.toml", tmp_path / "plan.yaml"
    text = (DATA / "h100.toml").read_text()
    file.write_text(
        text.replace('name = "h100"', 'name = "mine"')
        .replace("_bytes = 85520809984", "_bytes = 171e9")
        .replace("\nbytes = 80e9", "\nbytes = 160e9")
    )
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
    assert "nothing fits: this is the closest, and needs " in printed
    assert "to fit: " in printed


def test_the_usual_sequence_of_a_model_is_taken_where_none_is_said(capsys):
    for model, tokens in (("gpt2-xl", "1,024"), ("llama2-7b", "4,096"), ("llama3-8b", "8,192")):
        assert main(["plan", model, "--on", "h100:64", "--batch", "64"]) == 0
        assert f"64 × {tokens} tokens" in capsys.readouterr().out.splitlines()[0]
    assert main(["plan", "llama2-7b", "--on", "h100:64", "--batch", "64", "--seq-len", "8192"]) == 0
    assert "llama2-7b was trained on 4,096 tokens" in " ".join(capsys.readouterr().out.split())


def test_a_sweep_over_lengths_has_the_mfu_of_the_scores_that_are_computed(capsys):
    words = ["plan", "llama3-8b", "--num-layers", "2", "--on", "h100:8", "--batch", "8", "--remat", "block"]
    assert main([*words, "--sweep", "seq-len=262144"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("262,144")]
    assert main([*words, "--seq-len", "262144"]) == 0
    [answer] = [line for line in capsys.readouterr().out.splitlines() if " MFU " in line and "bound" in line]
    share = re.search(r"MFU (\S+%)", answer)[1]
    assert share in row.split()
    assert float(share[:-1]) < 60  # All scores counted, it is half as much again.
