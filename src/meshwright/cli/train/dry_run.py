"""`meshwright train --dry-run`: compile a run's step and print the run's memory and time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from meshwright.cli.kept import kept_plan
from meshwright.cli.plan.screen import notes_of
from meshwright.cli.train.args import Args
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.description.families.load import trained_seq_len
from meshwright.pictures.tables import console, headline, show
from meshwright.pictures.text import folded
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.execution.training.run_directory.run import RunConfig


def dry_run(args: Args, config: RunConfig, planned: Record) -> bool:
    """Compile a run's step for its hardware, which need not be present, and print the run's memory and time.

    Return whether the compiled step fits.
    """
    from meshwright.description.hlo.versions import untested_notes
    from meshwright.proof.verification.plans import verify_plan

    as_json = args.run.json
    check_all_read(args, "with --dry-run")
    plan = config.plan
    with waiting(f"compiling {config.workload.model.name} on {config.mesh} for {config.hardware}"):
        verification = verify_plan(plan)
    memory, usable = verification.compiled.memory_bytes["peak"], config.system.usable_bytes
    seconds, tokens = planned.step_seconds or 0.0, config.workload.tokens
    fits = memory <= usable
    found = {
        "fits": fits,
        "memory_bytes": {"predicted": planned.memory_bytes["peak"], "compiled": memory, "usable": usable},
        "step_seconds": seconds,
        "tokens_a_step": tokens,
        "steps": config.steps,
        "tokens": tokens * config.steps,
        "seconds": seconds * config.steps,
    }
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(console(), headline(config.workload, config.hardware))
        print(f"mesh {config.mesh}")
        print(
            f"memory: {show_bytes(planned.memory_bytes['peak'])} predicted, {show_bytes(memory)} compiled, of"
            f" {show_bytes(usable)} a device" + ("" if fits else ": DOES NOT FIT")
        )
        print(f"a step: {show_seconds(seconds)}, {tokens:,} tokens, {show_rate(tokens / seconds, 'tok/s')} (predicted)")
        print(f"to the end: {config.steps:,} steps, {tokens * config.steps:,} tokens, {_long(seconds * config.steps)}")
        notes = notes_of(plan, 0 if kept_plan(args.model) else trained_seq_len(args.model))
        more = memory / plan.predicted.memory_bytes["peak"] - 1
        if more > (plan.memory_headroom or 0.0):
            notes.append(
                f"the compiled step takes {show_percent(more)} more memory than predicted, and runs if that fits"
            )
        for note in (*notes, *untested_notes(verification.program.compiler)):
            print(folded(f"note: {note}"))
        print("nothing was written; without --dry-run the run begins")
    return fits


def _long(seconds: float) -> str:
    """Return a time of seconds to weeks as text, in up to two units: `3 d 4 h`."""
    days, rest = divmod(round(seconds), 86_400)
    hours, minutes = rest // 3600, rest % 3600 // 60
    if days or hours:
        return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"
    return f"{minutes} min {rest % 60} s" if minutes else show_seconds(seconds)
