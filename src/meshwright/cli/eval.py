"""`meshwright eval`: score a model by loss on texts, or by accuracy on multiple-choice questions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.cli.loading import load_with_bar
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.cli.words.spell import spelled
from meshwright.errors import MeshwrightError
from meshwright.options.declare import Json, option
from meshwright.options.serving import LoadArgs
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import next_line
from meshwright.units import show_estimate

if TYPE_CHECKING:
    from meshwright.execution.loading.library import Found
    from meshwright.execution.models.inference.scoring import Score
    from meshwright.execution.models.inference.tasks import TaskFigures

EXAMPLES = (
    "meshwright eval runs/tiny --data README.md docs",
    "meshwright eval Llama-3.2-1B --on cpu:8 --mesh tp=8 --data book.txt --seq-len 2048 --stride 512",
    "meshwright eval Llama-3.2-1B --on cpu:8 --task arc_easy.jsonl --json",
)


@dataclass(frozen=True)
class Args(LoadArgs):
    """Score a model: loss and perplexity of texts, or the accuracy of its answers."""

    data: Annotated[tuple[str, ...], option("PATH…")] = ()
    """Text files, or folders with .txt, .md and .py files; each file is one text."""
    seq_len: Annotated[int | None, option("N")] = None
    """Tokens of a window. Default: the model's trained length, at most 2048."""
    stride: Annotated[int | None, option("N")] = None
    """Tokens between window starts; below --seq-len, each token gets more context. Default: --seq-len."""
    task: Annotated[Path | None, option("FILE")] = None
    """A .jsonl file of multiple choice, each line {"query": text, "choices": [texts], "gold": number from 0}."""
    json: Json = False
    """Print {"texts", "all"}, or of --task {"questions", "acc", "acc_norm"} with their standard errors."""


def run(args: Args) -> int:
    """Print the scores of texts, or the accuracy of answers."""
    if (args.task is None) == (not args.data):
        raise MeshwrightError("eval needs one of --data (texts) and --task (questions of multiple choice)")
    with waiting("loading JAX"):
        from meshwright.execution.loading.library import find_model
        from meshwright.execution.models.inference.scoring import total
        from meshwright.execution.models.inference.tasks import answer, read_task
        from meshwright.execution.training.data.texts import read_texts

    as_json, compile_cache = args.json, args.compile_cache
    found = find_model(args.model, on=args.on, mesh=args.mesh, dtype=args.dtype, adapter=args.adapter)
    if args.task is not None:
        questions = read_task(args.task)
        check_all_read(args, "with --task")
        model = load_with_bar(found, compile_cache)
        with waiting(f"answering {len(questions):,} questions"):
            result = answer(model, questions)
        figures = result.figures()
        if as_json:
            likely = {"log_likelihoods": result.log_likelihoods}
            print(json.dumps({"questions": figures["questions"]} | likely | figures, indent=2))
        else:
            show(console(), f"{figures['questions']:,} questions   {'   '.join(accuracies(figures))}")
        if not as_json:
            print(_next(args, found))
        return 0
    for name in ("seq_len", "stride"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise MeshwrightError(f"--{name.replace('_', '-')} is {value}; it is 1 or more")
    texts = {file: text.decode() for file, text in read_texts(args.data).items() if text}
    seq_len, stride = args.seq_len, args.stride
    check_all_read(args)
    model = load_with_bar(found, compile_cache)
    with waiting(f"scoring {len(texts):,} texts"):
        scores = dict(zip(texts, model.score([*texts.values()], seq_len=seq_len, stride=stride), strict=True))
    every = total([*scores.values()])
    if as_json:
        print(json.dumps({"texts": {name: _data(s) for name, s in scores.items()}, "all": _data(every)}, indent=2))
        return 0
    rows = [*scores.items(), *([("all", every)] if len(scores) > 1 else [])]
    columns = ("text", "tokens", "bytes", "loss", "perplexity", "bits a byte")
    show(console(), table(columns, [(name, *_figures(score)) for name, score in rows]))
    print(_next(args, found))
    return 0


def _next(args: Args, found: Found) -> str:
    """Return the line that suggests the next command: `generate`, with a prompt unless the model is a run."""
    prompt = "" if found.run else " 'def '"
    return next_line(spelled("generate", args, without=("data", "seq_len", "stride", "task")) + prompt)


def _figures(score: Score) -> tuple[str, ...]:
    """Return a score as cells of the table: tokens, bytes, loss, perplexity and bits per byte."""
    size = "-" if score.num_bytes is None else f"{score.num_bytes:,}"
    bits = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
    return f"{score.tokens:,}", size, f"{score.loss:.4f}", f"{score.perplexity:,.4g}", bits


def _data(score: Score) -> dict[str, Any]:
    """Return a score's figures by name, for JSON."""
    names = ("tokens", "num_bytes", "loss", "perplexity", "bits_per_byte")
    return {name: getattr(score, name) for name in names}


def accuracies(figures: TaskFigures) -> tuple[str, str]:
    """Return a task's accuracies as text, each with its standard error: `acc`, and `acc_norm` (`TaskResult`)."""
    acc = show_estimate(figures["acc"], figures["acc_stderr"])
    return f"acc {acc}", f"acc_norm {show_estimate(figures['acc_norm'], figures['acc_norm_stderr'])}"
