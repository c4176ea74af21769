"""The LM evaluation harness as a client of `meshwright serve`, beside what the same model answers alone.

Questions are lines of Python's argparse, cut at a space: which of four ends a line has (multiple_choice, scored by log
likelihoods), and how it goes on (generate_until, whose right answers are what the model makes alone). The harness reads
both from local files and asks `/v1/completions`; its accuracies and log likelihoods have to be those of the model
alone.

    python -m venv harness && harness/bin/pip install "lm_eval[api]" transformers
    python benchmarks/lm_eval_client.py MODEL --lm-eval harness/bin/lm_eval [--on cpu:2] [--mesh tp=2]

MODEL is a Hugging Face directory with a tokenizer, as `meshwright export` writes one of a run.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import meshwright as mw
from meshwright.execution.models.inference.tasks import answer, read_task

CONTEXT, NEW_TOKENS = 128, 24
ENDS = """
task: ends
dataset_path: json
dataset_kwargs: {data_files: {test: ends.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
LINES = f"""
task: lines
dataset_path: json
dataset_kwargs: {{data_files: {{test: lines.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{made}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: {NEW_TOKENS}}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lm-eval", default="lm_eval")
    parser.add_argument("--on", default="cpu:2")
    parser.add_argument("--mesh", default="tp=2")
    parser.add_argument("--questions", type=int, default=64)
    args = parser.parse_args()
    model = mw.load(args.model, on="cpu:1")
    with TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "ends.jsonl", ends(args.questions))
        questions = read_task(folder / "ends.jsonl")
        found = answer(model, questions)
        made = model.generate([one.query for one in questions], max_tokens=NEW_TOKENS, stop=("\n",))
        pairs = zip(questions, made, strict=True)
        write(folder / "lines.jsonl", [{"query": one.query, "made": text.text} for one, text in pairs])
        (folder / "ends.yaml").write_text(ENDS)
        (folder / "lines.yaml").write_text(LINES)
        with served(args.model, args.on, args.mesh) as url:
            print(harness(args.lm_eval, folder, url, args.model))
        theirs = log_likelihoods(folder)
    print(f"alone: acc {found.acc:.4f}, acc_norm {found.acc_norm:.4f}")
    apart = np.abs(np.array(theirs) - np.array(found.log_likelihoods))
    print(f"log likelihoods: {apart.size}, at most {apart.max():.1e} nats apart")


def ends(count: int) -> list[dict[str, Any]]:
    """Questions: the beginning of a line, its end, and the ends of three others, all short enough for the context."""
    lines = [line.strip() for line in Path(inspect.getfile(argparse)).read_text().splitlines()]
    long_enough = sorted({line for line in lines if 20 <= len(line) <= 70 and line.count(" ") > 2})
    draw = random.Random(0)
    words = [line.split(" ") for line in draw.sample(long_enough, count)]
    cut = [(" ".join(one[: len(one) // 2]), " ".join(one[len(one) // 2 :])) for one in words]
    made = []
    for number, (query, end) in enumerate(cut):
        others = draw.sample([other for place, (_, other) in enumerate(cut) if place != number and other != end], 3)
        gold = draw.randrange(4)
        made.append({"query": query, "choices": [*others[:gold], end, *others[gold:]], "gold": gold})
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """A file of JSON, an object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def served(model: Path, on: str, mesh: str) -> Iterator[str]:
    """The address of a started server."""
    words = [sys.executable, "-m", "meshwright", "serve", str(model), "--on", on, "--mesh", mesh]
    words += ["--batch", "4", "--context", str(CONTEXT), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()


def harness(program: str, folder: Path, url: str, model: Path) -> str:
    """What the harness prints of both tasks; it reaches nothing but the server."""
    fields = f"base_url={url}/v1/completions,model={model.name},tokenizer={model.resolve()}"
    fields += f",max_length={CONTEXT},num_concurrent=4"
    done = subprocess.run(
        [str(Path(program).absolute()), "--model", "local-completions", "--model_args", fields, "--include_path", ".",
         "--tasks", "ends,lines", "--log_samples", "--output_path", "out"],
        cwd=folder, check=False, capture_output=True, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith("|"))


def log_likelihoods(folder: Path) -> list[list[float]]:
    """What the harness had for each choice of each question."""
    (path,) = folder.glob("out/*/samples_ends_*.jsonl")
    samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return [[float(choice[0]) for choice in sample["filtered_resps"]] for sample in samples]


if __name__ == "__main__":
    main()
