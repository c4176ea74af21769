"""A process of a script that `meshwright launch` started: it joins the others, and then runs the script.

JAX must not have started before all have joined, so that this cannot wait until the script calls `mw.fit`.
"""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path

from meshwright.execution.processes import member
from meshwright.execution.processes.member import leave_at_once, report_end_to_others
from meshwright.execution.processes.options import Processes
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.training.run_directory.run import RunStoppedError
from meshwright.options.values import read_system

INTERRUPTED = 130


def run_script(options: dict[str, str], words: list[str]) -> int:
    """Run a script with its words as one of several processes; return the exit code.

    options: what `Job.command` says: `--coordinator`, `--num-processes`, `--process-id`, `--start-seconds` and `--on`.
    """
    processes = Processes(
        options["--coordinator"],
        int(options["--num-processes"]),
        int(options["--process-id"]),
        float(options["--start-seconds"]),
    )
    script, *_ = words
    several = claim_devices(read_system(options["--on"], None, None), processes, {"words of the script": words})
    assert several is not None
    member.of_script = several
    sys.argv, sys.path[0] = words, str(Path(script).resolve().parent)
    code = 0
    with report_end_to_others(several, RunStoppedError):
        try:
            runpy.run_path(script, run_name="__main__")
        except RunStoppedError as error:
            if error.signal is None:
                raise
            code = INTERRUPTED if error.signal == signal.SIGINT else 0
            if several.number == 0:
                print(error, file=sys.stderr)
        except SystemExit as error:
            if error.code:
                raise RunStoppedError(f"{script} ended with {error.code}") from None
        except KeyboardInterrupt:
            leave_at_once(INTERRUPTED)
    return code


def main() -> None:
    """Read `OPTION VALUE …` to `--on`, then the script and its words."""
    place = sys.argv.index("--on") + 2
    options = dict(zip(sys.argv[1:place:2], sys.argv[2:place:2], strict=True))
    sys.exit(run_script(options, sys.argv[place:]))


if __name__ == "__main__":
    main()
