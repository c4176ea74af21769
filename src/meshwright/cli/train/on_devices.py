"""Run the steps of `meshwright train` on its devices with a screen, then end the command."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from meshwright.cli.loading import byte_bar
from meshwright.cli.train.args import Args
from meshwright.cli.train.screen import TrainScreen
from meshwright.cli.waiting import waiting
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.execution.processes.host import FAILED
from meshwright.execution.processes.member import leave_at_once, report_end_to_others
from meshwright.execution.processes.options import processes_of
from meshwright.pictures.rows import BANDWIDTH_COLUMNS, PROFILE_COLUMNS, bandwidth_rows, imbalance, profile_rows
from meshwright.pictures.tables import console, headline, predicted_rate_and_memory, show, speed, table
from meshwright.pictures.text import folded, next_line
from meshwright.record import Record

if TYPE_CHECKING:
    from meshwright.execution.training.loop import Outcome
    from meshwright.execution.training.run_directory.run import RunConfig

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes: Ctrl-C; a second SIGTERM, which leaves the run no time to save."""


def train_on_devices(args: Args, config: RunConfig, directory: Path, planned: Record) -> int:
    """Run the steps of a run on its devices, with a screen; return the exit code."""
    from meshwright.execution.runtime.compile_cache import use_compile_cache
    from meshwright.execution.runtime.devices import claim_devices
    from meshwright.execution.training.library import allowed_differences
    from meshwright.execution.training.loop import run_steps
    from meshwright.execution.training.run_directory.restart import is_first_process
    from meshwright.execution.training.run_directory.run import RunStoppedError

    if config.workload.objective != "dpo":
        _tokenize_with_bar(config, directory)
    with waiting(f"starting {config.hardware}"):
        # Each process may have been started in a different folder.
        compared = replace(config, data=replace(config.data, folder=None)).to_json()
        several = claim_devices(config.system, processes_of(args.process), compared)
        use_compile_cache(args.run.compile_cache)
    is_first = is_first_process()
    allow = allowed_differences(args.run.allow, args.settings, change=args.run.change)
    screen = TrainScreen(config.steps, planned, is_quiet=args.run.json or not is_first)
    if several is not None:
        several.before_end = screen.stop

    def step(row: dict[str, Any]) -> None:
        if several is not None:
            several.step = row["step"] + 1
        screen.step(row)

    def note(line: str) -> None:
        if is_first:
            screen.note(line)

    def leave(number: int, is_late: bool) -> NoReturn:
        screen.stop()
        code, line = _end_by_signal(config, directory, number, is_late=is_late)
        if is_first:
            print(line, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Python would wait for the compiler, which a second interruption does not end either.
        os._exit(code)

    if not screen.is_quiet:
        show(console(), headline(config.workload, config.hardware))
        show(console(), f"mesh {config.mesh} · predicted: {speed(planned)}   {predicted_rate_and_memory(planned)}")
        sys.stdout.flush()
    try:
        with report_end_to_others(several, RunStoppedError), screen:
            outcome = run_steps(
                config,
                directory,
                on_step=step,
                on_note=note,
                on_bytes=screen.read,
                on_evaluation=screen.evaluated,
                leave=leave,
                allow=allow,
            )
    except KeyboardInterrupt as interrupt:
        number = signal.SIGINT if type(interrupt) is KeyboardInterrupt else signal.SIGTERM
        code, line = _end_by_signal(config, directory, number, taken=screen.taken)
        if is_first:
            print(line, file=sys.stderr)
        if several is not None:
            leave_at_once(code)
        return code
    if is_first:
        _print_outcome(config, directory, planned, outcome, screen, as_json=args.run.json)
    is_interrupted = outcome.stopped_by == signal.SIGINT and outcome.taken < config.steps
    return INTERRUPTED if is_interrupted else 0


def _tokenize_with_bar(config: RunConfig, directory: Path) -> None:
    from meshwright.execution.training.data.stores import tokenize_sources
    from meshwright.execution.training.pretrained import run_tokenizer

    tokenizer = run_tokenizer(config, directory)
    tokenize_sources(config.data, config.workload, tokenizer, lambda name, size: byte_bar(f"tokenising {name}", size))


def _end_by_signal(
    config: RunConfig, directory: Path, number: int, *, is_late: bool = False, taken: int = 0
) -> tuple[int, str]:
    """Return the exit code and the message for a run that a signal ends without a checkpoint.

    Args:
        number: the signal.
        is_late: whether the grace period of a SIGTERM is over.
        taken: how many steps the run has taken.
    """
    from meshwright.execution.training.run_directory.restart import what_is_left

    if is_late:
        grace = f"the {config.saving.grace_seconds:g} s of --grace-seconds are over"
        return FAILED, f"error: {grace} and the run is not saved; {what_is_left(config, directory)}"
    if taken:
        code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        where = f"stopped at once, without saving, at {taken} of {config.steps}"
        return code, f"{where}; {what_is_left(config, directory)}"
    code = 0 if number == signal.SIGTERM else INTERRUPTED
    if (directory / "config.json").exists():
        return code, f"stopped before a step was taken; {_how_to_go_on(directory)}"
    return code, "stopped before the first step"


def _how_to_go_on(directory: Path) -> str:
    return f"`meshwright train {shlex.quote(str(directory))} --resume` continues"


def _print_outcome(
    config: RunConfig, directory: Path, planned: Record, outcome: Outcome, screen: TrainScreen, *, as_json: bool
) -> None:
    """Print measured and predicted figures, and the next command."""
    if as_json:
        print(json.dumps(outcome.record.to_json() | {"steps": outcome.taken, "loss": screen.ends}, indent=2))
    elif screen.taken:
        print("\n".join(screen.summary()))
        show(console(), f"measured: {speed(outcome.record)}   (predicted: {speed(planned)})")
        _show_profile(config, directory, planned)
    if outcome.taken < config.steps:
        print(f"stopped at {outcome.taken} of {config.steps}; {_how_to_go_on(directory)}", file=sys.stderr)
    elif not as_json:
        print(next_line(f"meshwright generate {shlex.quote(str(directory))}"))


def _show_profile(config: RunConfig, directory: Path, planned: Record) -> None:
    """Print the collectives as predicted, compiled and measured by the profile, if there is a profile."""
    from meshwright.execution.training.watch.profile import find_profile

    if config.watching.profile is None or (profile := find_profile(directory, config)[0]) is None:
        return
    from meshwright.proof.verification.profiles import axis_bandwidths, compare_profile

    rows = profile_rows(compare_profile(planned, profile))
    first, last = profile.steps
    print()
    show(console(), f"profile of steps {first} to {last}: bytes a device and step, then seconds")
    show(console(), table(PROFILE_COLUMNS, rows, left=(0, 1, 2)))
    print()
    show(console(), "what a device sends in a step, and its rate while it sends")
    rates = axis_bandwidths(planned, profile, lay_mesh(config.system, config.mesh.layout))
    show(console(), table(BANDWIDTH_COLUMNS, bandwidth_rows(rates), left=(0, 1)))
    print(folded(imbalance(profile)))
    for note in profile.measured.notes:
        show(console(), f"note: {note}")
    show(console(), f"traces: {directory / 'profile'} (xprof), and its .trace.json.gz for ui.perfetto.dev")
