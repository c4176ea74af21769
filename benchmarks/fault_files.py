"""Trials of small files: cut at every byte, or with a flipped bit in every byte, and read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fault_trials import Command, Trial, error_lines

REFERENCES = Path(__file__).parents[1] / "tests" / "references"
CUT = "A file that is cut, at any byte, is read as the whole one or refused in one line, with exit code 2"
FLIPPED = "A file with a flipped bit is refused in one line, with exit code 2, or read as the file that it then is"
CHECKED = "A flipped bit of what has a checksum (checkpoints, token stores) is found"
PROMISES = (CUT, FLIPPED, CHECKED)


@dataclass(frozen=True)
class Subject:
    """A kind of file. make: writes one in a folder; read: the text of what is read from it."""

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], str]
    has_checksum: bool = False
    most: int | None = None
    """Only so many of its first bytes are changed: those of a header."""
    may_lose_end: bool = False
    """Whether a line that is cut is left out, as in a file to which a killed process appended."""


class RefusedError(Exception):
    """A command ended with exit code 2 and these lines on stderr."""


def command(*words: object) -> str:
    """What a command prints; raises if it refuses its input."""
    from meshwright.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    if code == 2:
        raise RefusedError(err.getvalue())
    assert code == 0, f"exit code {code}: {err.getvalue()}"
    return out.getvalue()


def _plan(folder: Path) -> Path:
    command("plan", "tiny-moe", "--on", "cpu:8", "--batch", 16, "--mesh", "ep=2,fsdp=4", "-o", folder / "plan.yaml")
    return folder / "plan.yaml"


def _json_plan(folder: Path) -> Path:
    command("plan", "tiny", "--on", "v5e:2x2", "--batch", 16, "-o", folder / "plan.json")
    return folder / "plan.json"


def _serving_plan(folder: Path) -> Path:
    words = ["plan", "tiny", "--on", "cpu:8", "--serve", "decode", "--mesh", "tp=8", "--batch", 8, "--prompt-len", 32]
    command(*words, "--output-len", 32, "-o", folder / "serve.yaml")
    return folder / "serve.yaml"


def _read_plan(path: Path) -> str:
    from meshwright.planning.plan import read_plan

    # Where the file's prediction is another, a plan is predicted again, and has a note about that.
    plan = read_plan(path)
    return repr(replace(plan, predicted=replace(plan.predicted, notes=())))


def _read_serving_plan(path: Path) -> str:
    from meshwright.planning.serving.plan import read_serving_plan

    plan = read_serving_plan(path)
    return repr(replace(plan, predicted=replace(plan.predicted, notes=())))


def _model(folder: Path) -> Path:
    shutil.copy(REFERENCES / "llama_yarn" / "config.json", folder)
    return folder / "config.json"


def _chip(folder: Path) -> Path:
    from meshwright.description.hardware.load import DATA

    text = (DATA / "v5e.toml").read_text().replace('name = "v5e"', 'name = "mine"')
    (folder / "chip.toml").write_text(text)
    return folder / "chip.toml"


def _read_chip(path: Path) -> str:
    from meshwright.description.hardware.system import parse_system

    return repr(parse_system("mine:2x2", hardware_file=str(path)))


def _weights(folder: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(REFERENCES / "llama" / name, folder)
    return folder / "model.safetensors"


def _read_weights(path: Path) -> str:
    from meshwright.description.families.load import load_model
    from meshwright.execution.weights.load import check_tensors, read_tensors
    from meshwright.execution.weights.places import places

    model, tensors = load_model(str(path.parent)), read_tensors(path.parent)
    check_tensors(tensors, places(model), model)
    return repr(sorted((name, one.dtype, one.shape, one.start) for name, one in tensors.items()))


def _adapter(folder: Path) -> Path:
    shutil.copy(REFERENCES / "adapters" / "llama" / "adapter_config.json", folder)
    return folder / "adapter_config.json"


def _read_adapter(path: Path) -> str:
    from meshwright.description.families.adapters import read_adapter_config
    from meshwright.description.families.registry import PRESETS

    return repr(read_adapter_config(path.parent, PRESETS["tiny"]))


def _run(folder: Path) -> Path:
    """A run of a few steps, made once a campaign."""
    made = folder.parent / "run of files"
    if not made.exists():
        (folder / "text.txt").write_text("To be, or not to be: that is the question. " * 60)
        words = ["train", "tiny", "--num-layers", 1, "--on", "cpu:1", "--mesh", "dp=1", "--batch", 4, "--seq-len", 32]
        words += ["--data", folder / "text.txt", "--steps", 4, "--save-every", 2, "-o", made]
        done = Command(words, folder / "log")
        assert done.wait() == 0, done.text
    return Path(shutil.copytree(made, folder / "run", dirs_exist_ok=True))


def _read_config(path: Path) -> str:
    from meshwright.execution.training.run_directory.run import read_config

    return json.dumps(read_config(path.parent).to_json())


def _read_report(path: Path) -> str:
    return command("report", path.parent, "-o", path.parent.parent / "report.html")


def _read_metrics(path: Path) -> str:
    from meshwright.execution.training.run_directory.run import read_metrics, repair_lines

    repair_lines(path.parent, lambda line: None)
    _read_report(path)
    return json.dumps(read_metrics(path.parent))


def _read_checkpoint(path: Path) -> str:
    from meshwright.errors import MeshwrightError
    from meshwright.support.checksums import find_damage

    if damage := find_damage(next(one for one in path.parents if one.name == "4")):
        raise MeshwrightError(damage)
    return "whole"


def _store(folder: Path) -> Path:
    (folder / "lines.jsonl").write_text("".join(f'{{"text": "{n} is a number."}}\n' for n in range(40)))
    command("tokenize", folder / "lines.jsonl", "-o", folder / "tokens", "--processes", 1)
    return folder / "tokens"


def _read_store(path: Path) -> str:
    from meshwright.execution.data.store import open_store

    store = open_store(path.parent)
    return repr([store.read(number).tokens.tolist() for number in range(store.info.documents)])


def _of_run(name: str) -> Callable[[Path], Path]:
    return lambda folder: _run(folder) / name


def _of_checkpoint(pattern: str) -> Callable[[Path], Path]:
    return lambda folder: sorted((_run(folder) / "checkpoints" / "4").glob(pattern))[0]


def _of_store(name: str) -> Callable[[Path], Path]:
    return lambda folder: _store(folder) / name


def _import(path: Path) -> str:
    return command("plan", "--import", path, "--on", "v5e:4x4", "--json")


def _settings(folder: Path) -> Path:
    words = ["plan", "tiny", "--on", "v5e:2x2", "--batch", 16, "--mesh", "fsdp=4", "--export", "maxtext"]
    command(*words, "-o", folder / "settings.yml")
    return folder / "settings.yml"


SUBJECTS = (
    Subject("plan.yaml", _plan, _read_plan),
    Subject("plan.json", _json_plan, _read_plan),
    Subject("serve.yaml", _serving_plan, _read_serving_plan),
    Subject("a model's config.json", _model, lambda path: command("plan", path, "--on", "cpu:1", "--batch", 1, "--seq-len", 64, "--mesh", "dp=1", "--json")),  # noqa: E501
    Subject("chip.toml", _chip, _read_chip),
    Subject("the header of safetensors", _weights, _read_weights, most=4000),
    Subject("adapter_config.json", _adapter, _read_adapter),
    Subject("a run's config.json", _of_run("config.json"), _read_config),
    Subject("metrics.jsonl", _of_run("metrics.jsonl"), _read_metrics, may_lose_end=True),
    Subject("compiled.json", _of_run("compiled.json"), _read_report),
    Subject("SHA256SUMS", _of_checkpoint("SHA256SUMS"), _read_checkpoint, has_checksum=True),
    Subject("a checkpoint's arrays", _of_checkpoint("params/d/*"), _read_checkpoint, has_checksum=True),
    Subject("a checkpoint's config", _of_checkpoint("config/metadata"), _read_checkpoint, has_checksum=True),
    Subject("store.json", _of_store("store.json"), _read_store),
    Subject("tokens of a store", _of_store("000000.tokens.npy"), _read_store, has_checksum=True),
    Subject("offsets of a store", _of_store("offsets.npy"), _read_store, has_checksum=True),
)  # fmt: skip


def damages(
    data: bytes, how: str, most: int, rng: random.Random, *, end: int | None = None
) -> Iterator[tuple[str, bytes]]:
    """A file cut at, or with a bit flipped in, each of its bytes; of more than `most` bytes, equally many apart."""
    size = min(len(data), end or len(data))
    every = max(1, size / most)
    for number in range(int(size / every)):
        at = min(size - 1, int((number + rng.random()) * every)) if every > 1 else number
        if how == "cut":
            yield f"cut at byte {at}", data[:at]
        else:
            bit = rng.randrange(8)
            yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def outcome(subject: Subject, path: Path) -> tuple[str, str]:
    """What reading a file gives: ("read", its text), ("refused", a line) or ("broke", why)."""
    from meshwright.errors import MeshwrightError

    try:
        return "read", subject.read(path)
    except RefusedError as error:
        lines = str(error).splitlines()
        is_line = len(error_lines(str(error))) == 1 and lines[-1].startswith("error: ")
        return ("refused" if is_line else "broke"), str(error)
    except MeshwrightError as error:
        return ("broke" if "\n" in str(error) else "refused"), str(error)
    except BaseException as error:
        return "broke", f"{type(error).__name__}: {error}"


def _damage_all(subject: Subject, folder: Path, how: str, most: int, seed: int, to: Path) -> None:
    """Damage a file in every way, read it each time, and write the number of each outcome and what broke."""
    # Progress lines of what is read belong to nobody.
    path = subject.make(folder)
    data, rng = path.read_bytes(), random.Random(seed)
    is_whole, whole = outcome(subject, path)
    assert is_whole == "read", whole
    counts: dict[str, int] = {}
    broke: list[str] = []
    previous = {one: one.read_bytes() for one in path.parent.iterdir() if one.is_file()}
    for what, damaged in damages(data, how, most, rng, end=subject.most):
        path.write_bytes(damaged)
        result, said = outcome(subject, path)
        if result == "read":
            result = "equal" if said == whole else "other"
        counts[result] = counts.get(result, 0) + 1
        is_wrong = result == "broke" or (result == "other" and (how == "cut" or subject.has_checksum))
        if is_wrong and not (subject.may_lose_end and result == "other"):
            broke.append(f"{subject.name}, {what}: {result} {said[:300]}")
        for one in path.parent.iterdir():
            if one.is_file() and one not in previous:
                one.unlink()
        path.write_bytes(data)
    to.write_text(json.dumps({"counts": counts, "broke": broke}))


def files(trial: Trial, most: int) -> None:
    """A trial: one kind of file, cut or flipped at up to `most` of its bytes."""
    subject, how = trial.rng.choice(SUBJECTS), trial.rng.choice(("cut", "flip"))
    damage_file(trial, subject, how, most)


def damage_file(trial: Trial, subject: Subject, how: str, most: int) -> None:
    """Cut or flip a kind of file in a child process, and count each byte as a try."""
    to = trial.folder / "found.json"

    def work() -> None:
        _damage_all(subject, trial.folder, how, most, trial.seed, to)
        sys.stdout.flush()
        os._exit(0)

    if any(part in subject.name for part in ("run", "metrics", "compiled", "checkpoint", "SHA")):
        _run(trial.folder)
    child = Command(["--version"], trial.folder / "log", [work])
    code = child.wait(1200)
    promise = CHECKED if how == "flip" and subject.has_checksum else CUT if how == "cut" else FLIPPED
    if not trial.hold(promise, code == 0, f"{subject.name}: {child.text}"):
        return
    found: dict[str, Any] = json.loads(to.read_text())
    trial.do(f"{subject.name}, {how} at {sum(found['counts'].values())} bytes: {found['counts']}")
    trial.tried[promise] += sum(found["counts"].values()) - 1
    trial.broke += [(promise, line) for line in found["broke"]]
