"""`meshwright generate --data`: answer a file of prompts with the engine of `meshwright serve`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.cli.generate.args import Args, samplings
from meshwright.cli.loading import load_with_bar, note, note_advised_mesh, start_with_bar
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import describe_bad
from meshwright.pictures.tables import console
from meshwright.units import show_rate

if TYPE_CHECKING:
    from meshwright.serving.offline import Progress as Answered


def answer_data(args: Args, data: Path) -> int:
    """Answer every prompt of a file, except those that an earlier call answered."""
    if args.output is None:
        raise MeshwrightError("--data needs a file for the answers: -o answers.jsonl")
    with waiting("loading JAX"):
        from meshwright.execution.loading.library import find_model
        from meshwright.serving.engine.engine import Engine
        from meshwright.serving.engine.request import Request
        from meshwright.serving.engine.settings import EngineSettings
        from meshwright.serving.offline import PromptFile, answer_file

    output, rule, as_chat, compile_cache = args.output, args.bad_data, args.chat, args.compile_cache
    settings = EngineSettings(rows=args.batch, context=args.context, weight_dtype=args.weight_dtype)
    request = Request(
        prompt=(),
        max_tokens=args.num_tokens,
        sampling=samplings(args, args.num_samples)[0],
        num_completions=args.num_samples,
        stop=args.stop,
        stop_tokens=args.stop_tokens,
    )
    found = find_model(
        args.model, on=args.on, mesh=args.mesh, dtype=args.dtype, adapter=args.adapter, weight_dtype=args.weight_dtype
    )
    check_all_read(args, "with --data" if args.temperature else "with --data at --temperature 0")
    model = load_with_bar(found, compile_cache)
    if not request.stop_tokens and model.tokenizer:
        request = replace(request, stop_tokens=model.tokenizer.stop_tokens)
    engine = Engine(model, settings)
    if args.mesh is None:
        note_advised_mesh(found, engine.layout.shards * engine.layout.rows)
    weights = " + ".join(str(path.resolve()) for path in (args.model, args.adapter) if path)
    if args.weight_dtype is not None:
        weights += f" in {args.weight_dtype}"
    prompts = PromptFile(data, model, request, engine.layout.context, as_chat, weights)
    began = None

    def start() -> None:
        nonlocal began
        start_with_bar(engine)
        began = perf_counter()

    try:
        with _bar() as on_answer:
            done = answer_file(engine, prompts, output, rule=rule, on_start=start, on_answer=on_answer)
    finally:
        engine.close()
    if done.skipped:
        note(f"left out: {describe_bad(done.skipped)}")
    rate = "" if began is None else f", {show_rate(done.tokens / (perf_counter() - began), 'tok/s')}"
    earlier = f", {done.before:,} by calls before" if done.before else ""
    print(f"{output}: {done.before + done.answered:,} of {done.prompts:,} prompts answered{earlier}{rate}")
    return 0


@contextmanager
def _bar() -> Iterator[Callable[[Answered], None]]:
    """Show a bar on a terminal, with answered prompts and tokens per second. Yields a function that updates it."""
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task, began = None, 0.0

        def show(progress: Answered) -> None:
            nonlocal task, began
            if task is None:
                task, began = bar.add_task("prompts"), perf_counter()
            rate = progress.tokens / max(perf_counter() - began, 1e-3)
            words = f"prompts, {show_rate(rate, 'tok/s')}"
            bar.update(task, description=words, completed=progress.before + progress.answered, total=progress.prompts)

        yield show
