"""What runs without the extras, and the one line where one is missing: packages are hidden, then absent."""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from child_flags import CHILD_FLAGS

from meshwright.cli.main import COMMANDS, EXTRAS
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.support import extras

ROOT = Path(__file__).parents[2]
PARTS = {
    extra: [text for text in part if ";" not in text]
    for extra, part in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].items()
}
"""What each extra brings on every Python; the compilers of one Python are looked for where they are started."""

TRAIN = ["tiny", "--on", "cpu:8", "--batch", "16", "--seq-len", "64", "--mesh", "fsdp=2,tp=4"]

NEED_AN_EXTRA = {
    "tokenize": ["words.txt", "-o", "tokens"],
    "train": [*TRAIN, "-o", "runs/second"],
    "launch": ["--", "train", *TRAIN],
    "generate": ["runs/first"],
    "serve": ["runs/first"],
    "export": ["runs/first", "exported"],
    "eval": ["runs/first", "--data", "words.txt"],
    "bench-serve": ["http://127.0.0.1:8000"],
    "demo": [],
}

BASE = {
    "plan": ["llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--seq-len", "8192", "--mesh", "fsdp=64"],
    "verify": TRAIN,
    "inspect": ["inspect_programs:split", "--mesh", "dp=2,tp=4"],
    "report": ["runs/first", "-o", "page.html"],
    "matmul": ["A[B_X, D] @ W[D_X, F] -> C[B_X, F]", "--mesh", "X=8", "--dims", "B=64,D=64,F=64", "--on", "v5p:2x2x2"],
    "collective": ["all-gather", "--mesh", "X=4", "--axis", "X", "--on", "v5e:4x4", "--bytes", "64K", "--run"],
    "chips": ["v5e"],
    "devices": [],
    "show": ["A[I_X, J_Y]", "--mesh", "X=2,Y=2", "--dims", "I=8,J=8"],
    "show pipeline": ["--stages", "4", "--microbatches", "8"],
    "completion": ["bash", "--print"],
    "fix": ["inspect_programs:step", "--on", "cpu:8", "--compiled", "0"],
    "learn": ["5"],
}

# Each Python that starts loads it, so the compilers that verify starts do too.
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""

# Commands in one process, which loads JAX once. It prints the exit code and stderr of each.
RUN_ALL = """
import contextlib, io, json, sys
from meshwright.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    found.append([code, err.getvalue()])
print(json.dumps(found))
"""


def package(requirement):
    """The name of the distribution that a requirement asks for."""
    return re.match(r"[\w.-]+", requirement)[0]


def make_run(directory):
    """The directory of a run that took two steps, written by hand."""
    workload = Workload(model=PRESETS["tiny"], batch=16, seq_len=64, compute_dtype="f32")
    config = RunConfig(
        workload=workload, mesh=MeshShape(fsdp=2, tp=4), hardware="cpu:8", optimizer=Optimizer(decay_steps=2), steps=2
    )
    row = {
        "mesh": str(config.mesh), "hardware": "cpu:8", "began_at": 0, "loss": 5.0, "grad_norm": 1.5,
        "learning_rate": 0.001, "step_seconds": 0.5, "input_seconds": 0.05, "tokens_per_second": 512.0, "mfu": None,
        "memory_peak_bytes": None, "sources": {},
    }  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config.to_json()))
    rows = [row | {"step": step, "time": 110.0 + step} for step in range(2)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def hide(tmp_path):
    """A folder for PYTHONPATH with which no module of an extra can be found."""
    names = {extras._module(package(text)).partition(".")[0] for part in PARTS.values() for text in part}
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDE.format(names=names - {"meshwright"}))
    return str(tmp_path / "hidden")


def run_hidden(commands, tmp_path, *more):
    """Run commands where no module of an extra can be found; the exit code and stderr of each, and of more words."""
    (tmp_path / "words.txt").write_text("a few words\n")
    make_run(tmp_path / "runs" / "first")
    words = [[*name.split(), *words] for name, words in commands.items()] + [*more]
    paths = [hide(tmp_path), str(ROOT / "tests" / "cli"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(words)],
        env={**os.environ, "XLA_FLAGS": CHILD_FLAGS, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_installed_metadata_has_the_extras_of_pyproject():
    """Else the environment is older than pyproject.toml: `make .venv/installed` installs it again."""
    own = {extra: [package(text) for text in part if package(text) != "meshwright"] for extra, part in PARTS.items()}
    assert {extra: sorted(names) for extra, names in extras._packages().items()} == {
        extra: sorted(names) for extra, names in own.items() if names
    }


def test_each_command_without_its_extra_ends_in_one_line_that_names_it(tmp_path):
    assert set(NEED_AN_EXTRA) == {*EXTRAS, "launch"}
    ends = run_hidden(
        NEED_AN_EXTRA, tmp_path, ["train", "--help"], ["plan", *TRAIN, "--sweep", "chips=8", "--plot", "a.svg"]
    )
    for (name, extra), (code, line) in zip(
        [*((name, EXTRAS.get(name, ("train",))[0]) for name in NEED_AN_EXTRA)], ends[:-2], strict=True
    ):
        what = f"{name}( train)?" if name == "launch" else name
        assert re.fullmatch(rf"error: {what} needs pip install meshwright\[{extra}\]; not installed: .*\n", line), line
        assert code == 2
    assert ends[-2] == [0, ""]
    assert ends[-1] == [2, "error: --plot needs pip install meshwright[charts]; not installed: matplotlib\n"]
    assert not (tmp_path / "runs" / "second").exists()


@pytest.mark.parametrize("name", ["train", "serve"])
def test_a_function_without_its_extra_raises_the_same_line(name, tmp_path):
    program = (
        f"import meshwright as mw\ntry:\n    mw.{name}('tiny')\nexcept mw.MeshwrightError as error:\n    print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([hide(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(f"{name} needs pip install meshwright[{name}]; not installed: "), done.stderr


@pytest.mark.slow
def test_the_other_commands_need_no_extra(tmp_path):
    assert {*BASE, *NEED_AN_EXTRA} == set(COMMANDS)
    ends = dict(zip(BASE, run_hidden(BASE, tmp_path), strict=True))
    assert {name: end for name, end in ends.items() if end[0] != 0} == {}


def test_one_of_two_extras_is_enough(monkeypatch):
    monkeypatch.setattr(
        extras, "_packages", lambda: {"train": ["json", "not-there", "nor-this", "nor-that"], "serve": ["json"]}
    )
    extras.require_extra("one", "train", "serve")
    with pytest.raises(
        MeshwrightError, match=r"^it needs pip install meshwright\[train\]; .* not-there, nor-this and 1 more$"
    ):
        extras.require_extra("it", "train")


def test_a_module_of_no_extra_stays_an_import_error():
    assert extras.missing_extra("plan", ModuleNotFoundError(name="their_module")) is None
    error = extras.missing_extra("report", ModuleNotFoundError(name="orbax.checkpoint"))
    assert str(error) == "report needs pip install meshwright[train]; not installed: orbax-checkpoint"


@pytest.mark.matrix
def test_a_wheel_in_an_empty_environment_plans_inspects_and_shows(tmp_path):
    """From the registry, with the versions of this environment: a package that comes out tomorrow breaks no test."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}

    def run(*words, **changes):
        env = environment | {"COLUMNS": "100"} | changes
        return subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)

    def pip(*words):
        done = run(sys.executable, "-m", "pip", "--disable-pip-version-check", *words)
        assert done.returncode == 0, done.stderr

    listed = ["git", "-C", str(ROOT), "ls-files", "src", "pyproject.toml", "README.md", "LICENSE"]
    files = run(*listed).stdout.split()
    for name in files:  # A build writes into its source.
        copy = tmp_path / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(tmp_path / "source"))
    (wheel,) = tmp_path.glob("*.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    assert {name.removeprefix("src/") for name in files if name.startswith("src/")} - {*packed} == set()

    bin_ = tmp_path / "venv" / "bin"
    venv.create(bin_.parent, symlinks=True)
    here = {d.name: d.version for d in distributions() if d.name != "meshwright"}
    (tmp_path / "versions.txt").write_text("".join(f"{name}=={version}\n" for name, version in here.items()))
    install = ["install", "--no-compile", "--constraint", str(tmp_path / "versions.txt"), str(wheel)]
    pip("--python", str(bin_ / "python"), *install)
    make_run(tmp_path / "runs" / "first")
    for name in ("plan", "verify", "inspect", "show", "report"):
        done = run(str(bin_ / "meshwright"), name, *BASE[name], PYTHONPATH=str(ROOT / "tests" / "cli"))
        assert (done.returncode, done.stderr) == (0, ""), name
        assert done.stdout
    for name in ("train", "serve", "generate"):
        done = run(str(bin_ / "meshwright"), name, *NEED_AN_EXTRA[name])
        assert done.returncode == 2
        assert re.fullmatch(rf"error: {name} needs pip install meshwright\[{EXTRAS[name][0]}\]; .*\n", done.stderr)
