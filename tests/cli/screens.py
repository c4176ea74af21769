"""Screens of every command at any width, for tests to look at; nothing is compiled and no step is trained for them.

What a compiler made is stored, and what a run measured is written down here. To compile and store it anew:
PYTHONPATH=src python tests/cli/screens.py
"""

import gzip
import importlib
import io
import itertools
import json
import re
from contextlib import ExitStack, chdir
from dataclasses import replace
from inspect import isfunction, ismethod
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest

from meshwright.cli.main import COMMANDS, main
from meshwright.execution.training.run_directory.run import append_metrics, begin_run
from meshwright.proof.compiler.program import program_from_json

DATA = Path(__file__).parents[1] / "data" / "screens"
WIDTHS = (60, 80, 100, 140, None)
"""The columns of terminals; None is a pipe."""

V5P = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512"]
TINY = ["tiny", "--on", "cpu:8", "--mesh", "2,2,2,1", "--batch", "16", "--seq-len", "64"]
MATMUL = ["matmul", "A[B_X, D] @ W[D_X, F] -> C[B_X, F]", "--mesh", "X=8", "--dims", "B=65536,D=8192,F=32768", "--on",
          "v5p:2x2x2"]  # fmt: skip

SCREENS = {
    "plan": V5P,
    "plan mesh": [*V5P, "--mesh", "fsdp=16,tp=4", "--tokens", "15T", "--price", "4.2", "-o", "my plans/p.yaml"],
    "plan kept": ["plan", "my plans/tiny.yaml"],
    "plan run": ["plan", "runs/tiny"],
    "plan compare": [*V5P, "--compare", "fsdp=64", "dp=8,fsdp=8", "fsdp=16,tp=4"],
    "plan sweep": [*V5P, "--sweep", "chips=64..256"],
    "plan gpus": ["plan", "llama3-70b", "--on", "h100:64", "--batch", "512", "--optimizer", "adamw"],
    "plan too large": ["plan", "llama3-8b", "--on", "v5e:2x2", "--batch", "8", "--num-layers", "16"],
    "plan experts": ["plan", "mixtral-8x7b", "--on", "h100:64", "--batch", "64"],
    "plan ops": ["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--ops"],
    "decode": ["plan", "llama3-8b", "--on", "v5e:4x4", "--serve", "decode", "--latency", "30ms"],
    "decode too large": ["plan", "llama3-405b", "--on", "h100:8", "--serve", "decode"],
    "prefill": ["plan", "llama3-8b", "--on", "v5e:4x4", "--serve", "prefill"],
    "verify": ["verify", *TINY],
    "verify run": ["verify", "runs/tiny"],
    "verify plan": ["verify", "my plans/tiny.yaml"],
    "verify tpu": ["verify", "tiny", "--on", "v5e:2x2", "--mesh", "fsdp=2,tp=2", "--batch", "16", "--seq-len", "256",
                   "--effort", "default"],
    "inspect": ["inspect", "inspect_programs:whole", "--mesh", "dp=2,tp=4"],
    "inspect plan": ["inspect", "my plans/tiny.yaml"],
    "inspect tpu": ["inspect", "inspect_programs:mistaken", "--mesh", "dp=2,tp=2", "--on", "v5e:2x2", "--memory"],
    "fix": ["fix", "inspect_programs:step", "--on", "cpu:8", "--mesh", "data=8", "--compiled", "0"],
    "train": ["train", *TINY, "--steps", "20", "--data", "text.txt", "-o", "my runs/tiny"],
    "tokenize": ["tokenize", "task.jsonl", "-o", "my runs/tokens", "--fields", "[query],query"],
    "report": ["report", "runs/tiny", "-o", "my runs/report.html"],
    "generate": ["generate", "runs/tiny", "--num-tokens", "12"],
    "export": ["export", "runs/tiny", "my runs/exported"],
    "eval": ["eval", "runs/tiny", "--data", "text.txt", "my runs"],
    "eval task": ["eval", "runs/tiny", "--task", "task.jsonl"],
    "bench-serve": ["bench-serve", "http://127.0.0.1:9", "--rate", "1,16", "--slo", "ttft=0.5,tpot=0.05", "--plan",
                    "my plans/serve.yaml", "-o", "my runs/load.json"],
    "matmul": MATMUL,
    "matmul run": ["matmul", "A[I_X, J] @ B[J, K] -> C[I, K]", "--mesh", "X=4", "--dims", "I=64,J=64,K=64", "--on",
                   "v5e:2x2", "--run"],
    "collective": ["collective", "all-reduce", "--mesh", "X=16", "--axis", "X", "--on", "v5e:16x16", "--bytes", "64M"],
    "collective gpus": ["collective", "all-to-all", "--mesh", "X=32", "--axis", "X", "--on", "h100:32", "--bytes",
                        "64Mi"],
    "collective run": ["collective", "reduce-scatter", "--mesh", "X=4", "--axis", "X", "--on", "v5e:4x4", "--bytes",
                       "64M", "--run"],
    "chips": ["chips"],
    "learn": ["learn"],
    "devices": ["devices"],
    "chips h100": ["chips", "h100"],
    "chips v5p": ["chips", "v5p"],
    "show": ["show", "A[I_X, J_Y]", "--mesh", "X=2,Y=2", "--dims", "I=8,J=8", "--on", "v5e:2x2"],
    "show plan": ["show", "my plans/tiny.yaml"],
    "show all": ["show", "A[I_X, J]", "--mesh", "X=4", "--dims", "I=8,J=8", "--all"],
    "show pipeline": ["show", "pipeline", "--stages", "4", "--microbatches", "8", "--virtual-stages", "2", "--layers",
                      "32"],
    "demo": ["demo", "-o", "my runs/demo"],
    "completion": ["completion", "bash"],
    "help": ["--help"],
    **{f"{name} --help": [*name.split(), "--help"] for name in COMMANDS},
    "plan decode --help": ["plan", "llama3-8b", "--serve", "decode", "--help"],
}  # fmt: skip
"""The words of every command, some in several modes."""

STORED = {
    "verify": "tiny_cpu",
    "verify run": "tiny_cpu",
    "verify plan": "tiny_cpu",
    "verify tpu": "tiny_v5e",
    "inspect": "whole_cpu",
    "inspect plan": "tiny_cpu",
    "inspect tpu": "mistaken_v5e",
}
"""The compiled program of a screen, by the name of its file."""

ROWS = [
    {"mesh": "dp=2,fsdp=2,tp=2", "hardware": "cpu:8", "step": step, "loss": 5.869 - step / 8, "grad_norm": 1.25,
     "learning_rate": 0.003, "step_seconds": 10.0 if step == 0 else 0.25 + step / 1000,
     "tokens_per_second": 4096 - step, "mfu": 0.0812, "memory_peak_bytes": None}
    for step in range(20)
]  # fmt: skip
"""What a run of 20 steps measured."""

TIMED = ["meshwright.cli.plan.command.find_meshes", "meshwright.cli.plan.command.find_beyond",
         "meshwright.cli.plan.command.plan_one_mesh",
         "meshwright.cli.plan.sweep.run_sweep", "meshwright.cli.plan.serving.rank_serving",
         "meshwright.cli.plan.screen.nearby", "meshwright.cli.plan.screen.ways_to_fit",
         "meshwright.cli.plan.screen.chips_that_fit", "meshwright.cli.matmul.run_product",
         "meshwright.proof.verification.plans.verify_plan",
         "meshwright.proof.inspection.functions.inspect"]  # fmt: skip
"""What takes time, and is the same at every width."""


class Stdout(io.StringIO):
    """What a command prints, on a terminal or in a pipe."""

    encoding = "utf-8"

    def __init__(self, *, is_terminal):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


def screen(name, columns, folder):
    """The lines of a screen on a terminal so wide, or in a pipe, without colours; as it is when it is done."""
    out = Stdout(is_terminal=columns is not None)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(chdir(folder))
        _replace_work(patch, name, folder)
        patch.setenv("COLUMNS", str(columns or 80))
        patch.setenv("NO_COLOR", "1")
        patch.setenv("TERM", "xterm")
        patch.setattr("sys.stdout", out)
        for made in ("exported", "tokens"):
            rmtree(folder / "my runs" / made, ignore_errors=True)
        try:
            code = main(SCREENS[name])
        except SystemExit as left:  # of help
            code = left.code or 0
    assert code in (0, 1), (code, out.getvalue())
    return _on_screen(out.getvalue())


def _on_screen(text):
    """The lines that a terminal shows in the end, where some were gone back to and erased."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|[\r\n])", text):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part != "\r" and not part.startswith("\x1b"):
            lines[row] += part
    return [line.rstrip() for line in lines]


def make_folder(folder):
    """Where the commands run: with a run, a text and folders whose names have a space."""
    from meshwright.execution.training.library import new_run
    from meshwright.planning.library import plan_to_run
    from meshwright.planning.serving.plan import write_serving_plan
    from meshwright.planning.serving.search import best_serving_plan

    for name in ("my plans", "my runs", "runs", "runs/tiny", "home"):
        (folder / name).mkdir()
    (folder / "text.txt").write_text("def f(x):\n    return x\n" * 200)
    (folder / "my runs/short.md").write_text("short")
    (folder / "task.jsonl").write_text('{"query": "def f(", "choices": ["x):", "else"], "gold": 0}\n' * 7)
    with chdir(folder):
        plan = plan_to_run("tiny", {"on": "cpu:8", "mesh": "2,2,2,1", "batch": 16, "seq_len": 64})
        plan.write("my plans/tiny.yaml")
        serving = best_serving_plan("tiny", "decode", {"on": "cpu:8"}, mesh="tp=2,dp=4")
        write_serving_plan(serving, Path("my plans/serve.yaml"))
        settings = {"data": ("text.txt",), "learning_rate": None, "seed": None}
        run = Path("runs/tiny")
        begin_run(run, new_run("tiny", plan, run, steps=20, settings=settings), 0)
        for row in ROWS:
            append_metrics(run, row)
    return folder


def _replace_work(patch, name, folder):
    """Compilers, training and searches replaced by what they made before."""
    for place in TIMED:
        module, _, function = place.rpartition(".")
        patch.setattr(place, _kept(place, getattr(importlib.import_module(module), function)))
    if name in STORED:
        program = stored(STORED[name])
        for module in ("meshwright.proof.verification.plans", "meshwright.proof.inspection.functions"):
            patch.setattr(f"{module}.compile_in_child", lambda request: program)
    patch.setenv("HOME", str(folder / "home"))
    patch.setattr("meshwright.execution.training.loop.run_steps", _take_rows)
    patch.setattr("meshwright.execution.loading.library.Found.load", _loaded)
    patch.setattr(
        "meshwright.execution.models.inference.loaded.generate_tokens",
        lambda *_, **__: map(np.array, zip(b"f(x):\n    re", strict=True)),
    )
    patch.setattr("meshwright.execution.models.inference.loaded.LoadedModel.save", _saved)
    patch.setattr("meshwright.execution.models.inference.loaded.LoadedModel.losses", _losses)
    patch.setattr("meshwright.serving.load.drive.find_model", lambda *_: "llama3-8b")
    patch.setattr("meshwright.serving.load.drive.drive", _answered)
    patch.setattr("meshwright.cli.generate.command.perf_counter", itertools.count().__next__)
    patch.setattr("meshwright.cli.demo.subprocess.run", lambda *_, **__: Done())


def _loaded(found, **_):
    """The model of a run, without parameters."""
    import jax

    from meshwright.execution.models.inference.loaded import LoadedModel
    from meshwright.execution.runtime.mesh import build_mesh
    from meshwright.execution.text.tokenizer import byte_tokenizer

    mesh = build_mesh(found.mesh, jax.devices()[: found.mesh.num_devices])
    return LoadedModel(
        config=found.model, params={}, mesh=mesh, mesh_shape=found.mesh, system=found.system,
        dtype=found.dtype, stored_dtype=found.stored_dtype, tokenizer=byte_tokenizer(), source={}, seq_len=64,
    )  # fmt: skip


def _losses(model, texts):
    """Losses that fall along each text."""
    return [np.linspace(5.5, 1.25, len(model.encode(text)) - 1) for text in texts]


def _answered(target, requests, load, *, seed):
    """An answer to each request, of which a few failed and some were sent late."""
    from meshwright.serving.load.drive import Answer

    return [
        Answer(begin=at, end=at + 3.5 + at / 10, arrivals=(at + 0.2 + at / 100, at + 1.5, at + 3.4 + at / 10),
               prompt_tokens=120, output_tokens=150, late_seconds=at / 50,
               error={7: "status 429", 9: "connection lost"}.get(at % 50, ""))
        for at in range(len(requests))
    ]  # fmt: skip


def _saved(model, directory, **_):
    """Files as a model has them, instead of its weights."""
    directory.mkdir(exist_ok=True)
    for name, size in {"config.json": 612, "model.safetensors": 1_970_000, "tokenizer.json": 4810}.items():
        (directory / name).write_bytes(bytes(size))


class Done:
    """A process that did what it should."""

    returncode = 0


def _take_rows(config, directory, *, on_step, **_):
    """What `run_steps` does, with the steps of before."""
    from meshwright.execution.training.loop import Outcome
    from meshwright.execution.training.run_record import measured

    for row in ROWS:
        on_step(row)
    return Outcome(measured(config, ROWS), len(ROWS), None)


RESULTS = {}


def _kept(place, function):
    """A function that remembers its results; arguments are compared by what they print."""

    def call(*args, **options):
        key = place, repr([arg for arg in args if not (isfunction(arg) or ismethod(arg))] + sorted(options.items()))
        if key not in RESULTS:
            RESULTS[key] = function(*args, **options)
        return RESULTS[key]

    return call


def stored(name):
    """A compiled program as it was stored."""
    return program_from_json(json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes())), cached=True)


def _store():
    """Compile every stored program anew."""
    import tempfile

    from meshwright.proof.compiler.compile import compile_in_child

    DATA.mkdir(exist_ok=True)
    for name, file in STORED.items():
        if name in ("verify run", "verify plan"):
            continue

        def compiled(request, file=file):
            program = compile_in_child(request)
            if file.startswith("tiny"):  # `verify` reads neither.
                program = replace(program, annotated="", propagated="")
            text = json.dumps(program.to_json(), sort_keys=True).encode()
            (DATA / f"{file}.json.gz").write_bytes(gzip.compress(text, mtime=0))
            return program

        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as cache:
            patch.setenv("XDG_CACHE_HOME", cache)
            for module in ("meshwright.proof.verification.plans", "meshwright.proof.inspection.functions"):
                patch.setattr(f"{module}.compile_in_child", compiled)
            main(SCREENS[name])


if __name__ == "__main__":
    _store()
