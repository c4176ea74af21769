"""`meshwright bench-serve`: measure latency, throughput and goodput of a server under load."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from meshwright.cli.plan.serving import thinned
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.options.declare import Json, option, positional
from meshwright.options.values import read_count
from meshwright.pictures.charts import check_chart_file
from meshwright.pictures.load_chart import LoadPoint, write_load_chart
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded
from meshwright.planning.serving.plan import read_serving_plan
from meshwright.planning.serving.search import rank_serving
from meshwright.support.files import check_outputs, write_file
from meshwright.units import parse_number, show_seconds

if TYPE_CHECKING:
    from meshwright.serving.load.drive import Arrivals
    from meshwright.serving.load.figures import LoadFigures
    from meshwright.serving.load.requests import LoadRequest

EXAMPLES = (
    "meshwright bench-serve http://127.0.0.1:8000",
    "meshwright bench-serve http://127.0.0.1:8000 --rate 1,2,4,8 --slo ttft=0.5,tpot=0.05 --plot load.svg",
    "meshwright bench-serve http://127.0.0.1:8000 --concurrency 1,8,64 --plan serve.yaml --plot load.svg",
)

MEASURE_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per token",
    "itl": "inter-token latency",
    "e2e": "whole answer",
}
"""The names of the latency measures in tables, by their keys."""
MAX_LATE_SECONDS = 0.1
"""Seconds that requests may be sent late before a note warns that the client is the bottleneck."""
NUM_PREDICTED = 8
"""The maximum number of rows of the table of predicted steps."""


@dataclass(frozen=True)
class Args:
    """Measure a server with OpenAI's completions API under load: latency, throughput and goodput.

    A load is --num-requests at a request rate or a concurrency. Prompts are random tokens with ShareGPT's lengths.

    The server's API key, if it requires one, is read from OPENAI_API_KEY.
    """

    url: Annotated[str, positional("URL")]
    """The server's address, with or without /v1."""
    rate: Annotated[str | None, option("N[,N…]")] = None
    """Requests per second, at random (Poisson) times; several rates are run one after the other."""
    concurrency: Annotated[str | None, option("N[,N…]")] = None
    """Concurrent requests: each answer is followed by the next request. Default: 8, without --rate."""
    num_requests: Annotated[str, option("N")] = "100"
    """Requests of each load. Default: 100."""
    model: Annotated[str | None, option("NAME")] = None
    """The model to request. Default: the server's first."""
    prompts: Annotated[Path | None, option("FILE")] = None
    """A .jsonl file of prompts, repeated as needed; each line {"prompt": text or token ids, "max_tokens": N}."""
    prompt_len: Annotated[str | None, option("N")] = None
    """Tokens of each prompt. Default: ShareGPT's distribution."""
    output_len: Annotated[str | None, option("N")] = None
    """Tokens of each answer. Default: ShareGPT's distribution; with --prompts, max_tokens of the line or 256."""
    max_len: Annotated[str | None, option("N")] = None
    """The maximum tokens of a prompt and its answer; below 2048, lengths shrink in proportion. Default: 2048."""
    seed: Annotated[str, option("N")] = "0"
    """The seed of lengths, prompts and arrival times. Default: 0."""
    slo: Annotated[str | None, option("LIMITS")] = None
    """Latency limits for goodput, in seconds of ttft, tpot, itl and e2e, as ttft=0.5,tpot=0.05."""
    timeout: Annotated[str, option("SECONDS")] = "600"
    """The maximum time between parts of an answer. Default: 600."""
    plan: Annotated[Path | None, option("FILE")] = None
    """A serving plan (plan --serve decode -o FILE): show its predicted step times too."""
    plot: Annotated[Path | None, option("FILE")] = None
    """Plot latency against throughput to this file (.svg, .png or .pdf)."""
    output: Annotated[Path | None, option("FILE", "-o")] = None
    """Write the figures of each load to this file, as JSON."""
    json: Json = False
    """Print the same JSON: {"url", "model", "loads": [figures, …], "predicted"}."""


def run(args: Args) -> int:
    """Run the loads and print their figures. Return 1 if a load had no complete answer, else 0."""
    from meshwright.serving.load import drive
    from meshwright.serving.load.figures import load_figures, read_slo

    loads, slo = _loads(args), {} if args.slo is None else read_slo(args.slo)
    url = args.url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # The port is not a number from 0 to 65535.
        is_url = False
    if not is_url:
        raise MeshwrightError(f"URL is {args.url!r}; write it as http://127.0.0.1:8000, with a port of 1 to 65535")
    seed = 0 if args.seed.strip() == "0" else read_count("--seed", args.seed)
    requests = [_requests(args, seed, variant) for variant in range(len(loads))]
    size = len(requests[0])
    timeout, model, path, plot, as_json = parse_number(args.timeout), args.model, args.output, args.plot, args.json
    if timeout <= 0:
        raise MeshwrightError(f"--timeout is {args.timeout!r}; it must be a number of seconds above 0")
    if args.plan is None:
        predicted = ()
    else:
        plan = read_serving_plan(args.plan)
        serving = replace(plan.serving, batch=None, latency_seconds=None)
        predicted = rank_serving(serving, plan.system, plan.mesh).frontier
    if plot is not None:
        check_chart_file(plot)
    check_outputs(path, plot)
    check_all_read(args)
    key = os.environ.get("OPENAI_API_KEY")
    model = model or drive.find_model(url, key, timeout)
    target = drive.Target(url, model, key, timeout)
    results: list[LoadFigures] = []
    for load, load_requests in zip(loads, requests, strict=True):
        with waiting(f"{size:,} requests, {load}"):
            results.append(load_figures(load, drive.drive(target, load_requests, load, seed=seed), slo))
    data = {
        "url": url,
        "model": model,
        "loads": [figures.to_json() for figures in results],
        "predicted": [
            {"batch": point.batch, "step_seconds": point.seconds, "tokens_per_second": point.tokens_per_second}
            for point in predicted
        ],
    }
    if path is not None:
        write_file(path, json.dumps(data, indent=2) + "\n")
    if plot is not None:
        points = [LoadPoint(str(f.load), f.output_tokens_per_second, f.latencies) for f in results]
        steps = [(point.seconds, point.tokens_per_second) for point in predicted]
        write_load_chart(points, steps, plot, title=f"{model} · {size:,} requests a load")
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        show(console(), f"{model} · {url} · {size:,} requests a load")
        print()
        _print_loads(results)
        if predicted:
            rows = [
                (show_seconds(point.seconds), f"{point.tokens_per_second:,.0f}", f"{point.batch:,}")
                for point in thinned(predicted, NUM_PREDICTED)
            ]
            print()
            show(console(), table(("predicted step", "tok/s", "batch"), rows, left=()))
        for written in (path, plot):
            if written is not None:
                print(f"\n wrote  {written}")
    return 0 if all(figures.num_answered for figures in results) else 1


def _loads(args: Args) -> list[Arrivals]:
    """Return a load for each value of --rate or --concurrency, in the order of the command line."""
    from meshwright.serving.load.drive import Arrivals

    if args.rate is not None and args.concurrency is not None:
        raise MeshwrightError("--rate and --concurrency exclude each other; leave one out")
    if args.rate is not None:
        rates = [parse_number(text) for text in args.rate.split(",")]
        if min(rates) <= 0:
            raise MeshwrightError(f"--rate is {args.rate!r}; each must be a number of requests a second above 0")
        return [Arrivals(rate=rate) for rate in rates]
    return [Arrivals(concurrency=read_count("--concurrency", text)) for text in (args.concurrency or "8").split(",")]


def _requests(args: Args, seed: int, variant: int) -> list[LoadRequest]:
    """Return the requests of load number `variant`. All loads have prompts of equal lengths, with different tokens."""
    from meshwright.serving.load.requests import MAX_LEN, random_requests, read_requests

    count = read_count("--num-requests", args.num_requests)
    output_len = None if args.output_len is None else read_count("--output-len", args.output_len)
    if args.prompts is not None:
        in_file = read_requests(args.prompts, output_len=output_len or 256)
        return [in_file[number % len(in_file)] for number in range(count)]
    prompt_len = None if args.prompt_len is None else read_count("--prompt-len", args.prompt_len)
    max_len = MAX_LEN if args.max_len is None else read_count("--max-len", args.max_len)
    lengths = {"max_len": max_len, "prompt_len": prompt_len, "output_len": output_len}
    return random_requests(count, seed, **lengths, variant=variant)


def _print_loads(results: Sequence[LoadFigures]) -> None:
    """Print throughput and errors, a row for each load; then latencies, a row for each load and measure."""
    goodput = ("goodput",) if results[0].goodput is not None else ()
    rows = [
        (
            str(figures.load),
            f"{figures.num_answered:,}",
            f"{figures.requests_per_second:.2f}",
            f"{figures.output_tokens_per_second:,.0f}",
            *([f"{figures.goodput:.2f}"] if figures.goodput is not None else []),
            ", ".join(f"{count:,} {kind}" for kind, count in figures.errors.items()) or "-",
        )
        for figures in results
    ]
    show(console(), table(("load", "answered", "req/s", "tok/s", *goodput, "errors"), rows, left=(0, -1), folds=-1))
    columns = ("load", "latency", "mean", "p50", "p90", "p99")
    lines = [
        (str(figures.load), MEASURE_NAMES[measure], *(show_seconds(summary[name]) for name in columns[2:]))
        for figures in results
        for measure, summary in figures.latencies.items()
    ]
    if lines:
        print()
        show(console(), table(columns, lines, left=(0, 1), folds=1))
    for kind, reason in {kind: reason for figures in results for kind, reason in figures.reasons.items()}.items():
        print(folded(f"note: {kind}: {reason}"))
    if (late := max(figures.late_seconds for figures in results)) > MAX_LATE_SECONDS:
        limit = "the client is the bottleneck, not the server"
        print(folded(f"note: requests were sent up to {show_seconds(late)} late: {limit}"))
