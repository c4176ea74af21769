"""`meshwright learn`: list the lessons, print one, write it as a notebook, or grade a finished one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.cli.typed import check_all_read
from meshwright.errors import MeshwrightError
from meshwright.lessons.lesson import exercises_in, find_lesson, lessons, read_code
from meshwright.options.declare import option, positional
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import next_line
from meshwright.support.files import check_new_directory, write_file

EXAMPLES = ("meshwright learn", "meshwright learn 5 --to lessons", "meshwright learn --check lessons/05.ipynb")


@dataclass(frozen=True)
class Args:
    """Lessons on sharding with graded exercises: list them, print or write one, grade a finished one."""

    lesson: Annotated[str | None, positional("N")] = None
    """The number of a lesson, which is printed. Default: list all."""
    to: Annotated[Path | None, option("DIR")] = None
    """Write the lesson as a notebook into this directory instead."""
    check: Annotated[Path | None, option("FILE")] = None
    """Run a finished notebook or script on simulated devices and grade it. Exits with 1 if an exercise is wrong."""


def run(args: Args) -> int:
    """List the lessons, print or write one, or grade a file."""
    file, number = args.check, args.lesson
    if file is not None:
        if number is not None:
            raise MeshwrightError(f"lesson {number} has no effect with --check; leave it out")
        check_all_read(args, "with --check")
        if not exercises_in("\n".join(read_code(file))):
            raise MeshwrightError(f'{file} checks no exercise: it has no line check("NAME", answer)')
        # A lesson sets the number of simulated devices itself; JAX rejects setting it twice.
        flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", ""))
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        return subprocess.run(
            [sys.executable, "-m", "meshwright.lessons.run", str(file)], env=environment, check=False
        ).returncode
    directory = args.to
    if number is None:
        if directory is not None:
            raise MeshwrightError("--to needs the number of a lesson, as meshwright learn 5 --to lessons")
        rows = [(str(one.number), one.title, str(one.minutes), str(len(one.exercises))) for one in lessons()]
        show(console(), table(("", "lesson", "minutes", "exercises"), rows, left=(1,), folds=1))
        print(next_line("meshwright learn 0 --to lessons"))
        return 0
    lesson = find_lesson(number)
    if directory is None:
        print(lesson.file.read_text(encoding="utf-8").rstrip())
        print(f"\n{next_line(f'meshwright learn {lesson.number} --to lessons', note='as a notebook')}")
        return 0
    notebook = directory / f"{lesson.file.stem}.ipynb"
    check_new_directory(directory)
    if notebook.exists():
        raise MeshwrightError(f"{notebook} exists and may have your answers; move it, or take another --to")
    directory.mkdir(parents=True, exist_ok=True)
    write_file(notebook, lesson.notebook())
    print(f" wrote  {notebook}: {lesson.title}, {lesson.minutes} minutes, {len(lesson.exercises)} exercises")
    print(next_line(f"meshwright learn --check {notebook}", note="when you have answered"))
    return 0
