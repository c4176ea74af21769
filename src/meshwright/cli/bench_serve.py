"""`meshwright bench-serve URL`: load on a server, and what its answers took."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from meshwright.cli.arguments import Json, option, positional
from meshwright.cli.plan.serving import thinned
from meshwright.cli.tables import console, show, table
from meshwright.cli.text import folded
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.files import check_outputs, write_file
from meshwright.planner import rank_serving, read_count, read_serving_plan
from meshwright.units import parse_number, show_seconds

if TYPE_CHECKING:
    from meshwright.planner import ServingPoint
    from meshwright.serving.load.drive import Load
    from meshwright.serving.load.figures import LoadFigures
    from meshwright.serving.load.requests import LoadRequest

EXAMPLES = (
    "meshwright bench-serve http://127.0.0.1:8000",
    "meshwright bench-serve http://127.0.0.1:8000 --rate 1,2,4,8 --slo ttft=0.5,tpot=0.05 --plot load.svg",
    "meshwright bench-serve http://127.0.0.1:8000 --concurrency 1,8,64 --plan serve.yaml --plot load.svg",
)

NAMES = {"ttft": "time to first token", "tpot": "time a token", "itl": "between parts", "e2e": "whole answer"}
"""The measures as screens have them."""
MOST_LATE = 0.1
"""Seconds by which requests may be late before a note says so."""
NUM_PREDICTED = 8
"""Predicted steps on a screen."""


@dataclass(frozen=True)
class Args:
    """Put load on a server that speaks OpenAI's completions, and say what its answers took.

    A load is --num-requests at a rate, or always so many at once. Prompts are random tokens, as long as ShareGPT's.

    The server's API key, if it wants one, is taken from OPENAI_API_KEY.
    """

    url: Annotated[tyro.conf.Positional[str], positional("URL")]
    """Where the server is, without /v1."""
    rate: Annotated[str | None, option("N[,N…]")] = None
    """Requests a second, at random times whatever the answers take; several are loads one after the other."""
    concurrency: Annotated[str | None, option("N[,N…]")] = None
    """Requests at once: each answer is followed by the next request. Default: 8, without --rate."""
    num_requests: Annotated[str, option("N")] = "100"
    """Requests of each load. Default: 100."""
    model: Annotated[str | None, option("NAME")] = None
    """The model to ask for. Default: the server's first."""
    prompts: Annotated[Path | None, option("FILE")] = None
    """A .jsonl file of prompts instead, each line {"prompt": text or token ids, "max_tokens": N}, taken in turn."""
    prompt_len: Annotated[str | None, option("N")] = None
    """Tokens of every prompt. Default: as ShareGPT's."""
    output_len: Annotated[str | None, option("N")] = None
    """Tokens of every answer, of --prompts where a line has no max_tokens. Default: as ShareGPT's; 256."""
    max_len: Annotated[str | None, option("N")] = None
    """The most tokens of a prompt and its answer; below 2048, lengths shrink in proportion. Default: 2048."""
    seed: Annotated[str, option("N")] = "0"
    """Of lengths, prompts and times. Default: 0."""
    slo: Annotated[str | None, option("LIMITS")] = None
    """Seconds of ttft, tpot, itl and e2e that an answer must keep to count as goodput, as ttft=0.5,tpot=0.05."""
    timeout: Annotated[str, option("SECONDS")] = "600"
    """The longest wait for the next part of an answer. Default: 600."""
    plan: Annotated[Path | None, option("FILE")] = None
    """A serving plan (plan --serve decode -o FILE), whose mesh's steps are shown beside."""
    plot: Annotated[Path | None, option("FILE")] = None
    """Draw latency against throughput to this file (.svg, .png or .pdf)."""
    output: Annotated[Path | None, option("FILE", "-o")] = None
    """Write the figures of every load to this file, as JSON."""
    json: Json = False
    """Print the same JSON: {"url", "model", "loads": [figures, …], "predicted"}."""


def run(args: Args) -> int:
    """Run the loads and print their figures."""
    from meshwright.serving.load import drive
    from meshwright.serving.load.figures import load_figures, read_slo
    from meshwright.viz.charts import check_chart_file

    loads, slo, url = _loads(args), {} if args.slo is None else read_slo(args.slo), args.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise MeshwrightError(f"URL is {args.url!r}; write it as http://127.0.0.1:8000")
    seed = _whole("--seed", args.seed)
    requests = [_requests(args, seed, variant) for variant in range(len(loads))]
    size = len(requests[0])
    timeout, model, path, plot, as_json = parse_number(args.timeout), args.model, args.output, args.plot, args.json
    if timeout <= 0:
        raise MeshwrightError(f"--timeout is {args.timeout!r}; it is a number of seconds above 0")
    predicted = _frontier(args.plan)
    if plot is not None:
        check_chart_file(plot)
    check_outputs(path, plot)
    check_all_read(args)
    key = os.environ.get("OPENAI_API_KEY")
    model = model or drive.find_model(url, key, timeout)
    target = drive.Target(url, model, key, timeout)
    found = []
    for load, sent in zip(loads, requests, strict=True):
        with waiting(f"{size:,} requests, {load}"):
            found.append(load_figures(load, drive.drive(target, sent, load, seed=seed), slo))
    data = {
        "url": url,
        "model": model,
        "loads": [figures.to_json() for figures in found],
        "predicted": [
            {"batch": point.batch, "step_seconds": point.seconds, "tokens_per_second": point.tokens_per_second}
            for point in predicted
        ],
    }
    if path is not None:
        write_file(path, json.dumps(data, indent=2) + "\n")
    if plot is not None:
        _plot(found, predicted, plot, title=f"{model} · {size:,} requests a load")
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        show(console(), f"{model} · {url} · {size:,} requests a load")
        print()
        _print_loads(found)
        _print_frontier(predicted)
        for written in (path, plot):
            if written is not None:
                print(f"\n wrote  {written}")
    return 0 if all(figures.num_answered for figures in found) else 1


def _loads(args: Args) -> list[Load]:
    """The loads in the order in which they are typed."""
    from meshwright.serving.load.drive import Load

    if args.rate is not None and args.concurrency is not None:
        raise MeshwrightError("--rate and --concurrency are two ways to send requests; leave one out")
    if args.rate is not None:
        rates = [parse_number(text) for text in args.rate.split(",")]
        if min(rates) <= 0:
            raise MeshwrightError(f"--rate is {args.rate!r}; each is a number of requests a second above 0")
        return [Load(rate=rate) for rate in rates]
    return [Load(concurrency=read_count("--concurrency", text)) for text in (args.concurrency or "8").split(",")]


def _requests(args: Args, seed: int, variant: int) -> list[LoadRequest]:
    """The requests of a load; those that are drawn differ from load to load in their tokens alone."""
    from meshwright.serving.load.requests import LONGEST, draw_requests, read_requests

    count = read_count("--num-requests", args.num_requests)
    output_len = None if args.output_len is None else read_count("--output-len", args.output_len)
    if args.prompts is not None:
        found = read_requests(args.prompts, output_len=output_len or 256)
        return [found[at % len(found)] for at in range(count)]
    prompt_len = None if args.prompt_len is None else read_count("--prompt-len", args.prompt_len)
    max_len = LONGEST if args.max_len is None else read_count("--max-len", args.max_len)
    lengths = {"max_len": max_len, "prompt_len": prompt_len, "output_len": output_len}
    return draw_requests(count, seed, **lengths, variant=variant)


def _whole(name: str, text: str) -> int:
    """A whole number from 0."""
    return 0 if text.strip() == "0" else read_count(name, text)


def _frontier(path: Path | None) -> tuple[ServingPoint, ...]:
    """The steps on a plan's mesh at every batch that is worth it; empty without a plan."""
    if path is None:
        return ()
    plan = read_serving_plan(path)
    serving = replace(plan.serving, batch=None, latency_seconds=None)
    return rank_serving(serving, plan.system, plan.mesh).frontier


def _print_loads(found: Sequence[LoadFigures]) -> None:
    """Throughput and errors, a load a line; then latencies, a measure of a load a line."""
    goodput = ("goodput",) if found[0].goodput is not None else ()
    rows = [
        (
            str(figures.load),
            f"{figures.num_answered:,}",
            f"{figures.requests_per_second:.2f}",
            f"{figures.output_tokens_per_second:,.0f}",
            *([f"{figures.goodput:.2f}"] if figures.goodput is not None else []),
            ", ".join(f"{count:,} {kind}" for kind, count in figures.errors.items()) or "-",
        )
        for figures in found
    ]
    show(console(), table(("load", "answered", "req/s", "tok/s", *goodput, "errors"), rows, left=(0, -1), folds=-1))
    columns = ("load", "latency", "mean", "p50", "p90", "p99")
    lines = [
        (str(figures.load), NAMES[measure], *(show_seconds(spread[name]) for name in columns[2:]))
        for figures in found
        for measure, spread in figures.latencies.items()
    ]
    if lines:
        print()
        show(console(), table(columns, lines, left=(0, 1), folds=1))
    for kind, reason in {kind: reason for figures in found for kind, reason in figures.reasons.items()}.items():
        print(folded(f"note: {kind}: {reason}"))
    if (late := max(figures.late_seconds for figures in found)) > MOST_LATE:
        print(
            folded(f"note: requests were sent up to {show_seconds(late)} late: the client is the limit, not the server")
        )


def _print_frontier(predicted: tuple[ServingPoint, ...]) -> None:
    """What a plan predicts of steps."""
    if predicted:
        rows = [
            (show_seconds(point.seconds), f"{point.tokens_per_second:,.0f}", f"{point.batch:,}")
            for point in thinned(predicted, NUM_PREDICTED)
        ]
        print()
        show(console(), table(("predicted step", "tok/s", "batch"), rows, left=()))


def _plot(found: Sequence[LoadFigures], predicted: Sequence[ServingPoint], path: Path, *, title: str) -> None:
    """Draw the loads beside the plan."""
    from meshwright.viz.load_chart import LoadPoint, write_load_chart

    points = [LoadPoint(str(f.load), f.output_tokens_per_second, f.latencies) for f in found]
    steps = [(point.seconds, point.tokens_per_second) for point in predicted]
    write_load_chart(points, steps, path, title=title)
