"""Load on a small server that speaks OpenAI's completions: lengths, times, kinds of failure, the command's screen."""

import asyncio
import json
import threading
from itertools import pairwise
from random import Random
from statistics import mean, median, stdev

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from meshwright.cli.main import main
from meshwright.errors import MeshwrightError
from meshwright.pictures.load_chart import LoadPoint, write_load_chart
from meshwright.serving.load.drive import Answer, Arrivals, Target, drive, find_model
from meshwright.serving.load.figures import load_figures, read_slo
from meshwright.serving.load.requests import (
    OUTPUT_LEN,
    PROMPT_LEN,
    LoadRequest,
    random_length,
    random_requests,
    read_requests,
)

SEEN = []
"""The bodies of all requests, and how many were being answered when each came."""
OPEN = [0]

FAILURES = {
    "refuse": "status 429",
    "cut": "cut off",
    "drop": "connection lost",
    "fail": "error in the stream",
    "junk": "no stream of completions",
    "sleep": "timeout",
}
"""The kind of failure that each of these prompts gets."""


async def completions(request):
    body = await request.json()
    SEEN.append((body, OPEN[0], request.headers.get("authorization")))
    if body["prompt"] == "refuse":
        return JSONResponse({"error": {"message": "full"}}, 429)
    return StreamingResponse(parts(body), media_type="text/event-stream")


async def parts(body):
    OPEN[0] += 1
    try:
        for number in range(body["max_tokens"]):
            await asyncio.sleep(0.002)
            data = {"choices": [{"text": "a"}]}
            if number == 1 and str(body["prompt"]) in FAILURES:
                match body["prompt"]:
                    case "cut":
                        return
                    case "drop":
                        raise ConnectionResetError
                    case "junk":
                        yield "data: {\n\n"
                    case "sleep":
                        await asyncio.sleep(5)
                data = {"error": {"message": "broken"}}
            yield f"data: {json.dumps(data)}\n\n"
        count = len(body["prompt"])
        usage = {"prompt_tokens": count, "completion_tokens": body["max_tokens"], "total_tokens": 0}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        OPEN[0] -= 1


async def models(_):
    return JSONResponse({"data": [{"id": "small"}]})


@pytest.fixture(scope="module")
def url():
    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", models)]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


@pytest.mark.parametrize(("expected", "deviation"), [PROMPT_LEN, OUTPUT_LEN])
def test_lengths_have_the_mean_and_the_deviation_that_are_published(expected, deviation):
    rng = Random(0)
    lengths = [random_length(rng, expected, deviation) for _ in range(100_000)]
    assert mean(lengths) == pytest.approx(expected, rel=0.02)
    assert stdev(lengths) == pytest.approx(deviation, rel=0.1)  # Of so long a tail it is known no better.


def test_requests_are_as_long_as_vllm_takes_them_and_follow_from_a_seed():
    requests = random_requests(2000, 1)
    prompts, outputs = ([len(r.prompt) for r in requests], [r.max_tokens for r in requests])
    assert min(prompts) >= 4
    assert 1000 < max(prompts) <= 1024
    assert 1500 < max(p + o for p, o in zip(prompts, outputs, strict=True)) <= 2048
    assert median(prompts) < 0.7 * mean(prompts)
    assert requests == random_requests(2000, 1) != random_requests(2000, 2)


def test_short_lengths_keep_the_form_and_variants_keep_the_lengths():
    requests = random_requests(500, 1, max_len=64)
    assert max(len(r.prompt) + r.max_tokens for r in requests) <= 64
    assert len({len(r.prompt) for r in requests}) > 10
    other = random_requests(500, 1, max_len=64, variant=1)
    assert [len(r.prompt) for r in other] == [len(r.prompt) for r in requests]
    assert all(a.prompt != b.prompt for a, b in zip(requests, other, strict=True) if len(a.prompt) > 8)
    assert {(len(r.prompt), r.max_tokens) for r in random_requests(9, 1, prompt_len=32, output_len=16)} == {(32, 16)}
    with pytest.raises(MeshwrightError, match="at least 48 tokens; --max-len is 40"):
        random_requests(1, 1, max_len=40, prompt_len=32, output_len=16)


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a text", "max_tokens": 3}\n\n{"prompt": [1, 2]}\n')
    assert read_requests(path, output_len=9) == [LoadRequest("a text", 3, False), LoadRequest([1, 2], 9, False)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no prompts"),
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 has no prompt"),
        ('{"prompt": ""}', "line 1 has no prompt"),
        ('{"prompt": "a"}\n{"prompt": [1, "a"]}', "line 2 has no prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1 has max_tokens 0"),
        ('{"prompt": "a", "max_tokens": true}', "line 1 has max_tokens True"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_a_file_without_prompts_is_refused(text, reason, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(MeshwrightError, match=reason):
        read_requests(path, output_len=9)


def test_answers_are_timed_and_counted(url):
    requests = random_requests(6, 0, prompt_len=5, output_len=4)
    answers = drive(Target(url, "small", "a key"), requests, Arrivals(concurrency=2), seed=0)
    assert [(a.error, a.prompt_tokens, a.output_tokens, len(a.arrivals)) for a in answers] == [("", 5, 4, 4)] * 6
    for answer in answers:
        times = [answer.begin, *answer.arrivals, answer.end]
        assert times == sorted(times)
        assert answer.end - answer.begin > 4 * 0.002
    bodies = [body for body, _, _ in SEEN]
    assert sorted(body["prompt"] for body in bodies) == sorted(request.prompt for request in requests)
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in bodies} == {("small", 4, True)}
    assert {key for *_, key in SEEN} == {"Bearer a key"}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_concurrency_is_kept(url, concurrency):
    drive(
        Target(url, "small"),
        random_requests(12, 0, prompt_len=2, output_len=60),
        Arrivals(concurrency=concurrency),
        seed=0,
    )
    assert max(others for _, others, _ in SEEN) == concurrency - 1


def test_a_rate_does_not_wait_for_answers(url):
    """Answers take 0.6 s at least; at 100 a second, 20 requests are sent in about 0.2 s."""
    requests = random_requests(20, 0, prompt_len=2, output_len=300)
    answers = drive(Target(url, "small"), requests, Arrivals(rate=100.0), seed=3)
    begins = sorted(answer.begin for answer in answers)
    assert max(begins) < min(answer.end for answer in answers)
    gaps = [later - earlier for earlier, later in pairwise(begins)]
    assert max(gaps) > 3 * median(gaps)  # of a Poisson process they differ
    assert max(others for _, others, _ in SEEN) > 10


def test_failures_are_counted_by_kind(url):
    requests = [LoadRequest(prompt, 3, False) for prompt in [*FAILURES, "cut", "fine"]]
    load = Arrivals(concurrency=8)
    answers = drive(Target(url, "small", timeout_seconds=0.5), requests, load, seed=0)
    figures = load_figures(load, answers, {})
    assert figures.errors == {kind: 1 + (kind == "cut off") for kind in FAILURES.values()}
    assert (figures.num_answered, figures.output_tokens) == (1, 3)
    assert figures.reasons == {"status 429": "full", "error in the stream": "broken"}
    assert "ignore_eos" not in SEEN[0][0]


def test_a_server_that_is_not_there_is_an_answer_too():
    answers = drive(Target("http://127.0.0.1:9", "small"), random_requests(2, 0), Arrivals(concurrency=1), seed=0)
    assert {answer.error for answer in answers} == {"no connection"}
    assert load_figures(Arrivals(concurrency=1), answers, {}).latencies == {}
    with pytest.raises(MeshwrightError, match=r"no server answers at http://127\.0\.0\.1:9"):
        find_model("http://127.0.0.1:9", None, 1.0)


def test_figures_of_known_answers():
    """Ten answers of 3 tokens in 2 parts: the n-th begins after n seconds, and its first part takes n tenths of one."""
    answers = [Answer(n, n + n / 10 + 1.0, (n + n / 10, n + n / 10 + 1.0), 7, 3) for n in range(10)]
    answers.append(Answer(0.0, 20.0, error="timeout"))
    figures = load_figures(Arrivals(rate=1.0), answers, {"ttft": 0.45, "tpot": 0.5})
    assert figures.seconds == 20.0
    assert figures.requests_per_second == 0.5
    assert figures.output_tokens_per_second == 30 / 20
    assert figures.latencies["ttft"] == pytest.approx({"mean": 0.45, "p50": 0.45, "p90": 0.81, "p99": 0.891})
    assert figures.latencies["tpot"] == pytest.approx({"mean": 0.5, "p50": 0.5, "p90": 0.5, "p99": 0.5})
    assert figures.latencies["itl"]["p50"] == pytest.approx(1.0)
    assert figures.latencies["e2e"]["p50"] == pytest.approx(1.45)
    assert load_figures(Arrivals(rate=1.0), answers, {"ttft": 0.45}).goodput == 5 / 20
    assert load_figures(Arrivals(rate=1.0), answers, {"ttft": 0.45, "e2e": 1.15}).goodput == 2 / 20
    assert load_figures(Arrivals(rate=1.0), answers, {}).goodput is None
    # A server may send one token in two parts.
    assert "tpot" not in load_figures(Arrivals(rate=1.0), [Answer(0.0, 1.0, (0.5, 1.0), 7, 1)], {}).latencies


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "speed=1", "ttft=1,ttft=2", "ttft=nan"])
def test_wrong_limits_are_refused(text):
    with pytest.raises(MeshwrightError, match=r"ttft|not a number"):
        read_slo(text)


def test_the_command_writes_figures_and_a_chart_beside_the_plan(url, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "tiny", "--on", "cpu:8", "--serve", "decode", "--mesh", "tp=2,dp=4", "-o", "plan.yaml"]) == 0
    capsys.readouterr()
    words = f"bench-serve {url}/ --concurrency 1,4 --num-requests 8 --prompt-len 4 --output-len 6"
    beside = "--slo ttft=9,tpot=9 --plan plan.yaml --plot load.svg -o load.json"
    assert main([*words.split(), *beside.split()]) == 0
    screen = capsys.readouterr().out
    assert "small" in screen
    assert "1 at once" in screen
    assert "goodput" in screen
    assert "predicted step" in screen
    data = json.loads((tmp_path / "load.json").read_text())
    assert [load["load"]["concurrency"] for load in data["loads"]] == [1, 4]
    assert [load["num_answered"] for load in data["loads"]] == [8, 8]
    assert len(data["predicted"]) >= 2
    prompts = [json.dumps(body["prompt"]) for body, *_ in SEEN]
    assert len(set(prompts)) == 16
    assert (tmp_path / "load.svg").read_text().endswith("</svg>\n")
    assert main([*words.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "small"


def test_a_chart_has_every_load_and_step(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("meshwright.pictures.load_chart.save_figure", lambda figure, path: drawn.append(figure))
    latencies = {"ttft": {"p50": 0.001, "p90": 0.2, "p99": 0.3}, "tpot": {"p50": 0.01, "p90": 0.02, "p99": 0.03}}
    points = [LoadPoint("1 at once", 10.0, latencies), LoadPoint("8 at once", 50.0, latencies), LoadPoint("9", 0.0, {})]
    write_load_chart(points, [(0.005, 40.0), (0.01, 90.0)], tmp_path / "load.svg", title="loads")
    first, each = drawn[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in each.lines}
    assert lines["p99"] == [[10.0, 0.03], [50.0, 0.03]]
    assert lines["predicted, a step"] == [[40.0, 0.005], [90.0, 0.01]]
    assert {line.get_label() for line in first.lines} == {"p50", "p90", "p99"}
    for axes in (first, each):
        assert [text.get_text() for text in axes.texts] == ["1 at once", "8 at once"]
        marked = [axes.get_window_extent(), *(text.get_window_extent() for text in axes.texts)]
        assert marked[0].containsy(marked[1].y0), "a label covers the numbers of its axis"
        assert not marked[1].overlaps(marked[2])


def test_the_command_fails_where_nothing_was_answered(url, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "refuse"}')
    plot = tmp_path / "load.svg"
    assert main(["bench-serve", url, "--num-requests", "3", "--prompts", str(path), "--plot", str(plot)]) == 1
    assert plot.exists()
    screen = capsys.readouterr().out
    assert "3 status 429" in screen
    assert "note: status 429: full" in screen
