"""Trials of training: a run is broken in one of many ways, resumed, and compared with the same run unbroken."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fault_runs import EVERY, LOSES, MESHES, PLAIN, RECIPES, SAME, STEPS, Recipe, Run, compare, data_folder, unbroken
from fault_trials import Command, Trial, damage, error_lines, is_plain
from test_training_processes import child_of

SIGNALS = "SIGTERM, SIGHUP and Ctrl-C save the step, and end with 0, 0 and 130"
NAMED = "Damage is named in one line, with exit code 2 where the run cannot continue"
WRITERS = "A second process in a run directory is refused with exit code 1, and the first is not disturbed"
FULL = "A full disk ends a run with exit code 1 only if its last checkpoint cannot be written; one line names it"
PROCESSES = "A process that dies or stops is named, and the run is finished without it or with it started again"
PROMISES = (SAME, MESHES, LOSES, SIGNALS, NAMED, PLAIN, WRITERS, FULL, PROCESSES)


def kill(run: Run) -> None:
    """Kill -9 at some moments, also in a save."""
    for _ in range(run.trial.rng.randint(1, 3)):
        moment = run.trial.rng.choice(("starting", "training", "saving", "saving"))
        run.trial.do(f"kill -9 while {moment}")
        command = run.start()
        run.wait_for_moment(command, moment)
        rows = run.rows()
        command.signal(signal.SIGKILL)
        command.wait()
        # A save waits for the one before it, and begins after its step's row: with a later row, that one is complete.
        promised = max(0, (rows - 1) // EVERY * EVERY - EVERY)
        run.trial.hold(LOSES, max(run.checkpoints(), default=0) >= promised, (rows, run.checkpoints()))
    run.finish()
    compare(run)


def stop(run: Run) -> None:
    """SIGTERM, SIGHUP or Ctrl-C at a moment: nothing is lost."""
    number, expected = run.trial.rng.choice([(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
    moment = run.trial.rng.choice(("starting", "training", "saving"))
    run.trial.do(f"{number.name} while {moment}")
    command = run.start()
    run.wait_for_moment(command, moment)
    is_early = command.is_running()
    command.signal(number)
    code = command.wait()
    taken = len(run.losses()) if run.rows() else 0
    # Before the handlers are there, SIGHUP ends any process; and a run that is through with its steps ends with 0.
    codes = {expected} | ({0} if taken == STEPS or not is_early else set()) | ({-number} if not taken else set())
    saved = max(run.checkpoints(), default=0)
    run.trial.hold(SIGNALS, code in codes and saved == taken, f"exit code {code}, {taken} steps, checkpoint {saved}")
    run.trial.hold(PLAIN, is_plain(command.text), command.text)
    again = run.finish()
    run.trial.hold(LOSES, "are taken again" not in again, again)
    compare(run)


def full_disk(run: Run) -> None:
    """A disk that gets full, or files that may not grow, for a while or for good."""
    rng, disk = run.trial.rng, run.trial.folder / "disk"
    disk.mkdir()
    size = 40
    is_mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}m", "none", str(disk)], capture_output=True
        ).returncode
        == 0
    )
    try:
        if is_mounted and rng.random() < 0.7:
            run.directory = disk / "run"
            _fill(run, disk, size, is_freed=rng.random() < 0.5)
        else:
            limit = rng.randrange(1, 200) << 10
            run.trial.do(f"files of at most {limit} bytes")
            command = run.start(
                before=[lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))]
            )
            _ended_by_disk(run, command)
        run.finish()
        compare(run)
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(disk)], check=False)


def _fill(run: Run, disk: Path, size: int, *, is_freed: bool) -> None:
    """Fill a disk once there is a checkpoint."""
    filler = disk / "filler"
    left = run.trial.rng.randrange(0, 1 << 20)
    run.trial.do(f"a disk of {size} MiB that has {left} bytes left" + (" for a while" if is_freed else ""))
    command = run.start()
    command.wait_for(lambda: bool(run.checkpoints()))
    free = shutil.disk_usage(disk).free
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - left))
    if is_freed:
        time.sleep(run.trial.rng.uniform(0.1, 1.5))
        filler.unlink()
    _ended_by_disk(run, command)
    filler.unlink(missing_ok=True)


def _ended_by_disk(run: Run, command: Command) -> None:
    code, text = command.wait(), command.text
    lines = error_lines(text)
    last = max(run.checkpoints(), default=None)
    is_named = len(lines) == 1 and (last is None or f"checkpoints/{last}" in lines[0] or code == 2)
    run.trial.hold(FULL, code == 0 or (code in (1, 2) and is_named), f"exit code {code}, checkpoint {last}:\n{text}")
    run.trial.hold(PLAIN, is_plain(text) and code in (0, 1, 2), f"exit code {code}:\n{text}")


def damaged_checkpoint(run: Run) -> None:
    """A file of the last checkpoint is changed, or one of every checkpoint."""
    rng = run.trial.rng
    run.stop_at(rng.randrange(2 * EVERY, STEPS - EVERY))
    steps = run.checkpoints()
    if not run.trial.hold(LOSES, len(steps) > 1, steps):
        return
    is_all = rng.random() < 0.3
    kept = run.trial.folder / "kept"
    shutil.copytree(run.directory, kept)
    for step in steps if is_all else steps[-1:]:
        files = sorted(path for path in (run.directory / "checkpoints" / str(step)).rglob("*") if path.is_file())
        run.trial.do(f"checkpoint {step}: {damage(rng, rng.choice(files))}")
    command = run.start()
    if not is_all:
        run.ended(command, 0)
        said = f"checkpoints/{steps[-1]} is damaged: "
        is_named = command.text.count(said) == 1 and f"checkpoint {steps[-2]} is whole and is taken" in command.text
        is_kept = any((run.directory / "checkpoints").glob(f"{steps[-1]}.damaged*"))
        run.trial.hold(NAMED, is_named and is_kept, command.text)
    else:
        run.ended(command, 2)
        lines = error_lines(command.text)
        run.trial.hold(NAMED, len(lines) == 1 and "no other is whole" in lines[0], command.text)
        shutil.rmtree(run.directory)
        shutil.copytree(kept, run.directory)
        run.finish()
    compare(run)


def damaged_file(run: Run) -> None:
    """A small file of the run directory is changed: the run is refused in a line, or is the same."""
    rng = run.trial.rng
    run.stop_at(rng.randrange(EVERY, STEPS - EVERY))
    files = [path for path in run.directory.iterdir() if path.is_file()] + [
        path for path in (run.directory / "pretrained").glob("*") if path.is_file()
    ]
    path = rng.choice(sorted(files) + [run.directory / "config.json"] * 3)
    before = path.read_bytes()
    what = damage(rng, path)
    run.trial.do(what)
    command = run.start()
    code = run.ended(command, 0, 2)
    if code == 2:
        run.trial.hold(NAMED, len(error_lines(command.text)) == 1, command.text)
        path.write_bytes(before)
        run.finish()
    elif path.name == "config.json" and path.read_bytes() != before and _values(path) != _values_of(before):
        # A field has another value that it may have: a line has to say so.
        run.trial.hold(NAMED, "note" in command.text, command.text)
        return
    compare(run, all_rows=path.name != "metrics.jsonl")


def _values(path: Path) -> object:
    return _values_of(path.read_bytes())


def _values_of(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


def damaged_data(run: Run) -> None:
    """A file of the data, or of the caches that are made from it, is changed between two starts."""
    rng = run.trial.rng
    folder = data_folder(run.trial.root, run.recipe.words)
    own, cache = run.trial.folder / "data", run.trial.folder / "cache"
    shutil.copytree(folder, own)
    before = [lambda: os.environ.update(XDG_CACHE_HOME=str(cache))]
    # The programs of the campaign, which take longest to make, are shared.
    cache.mkdir()
    (cache / "meshwright").mkdir()
    (cache / "meshwright" / "executables").symlink_to(Path(os.environ["XDG_CACHE_HOME"]) / "meshwright" / "executables")
    words = [word.replace(str(folder), str(own)) for word in run.recipe.words(folder)]
    moved = Recipe(run.recipe.name, lambda _: words, run.recipe.mesh, (), run.recipe.options)
    there = Run(run.trial, moved)
    command = there.start(before=before)
    command.wait_for(lambda: bool(there.checkpoints()))
    command.signal(signal.SIGTERM)
    there.ended(command, 0)
    sources = [path for path in own.glob("*.*") if path.suffix in (".txt", ".jsonl")]
    cached = [path for path in (cache / "meshwright" / "tokens").rglob("*") if path.is_file()]
    path = rng.choice(rng.choice([each for each in (sources, cached) if each]))
    kept, times = path.read_bytes(), path.stat()
    what = damage(rng, path)
    if path.exists() and rng.random() < 0.5:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        what += ", its time as before"
    run.trial.do(what)
    command = there.start(before=before)
    if there.ended(command, 0, 2) == 2:
        run.trial.hold(NAMED, len(error_lines(command.text)) == 1, command.text)
        path.write_bytes(kept)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        command = there.start(before=before)
        there.ended(command, 0)
    there.recipe = run.recipe
    compare(there)


def clock(run: Run) -> None:
    """The clock jumps while a run trains and between two starts, and files are of the past or the future."""
    rng = run.trial.rng
    jump = rng.choice((-1, 1)) * 10 ** rng.uniform(1, 9)
    run.trial.do(f"the clock jumps by {jump:.3g} s in a run, and the times of its files between two")
    real = time.time

    def jumping() -> None:
        at = real() + rng.uniform(0.0, 6.0)
        time.time = lambda: real() + (jump if real() > at else 0.0)

    command = run.start(before=[jumping])
    command.wait_for(lambda: run.rows() > EVERY)
    command.signal(rng.choice((signal.SIGTERM, signal.SIGKILL)))
    command.wait()
    run.trial.hold(PLAIN, is_plain(command.text), command.text)
    for path in run.directory.rglob("*"):
        at = real() + rng.choice((-1, 1)) * 10 ** rng.uniform(1, 9)
        os.utime(path, (max(0.0, at), max(0.0, at)))
    run.finish()
    compare(run)


def slow_disk(run: Run) -> None:
    """Every flush to the disk waits, and SIGTERM comes: the run is saved, or says that it is not."""
    rng = run.trial.rng
    wait, grace = rng.uniform(0.05, 1.0), rng.choice((1, 2, 30))
    run.trial.do(f"each fsync takes {wait:.2f} s; SIGTERM with {grace} s of grace")
    flush = os.fsync

    def slow() -> None:
        def slow_fsync(descriptor: int) -> None:
            time.sleep(wait)
            flush(descriptor)

        os.fsync = slow_fsync

    command = run.start("--grace-seconds", str(grace), before=[slow])
    command.wait_for(lambda: run.rows() > EVERY)
    time.sleep(rng.uniform(0.0, 2.0))
    command.signal(signal.SIGTERM)
    code = run.ended(command, 0, 1)
    last = max(run.checkpoints(), default=0)
    if code == 0:
        run.trial.hold(SIGNALS, last == len(run.losses()), command.text)
    else:
        named = [f"checkpoints/{last}" in line for line in error_lines(command.text)] if last else [True]
        run.trial.hold(SIGNALS, named == [True], command.text)
    run.finish("--grace-seconds", "30")
    compare(run)


def two_writers(run: Run) -> None:
    """Another process begins in the same directory."""
    run.trial.do("a second process in the directory")
    first = run.start()
    moment = run.trial.rng.choice(("starting", "training", "saving"))
    run.wait_for_moment(first, moment)
    second = run.start(log="second")
    second.wait()
    is_over = not first.is_running()
    lines = error_lines(second.text)
    is_refused = second.code == 1 and len(lines) == 1 and f"process {first.pid} trains in it" in lines[0]
    is_ended = is_over and second.code == 0
    run.trial.hold(WRITERS, is_refused or is_ended, f"exit code {second.code}:\n{second.text}\n{first.text}")
    run.ended(first, 0)
    if first.code != 0:
        run.finish()
    compare(run)


def moves(run: Run) -> None:
    """From mesh to mesh and back, each time stopped or killed: 8 devices, 4, 8."""
    rng = run.trial.rng
    meshes = [run.recipe.mesh, *rng.sample(run.recipe.others, 2)]
    for number, mesh in enumerate(meshes):
        how = rng.choice((signal.SIGTERM, signal.SIGKILL))
        run.trial.do(f"{how.name} on {mesh}")
        until = (number + 1) * STEPS // 4
        command = run.start(mesh=mesh)
        command.wait_for(lambda until=until: run.rows() >= until)
        command.signal(how)
        command.wait()
        run.trial.hold(PLAIN, is_plain(command.text), command.text)
    run.finish()
    compare(run, is_moved=True)


def launched(run: Run) -> None:
    """One of two processes is killed or stopped; or with --elastic the run goes on with half, and then with all."""
    trial, rng = run.trial, run.trial.rng
    is_elastic = rng.random() < 0.5
    how = signal.SIGKILL if is_elastic else rng.choice((signal.SIGKILL, signal.SIGSTOP))
    number = rng.randrange(2)
    trial.do(f"{how.name} to process {number} of 2" + (", elastic: 8 devices, 4, 8" if is_elastic else ""))
    words = [*run.recipe.train(trial.root), "--save-every", str(EVERY), "-o", str(run.directory), "--resume"]
    if is_elastic:
        words[words.index("--mesh") + 1] = "fsdp=-1"
    command = [sys.executable, "-m", "meshwright", "launch", "-n", "2", *(["--elastic", "1"] if is_elastic else [])]
    log = trial.folder / "launch"

    def launch() -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen([*command, "--", *words], stdout=file, stderr=file, cwd=trial.folder)

    def until(what: Callable[[], bool]) -> None:
        end = time.monotonic() + 300
        while process.poll() is None and not what() and time.monotonic() < end:
            time.sleep(0.005)

    process = launch()
    until(lambda: bool(run.checkpoints()))
    if process.poll() is None:
        os.kill(child_of(process, number), how)
    if is_elastic:
        until(lambda: "1 process continues" in log.read_text())
        before = run.rows()
        until(lambda: run.rows() > before + 1)
        process.send_signal(signal.SIGTERM)
        process.wait(300)
        process = launch()
    try:
        process.wait(400)
    except subprocess.TimeoutExpired:
        process.kill()
    said = log.read_text()
    is_named = bool(re.search(rf"launch: process {number} \(.*(SIGKILL|SIGSTOP)", said)) or "stopped at" in said
    trial.hold(PROCESSES, process.returncode == 0 and is_named, said)
    trial.hold(PLAIN, is_plain(said), said)
    compare(run, is_moved=True)


FAULTS = (
    kill, stop, full_disk, damaged_checkpoint, damaged_file, damaged_data, clock, slow_disk, two_writers, moves,
    launched,
)  # fmt: skip


def train(trial: Trial) -> None:
    """A trial: one way to break a run, and one recipe."""
    fault = trial.rng.choice(FAULTS)
    # Without stages, whose options an elastic run cannot keep on any number of devices.
    recipe = trial.rng.choice([one for one in RECIPES if fault is not launched or not one.options])
    trial.do(f"{recipe.name} on {recipe.mesh}")
    unbroken(trial, recipe)
    fault(Run(trial, recipe))
