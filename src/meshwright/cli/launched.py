"""One of the processes in which `meshwright launch` runs a script: join the other processes, then run the script.

JAX must not start before all processes have joined, so that joining cannot wait until the script calls `mw.fit`.
"""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path

from meshwright.execution.processes import member
from meshwright.execution.processes.launch.supervisor import INTERRUPTED
from meshwright.execution.processes.member import leave_at_once, report_end_to_others
from meshwright.execution.processes.options import Processes
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.training.run_directory.run import RunStoppedError
from meshwright.options.values import read_system

NUM_OPTIONS = 4
"""The number of options, each with a value, that `launch` adds after the script's arguments (`launch.supervisor`)."""


def run_script(on: str, words: list[str], options: dict[str, str]) -> int:
    """Run a script with its arguments as one of several processes; return the exit code.

    Args:
        on: the devices of all processes.
        words: the script and its arguments.
        options: `--coordinator`, `--num-processes`, `--process-id` and `--start-seconds`.
    """
    processes = Processes(
        options["--coordinator"],
        int(options["--num-processes"]),
        int(options["--process-id"]),
        float(options["--start-seconds"]),
    )
    script, *_ = words
    several = claim_devices(read_system(on, None, None), processes, {"words of the script": words})
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
    """Run the script that `sys.argv` names: HARDWARE, the script with its arguments, the options of the rendezvous."""
    _, on, *words = sys.argv[: -2 * NUM_OPTIONS]
    options = sys.argv[-2 * NUM_OPTIONS :]
    sys.exit(run_script(on, words, dict(zip(options[::2], options[1::2], strict=True))))


if __name__ == "__main__":
    main()
