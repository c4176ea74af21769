"""`meshwright plan … --serve decode` and `--serve prefill` as users type them."""

import json

import pytest

from meshwright.cli.main import main
from meshwright.cli.plan.serving import thinned
from meshwright.planning.serving.plan import read_serving_plan, serving_plan_from_data
from meshwright.planning.serving.search import ServingPoint
from meshwright.units import parse_seconds

DECODE = ["plan", "llama2-7b", "--on", "v5e:2x2", "--serve", "decode", "--prompt-len", "1984", "--output-len", "64"]
PREFILL = ["plan", "llama2-7b", "--on", "v5e:2x2", "--serve", "prefill", "--prompt-len", "2048"]
NARROW = ["--weight-dtype", "int8", "--kv-dtype", "int8"]


def printed(words, capsys, code=0):
    assert main(words) == code
    return capsys.readouterr().out


def test_the_screen_has_the_answer_why_the_others_and_the_frontier(capsys):
    out = printed([*DECODE, *NARROW, "--latency", "12ms", "--top", "3", "--explain"], capsys)
    head, counts, _, answer, why, *_ = out.splitlines()
    assert head == "llama2-7b · decode · 1984 + 64 tokens · v5e:2x2 · 12.0 ms asked for"
    assert counts == "weights int8, cache int8, matmuls bf16; 12 layouts, 12 legal, 12 fit"
    assert answer.startswith("  tp=4   batch ")
    assert " ms a token " in answer
    assert why.startswith("  why: HBM cache bound: cache is ")
    for line in ("latency limits the batch", "matmuls are compute bound from batch 121", "in 128 pages of 16, 0%"):
        assert line in out
    assert "prefill on " in out
    assert "compared with the first" in out
    assert " frontier: no layout that fits has both a shorter step and more tokens a second" in out
    assert " step    weights " in out
    assert "all-reduce  tp" in out


def test_a_plan_answers_in_about_twenty_lines_and_says_how_to_see_the_rest(capsys):
    out = printed([*DECODE, *NARROW, "--latency", "12ms"], capsys).splitlines()
    assert len(out) <= 22
    assert out[-1] == " next   --explain   or  -o serve.yaml"


def test_a_line_is_never_wider_than_the_screen(capsys):
    words = [*DECODE, *NARROW, "--latency", "12ms"]
    assert max(map(len, printed(words, capsys).splitlines())) <= 100


def test_json_is_one_object_that_plans_are_read_from(capsys):
    data = json.loads(printed([*DECODE, *NARROW, "--latency", "12ms", "--json"], capsys))
    assert set(data) == {"candidates", "why", "frontier", "thresholds", "prefill_systems"}
    best, *_ = (serving_plan_from_data(plan, name="it") for plan in data["candidates"])
    assert best.seconds <= 0.012
    assert data["thresholds"]["compute_bound_batch"] == pytest.approx(120.12, abs=0.01)
    rates = [point["tokens_per_second"] for point in data["frontier"]]
    assert rates == sorted(rates)


def test_the_first_plan_is_written(tmp_path, capsys):
    out = printed([*DECODE, *NARROW, "--latency", "12ms", "-o", str(tmp_path / "serve.yaml")], capsys)
    plan = read_serving_plan(tmp_path / "serve.yaml")
    assert f"batch {plan.batch:,}" in out
    assert plan.serving.latency_seconds == 0.012
    assert [path.name for path in tmp_path.iterdir()] == ["serve.yaml"]


def test_a_prefill_is_planned_by_its_prompts(capsys):
    out = printed([*PREFILL, "--latency", "1.5s"], capsys)
    assert out.startswith("llama2-7b · prefill · 2048 tokens · v5e:2x2 · 1.50 s asked for\nweights bf16,")
    assert " a batch " in out
    assert "prefill on" not in out


def test_one_mesh_is_looked_at(capsys):
    out = printed([*DECODE, "--batch", "8", "--mesh", "fsdp=2,tp=2"], capsys)
    assert "3 layouts, 3 legal, 3 fit" in out
    assert "tp=4" not in out.replace("on tp=4", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [*DECODE, "--seq-len", "64"],
            ["is an option of a training plan", "a serving plan (--serve", "use --prompt-len"],
        ),
        ([*DECODE, "--batch-tokens", "4k"], ["--batch-tokens is an option of a training plan", "use --batch"]),
        ([*DECODE, "--compute-dtype", "bf16"], ["--compute-dtype is now --dtype"]),
        ([*DECODE, "--sweep", "batch=1,2"], ["--sweep is an option of a training plan", "leave it out"]),
        ([*DECODE, "--optimizer", "sgd"], ["--optimizer is an option of a training plan", "leave it out"]),
        ([*DECODE, "--latency", "30"], ["'30' is not a time", "30ms"]),
        ([*DECODE, "--latency", "0ms"], ["'0ms' is not a time"]),
        ([*DECODE, "--weight-dtype", "int3"], ["dtype 'int3' is not known"]),
        ([*DECODE, "--dtype", "fp8"], ["v5e has no peak for fp8"]),
        ([*DECODE, "--mesh", "pp=4"], ["none of 1 layouts", "a server has no pipeline"]),
        ([*DECODE[:-2], "--output-len", "0"], ["output_len is '0'"]),
        ([*DECODE[:2], *DECODE[4:]], ["needs hardware: --on"]),
        (
            ["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--latency", "30ms"],
            ["--latency is an option of a serving plan (--serve decode)"],
        ),
        (
            ["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--kv-dtype", "int8"],
            ["option of a serving plan"],
        ),
    ],
    ids=lambda v: " ".join(v[-3:]),
)
def test_a_mistake_ends_with_code_2_and_one_line(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert all(word in error for word in said), error


def test_what_does_not_fit_is_printed_as_such(capsys):
    out = printed(["plan", "llama3-70b", *DECODE[2:]], capsys, code=1)
    assert "DOES NOT FIT" in out
    assert "why: nothing fits: 35.3 GB of weights" in out


def test_what_is_late_is_printed_as_such(capsys):
    out = printed([*DECODE, "--latency", "1us"], capsys, code=1)
    assert "TOO LATE" in out
    assert "nothing is in time" in out


@pytest.mark.parametrize(("text", "seconds"), [("30ms", 0.03), ("1.5 s", 1.5), ("200us", 2e-4)])
def test_a_time_is_read_with_its_unit(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


def test_a_frontier_is_thinned_evenly_with_its_ends():
    points = tuple(ServingPoint(None, batch, 0.0, 0.0) for batch in range(9))
    assert [point.batch for point in thinned(points, 5)] == [0, 2, 4, 6, 8]
    assert [point.batch for point in thinned(points, 1)] == [0, 8]
    assert thinned(points, 20) == list(points)
