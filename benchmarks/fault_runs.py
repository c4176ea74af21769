"""Runs of training that trials break: what they train, how they are started, and the same run unbroken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from fault_trials import Command, Trial, is_plain

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "execution" / "training"))
from test_training_killed import last_state
from test_training_moves import CONFIG, chats, text

STEPS, EVERY = 18, 3
TOLERANCE = 1e-4
"""Between the losses of a run on several meshes, relative, in float32: sums are taken in another order."""

SAME = "Resumed on the same mesh, losses and final parameters are bit-equal to the unbroken run's"
MESHES = f"Resumed on other meshes, devices or processes, every loss is within {TOLERANCE:g} of the unbroken run's"
LOSES = "Nothing is lost before the last checkpoint that was promised"
PLAIN = "No command ends with a traceback, and each exit code is a documented one"


@dataclass(frozen=True)
class Recipe:
    """What a run trains: what makes its data and has its options, and the meshes of 8 and of 4 devices it may take."""

    name: str
    words: Callable[[Path], list[str]]
    mesh: str
    others: tuple[str, ...]
    options: tuple[str, ...] = ()

    def train(self, root: Path, mesh: str | None = None) -> list[str]:
        """The command line, without the run directory."""
        mesh = mesh or self.mesh
        devices = np.prod([int(part.split("=")[1]) for part in mesh.split(",")])
        words = [
            "train",
            *self.words(data_folder(root, self.words)),
            "--on",
            f"cpu:{devices}",
            "--mesh",
            mesh,
            "--batch",
        ]
        return [*words, "8", "--seq-len", "32", "--steps", str(STEPS), *self.options]


def _moe(directory: Path) -> list[str]:
    return ["tiny-moe", *text(directory)[1:]]


def _moe_chats(directory: Path) -> list[str]:
    words = chats(directory)
    experts = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    config = CONFIG | experts | {"num_experts_per_tok": 2}
    (directory / "model" / "config.json").write_text(json.dumps(config))
    return words


def _lora(directory: Path) -> list[str]:
    """Adapters of a model that was trained and exported."""
    words, base, exported = chats(directory), directory / "base", directory / "exported"
    for folder in (base, exported):
        shutil.rmtree(folder, ignore_errors=True)
    made = ["train", *words, "--on", "cpu:1", "--mesh", "dp=1", "--batch", "8", "--seq-len", "32", "--steps", "2"]
    for command in ([*made, "-o", base], ["export", base, exported]):
        done = Command(command, directory / "log")
        assert done.wait() == 0, done.text
    return [str(exported), *words[2:], "--lora-rank", "4", "--learning-rate", "0.01"]


def data_folder(root: Path, words: Callable[[Path], list[str]]) -> Path:
    """The folder in a campaign's of the data that a function writes."""
    folder = root / words.__name__
    folder.mkdir(exist_ok=True)
    return folder


TEXT, CHATS, MOE, MOE_CHATS, LORA = map(cache, (text, chats, _moe, _moe_chats, _lora))
DENSE = ("fsdp=8", "fsdp=4", "dp=2,tp=2", "fsdp=2,sp=2,tp=2", "pp=2,fsdp=2")
EXPERTS = ("fsdp=8", "ep=4", "ep=2,fsdp=2", "pp=2,ep=2", "ep=4,tp=2")
RECIPES = (
    Recipe("text", TEXT, "dp=2,fsdp=2,tp=2", DENSE),
    Recipe("text, stages", TEXT, "pp=2,fsdp=2", DENSE, ("--num-microbatches", "2")),
    Recipe("chats, a mixture, packed", CHATS, "fsdp=4,sp=2", DENSE),
    Recipe("chats, stages, dropout", CHATS, "pp=2,tp=2", DENSE, ("--dropout", "0.1", "--num-microbatches", "2")),
    Recipe("chats, padded, Muon", CHATS, "dp=2,tp=2", DENSE, ("--rows", "padded", "--optimizer", "muon")),
    Recipe("text, bf16 with master weights", TEXT, "fsdp=4", DENSE, ("--param-dtype", "bf16", "--master-weights")),
    Recipe("experts", MOE, "ep=4,fsdp=2", EXPERTS),
    Recipe("experts, stages", MOE, "pp=2,ep=2", EXPERTS, ("--num-microbatches", "2")),
    Recipe("experts, chats, packed", MOE_CHATS, "ep=2,tp=2,fsdp=2", EXPERTS),
    Recipe("adapters", LORA, "dp=2,fsdp=2,tp=2", DENSE),
    Recipe("adapters, stages", LORA, "pp=2,fsdp=2", DENSE, ("--num-microbatches", "2")),
)


class Run:
    """A run directory of a trial, and the commands that train in it."""

    def __init__(self, trial: Trial, recipe: Recipe, directory: Path | None = None) -> None:
        self.trial, self.recipe = trial, recipe
        self.directory = directory or trial.folder / "run"

    def start(
        self, *more: str, mesh: str | None = None, before: Sequence[Callable[[], object]] = (), log: str = "log"
    ) -> Command:
        """Begin the run, or continue with it."""
        words = [*self.recipe.train(self.trial.root, mesh), "--save-every", str(EVERY), "--resume", *more]
        return Command([*words, "-o", self.directory], self.trial.folder / log, before)

    def ended(self, command: Command, *codes: int) -> int | None:
        """Wait for a command; its exit code has to be one of those given, without a traceback."""
        code = command.wait()
        self.trial.hold(
            PLAIN, code in codes and is_plain(command.text), f"exit code {code}, not {codes}:\n{command.text}"
        )
        return code

    def rows(self) -> int:
        """The steps in metrics, in lines of their own; 0 while there are none."""
        try:
            return (self.directory / "metrics.jsonl").read_bytes().count(b'"loss": ')
        except OSError:
            return 0

    def checkpoints(self) -> list[int]:
        """The steps of all checkpoints."""
        return sorted(int(path.name) for path in (self.directory / "checkpoints").glob("*") if path.name.isdigit())

    def wait_for_moment(self, command: Command, moment: str) -> None:
        """Wait until a run starts, is in a step or in a save, and some time more."""
        before, rng = self.rows(), self.trial.rng
        if moment == "starting":
            time.sleep(rng.uniform(0.0, 4.0))
        elif moment == "training":
            command.wait_for(lambda: self.rows() > before)
            time.sleep(rng.uniform(0.0, 0.6))
        else:
            saves = self.directory / "checkpoints"
            command.wait_for(lambda: self.rows() > before and any(saves.glob("*.partial*")))
            time.sleep(rng.uniform(0.0, 0.05))

    def stop_at(self, step: int, *more: str, mesh: str | None = None) -> None:
        """Train, and stop by SIGTERM once so many steps are taken."""
        command = self.start(*more, mesh=mesh)
        command.wait_for(lambda: self.rows() >= step)
        command.signal(signal.SIGTERM)
        self.ended(command, 0)

    def finish(self, *more: str) -> str:
        """Train to the end; what was printed."""
        command = self.start(*more)
        self.ended(command, 0)
        return command.text

    def losses(self) -> dict[int, float]:
        """The loss of each step."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def unbroken(trial: Trial, recipe: Recipe) -> tuple[Run, Path]:
    """The unbroken run of a recipe, made once a campaign, and the file of its last state."""
    directory = trial.root / f"unbroken {RECIPES.index(recipe)}"
    run = Run(trial, recipe, directory)
    state = directory.with_suffix(".npz")
    if not state.exists():
        shutil.rmtree(directory, ignore_errors=True)
        run.finish()
        _write_state(run, state)
    return run, state


def _write_state(run: Run, to: Path) -> None:
    """Write the last state of a run, read in another process: this one never starts JAX's devices."""
    from meshwright.execution.runtime.devices import claim_devices
    from meshwright.execution.training.run_directory.run import read_config

    def write() -> None:
        claim_devices(read_config(run.directory).system)
        np.savez(to, **last_state(run.directory, STEPS))
        os._exit(0)

    reader = Command(["--version"], run.trial.folder / "reading", [write])
    assert reader.wait() == 0, reader.text


def compare(run: Run, *, is_moved: bool = False, all_rows: bool = True) -> None:
    """Compare a finished run with the unbroken one."""
    trial = run.trial
    if not (run.directory / "checkpoints" / str(STEPS)).is_dir():
        trial.hold(MESHES if is_moved else SAME, False, f"the run has no checkpoint {STEPS}: {run.checkpoints()}")
        return
    reference, state = unbroken(trial, run.recipe)
    expected, found = reference.losses(), run.losses()
    if all_rows:
        trial.hold(LOSES, sorted(found) == list(range(STEPS)), f"steps in metrics.jsonl: {sorted(found)}")
    if is_moved:
        wrong = {step: (loss, expected[step]) for step, loss in found.items() if not _is_near(loss, expected[step])}
        trial.hold(MESHES, not wrong, f"step: (loss, unbroken) {wrong}")
        return
    wrong = {step: (loss, expected[step]) for step, loss in found.items() if loss != expected[step]}
    _write_state(run, own := trial.folder / "state.npz")
    before, after = np.load(state), np.load(own)
    arrays = [
        name
        for name in {*before.files, *after.files}
        if name not in before or name not in after or not np.array_equal(before[name], after[name])
    ]
    trial.hold(SAME, not wrong and not arrays, f"step: (loss, unbroken) {wrong}; arrays that differ: {arrays}")


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * abs(other)
