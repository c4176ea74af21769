"""`meshwright launch`: run `train`, `serve` or a script as several supervised processes on this machine."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from meshwright.cli.serve.args import Args as ServeArgs
from meshwright.cli.train.args import Args as TrainArgs
from meshwright.cli.typed import check_all_read
from meshwright.cli.words.read import canonical, read_words, without_options
from meshwright.description.hardware.system import System, make_system
from meshwright.errors import MeshwrightError
from meshwright.execution.processes.launch.division import devices_per_process, process_environments
from meshwright.options.declare import option, positional
from meshwright.options.serving import split_adapters
from meshwright.options.values import read_system
from meshwright.planning.library import find_meshes, plan_to_run
from meshwright.support.extras import require_extra
from meshwright.support.files import write_file

EXAMPLES = (
    "meshwright launch -n 4 -- train tiny --on cpu:8 --batch 16 --seq-len 128 -o runs/four",
    "meshwright launch -n 8 --elastic 4 -- train plan.yaml -o runs/long --save-every 500",
    "meshwright launch -n 8 --restarts 10 -- train plan.yaml -o runs/long --resume",
    "meshwright launch -n 2 -- serve runs/tiny --on cpu:8 --mesh tp=8",
    "meshwright launch -n 4 --on h100:4 -- mine.py --out runs/mine",
    "meshwright launch --slurm -o long.sh -- train plan.yaml -o runs/long",
    "meshwright launch --jobset --image us-docker.pkg.dev/me/meshwright --claim runs -- train plan.yaml -o /runs/long",
)


@dataclass(frozen=True)
class ProcessesArgs:
    """The processes on this machine."""

    num_processes: Annotated[int, option("N", "-n")] = 1
    """The number of processes, which share the devices. Default: 1."""
    on: Annotated[str | None, option("HARDWARE")] = None
    """The devices that the processes of a script share, as h100:8; for train and serve, type it after --."""
    restarts: Annotated[int, option("N")] = 3
    """Restart after a lost process, from the last checkpoint, up to N times until a new one is saved. Default: 3."""
    elastic: Annotated[int | None, option("N")] = None
    """Continue with N processes or more after losing some, with the same global batch. Default: restart all."""
    start_seconds: Annotated[float, option("SECONDS")] = 300.0
    """How long the processes wait for each other before they start. Default: 300."""
    stuck_seconds: Annotated[float, option("SECONDS")] = 900.0
    """Restart if no process finishes a step for this long, after the first step. Default: 900."""


@dataclass(frozen=True)
class ManifestArgs:
    """Instead, write the file that starts a job on a cluster, with one process per machine."""

    slurm: Annotated[bool, option()] = False
    """Write a script for sbatch."""
    jobset: Annotated[bool, option()] = False
    """Write a JobSet for Kubernetes."""
    tpu_vm: Annotated[bool, option()] = False
    """Write a script that creates Cloud TPU machines and starts the run on them."""
    output: Annotated[Path | None, option("FILE", "-o")] = None
    """The file to write. Default: print it."""
    name: Annotated[str | None, option("NAME")] = None
    """The job's name. Default: the run directory's."""
    image: Annotated[str | None, option("IMAGE")] = None
    """The container image, with meshwright installed. Needed for --jobset."""
    claim: Annotated[str | None, option("CLAIM")] = None
    """The persistent volume claim that every pod has at /runs. Default: none is mounted."""


@dataclass(frozen=True)
class Args:
    """Run train, serve or a script as several processes of this machine, watched, or write a cluster's job."""

    command: Annotated[tuple[str, ...], positional("train|serve|SCRIPT …")]
    """The arguments of meshwright train or serve, or a script that calls mw.fit with its arguments, after --. Process 0
    uses this terminal; lines of other processes begin with their number.
    """
    processes: ProcessesArgs = field(default_factory=ProcessesArgs)
    manifest: ManifestArgs = field(default_factory=ManifestArgs)


def run(args: Args) -> int:
    """Run a command as several processes, or write the cluster job that does.

    The exit code is process 0's, or 1 if a process was lost and the job could not go on.
    """
    if args.command and args.command[0].endswith(".py"):
        return _run_script(args)
    words, parsed = _words(args.command)
    if isinstance(parsed, ServeArgs):
        require_extra("launch serve", "serve")
        return _serve(args, words, parsed)
    if args.manifest.slurm or args.manifest.jobset or args.manifest.tpu_vm:
        return _write_manifest(args, words, parsed)
    require_extra("launch train", "train")
    number, least = args.processes.num_processes, _least(args.processes)
    system, directory = _run_of(parsed)
    each = devices_per_process(system, number)

    def words_of(count: int, again: bool) -> Sequence[str]:
        if not again:
            return words
        if count == number:
            return _again(words, parsed, directory)
        fewer = make_system(system.chip, (each * count,))
        smaller = ["--on", str(fewer), "--mesh", mesh_for(parsed, directory, fewer)]
        return [*_again(without_options(words, {"--on", "--mesh"}), parsed, directory), *smaller]

    return _supervise(args, words_of, directory, system, least)


def _least(here: ProcessesArgs) -> int:
    """Return the smallest number of processes to continue with. Raises for contradictory options."""
    number, least = here.num_processes, here.num_processes if here.elastic is None else here.elastic
    if number < 1:
        raise MeshwrightError(f"-n is {number}; it is the number of processes, from 1")
    if not 1 <= least <= number:
        raise MeshwrightError(f"--elastic {least} of {number} processes (-n); it is from 1, and -n is not less")
    if here.restarts < 0 or here.stuck_seconds <= 0:
        raise MeshwrightError("--restarts is a number from 0, and --stuck-seconds one above 0")
    return least


def _run_script(args: Args) -> int:
    """Run a Python script as several processes; if one is lost, all are started again."""
    require_extra("launch", "train")
    here, script = args.processes, args.command[0]
    if here.on is None:
        raise MeshwrightError(f"launch of a script needs --on, the devices of all processes: --on cpu:8 -- {script} …")
    if not Path(script).is_file():
        raise MeshwrightError(f"there is no file {script}")
    least, system = _least(here), read_system(here.on, None, None)
    each = devices_per_process(system, here.num_processes)

    def words(count: int, again: bool) -> Sequence[str]:
        own = system if count == here.num_processes else make_system(system.chip, (each * count,))
        return [str(own), *args.command]

    return _supervise(args, words, None, system, least, "for a script", "meshwright.cli.launched")


def _serve(args: Args, words: Sequence[str], parsed: ServeArgs) -> int:
    """Serve with several processes; if one is lost, all are restarted. parsed: the arguments of `serve`."""
    from meshwright.execution.loading.library import find_model

    if parsed.replicas != 1:
        raise MeshwrightError(
            f"--replicas {parsed.replicas} starts processes of its own, each a server: leave launch -n"
            f" {args.processes.num_processes} out, or --replicas for one server of that many processes"
        )
    found = find_model(
        parsed.model, on=parsed.on, mesh=parsed.mesh, dtype=parsed.dtype, adapter=split_adapters(parsed.adapter)[0]
    )
    devices_per_process(found.system, number := args.processes.num_processes)
    return _supervise(args, lambda count, again: words, None, found.system, number, "for serve")


def _supervise(
    args: Args,
    words: Callable[[int, bool], Sequence[str]],
    directory: Path | None,
    system: System,
    least: int,
    why: str = "here",
    module: str = "meshwright",
) -> int:
    """Run and supervise the processes of a job; return its exit code.

    Args:
        words: returns the command's arguments, from the number of processes and whether this is a restart.
        directory: the run's; None without a run.
        least: the fewest processes to continue with.
        why: where an option has no effect, for errors (`where` of `check_all_read`).
        module: the Python module that each process runs.
    """
    from meshwright.execution.processes.launch.supervisor import Job, supervise

    here, each = args.processes, devices_per_process(system, args.processes.num_processes)

    job = Job(
        words=words,
        module=module,
        directory=directory,
        environments=lambda count: process_environments(system, each, count),
        num_processes=here.num_processes,
        least=least,
        restarts=here.restarts,
        start_seconds=here.start_seconds,
        stuck_seconds=here.stuck_seconds,
    )
    check_all_read(args, why)
    speaking = threading.Lock()

    def say(line: str) -> None:
        with speaking:
            print(line, file=sys.stderr, flush=True)

    return supervise(job, say)


def _write_manifest(args: Args, words: Sequence[str], parsed: TrainArgs) -> int:
    """Write a cluster job that runs `train` and restarts it if a machine is lost. parsed: the arguments of `train`."""
    from meshwright.execution.processes.launch.machines import machines_of
    from meshwright.execution.processes.launch.manifests import SAVE_SECONDS, jobset, slurm, tpu_vm

    here, restarts = args.manifest, args.processes.restarts
    if here.slurm + here.jobset + here.tpu_vm > 1:
        raise MeshwrightError("--slurm, --jobset and --tpu-vm are a file each; give one of them")
    system, directory = _run_of(parsed)
    name = here.name or re.sub("[^a-z0-9]+", "-", directory.name.lower()).strip("-") or "run"
    words, machines = _again(words, parsed, directory), machines_of(system)
    if not here.tpu_vm and parsed.saving.grace_seconds is None:
        words += ["--grace-seconds", str(SAVE_SECONDS)]
    if here.slurm:
        text = slurm(name, words, machines, restarts=restarts)
    elif here.tpu_vm:
        text = tpu_vm(name, words, machines, restarts=restarts)
    elif here.image is None:
        raise MeshwrightError("--jobset needs --image, of a container that has meshwright")
    else:
        text = jobset(name, words, machines, restarts=restarts, image=here.image, claim=here.claim)
    output = here.output
    check_all_read(args, "with --slurm, --jobset or --tpu-vm")
    if output is None:
        print(text, end="")
    else:
        write_file(output, text)
        print(f"{output}: {machines.count} machines, {machines.chips} chips of {system.chip.name} on each")
    return 0


def _again(words: Sequence[str], parsed: TrainArgs, directory: Path) -> list[str]:
    """Return the arguments of `train` with options added so that it starts the run, or resumes it if it exists."""
    home = [] if parsed.run.output is not None or parsed.run.resume else ["-o", str(directory)]
    return [*words, *home, *([] if parsed.run.resume else ["--resume"])]


def _words(command: Sequence[str]) -> tuple[list[str], TrainArgs | ServeArgs]:
    """Return the words of `train` or `serve` as typed, and its parsed arguments."""
    if not command or command[0] not in ("train", "serve"):
        raise MeshwrightError(
            f"launch runs train, serve or a script.py, and not {command[0] if command else 'nothing'!r}:"
            f" meshwright launch -n 4 -- train …"
        )
    words = canonical(command)
    kind: Any = TrainArgs if words[0] == "train" else ServeArgs
    parsed, typed = read_words(words[1:], kind, kinds={}, hints={})
    if taken := [name for name in ("coordinator", "num_processes", "process_id", "start_seconds") if name in typed]:
        raise MeshwrightError(f"{typed[taken[0]]} is set by launch itself; leave it out after --")
    if "dry_run" in typed:
        raise MeshwrightError("--dry-run takes no devices, so that one process does it: leave launch out")
    return words, parsed


def _run_of(parsed: TrainArgs) -> tuple[System, Path]:
    """Return the hardware and directory of the run that `train` would start or resume. Raises for an invalid plan."""
    if parsed.run.resume:
        from meshwright.execution.training.library import run_to_resume
        from meshwright.execution.training.run_directory.run import read_config

        if (directory := run_to_resume(parsed.model, parsed.run.output)) is not None:
            config = read_config(directory)
            given = parsed.workload.on
            return config.system if given is None else read_system(given, parsed.workload.hardware, None), directory
    plan = plan_to_run(parsed.model, parsed.options)
    return plan.system, parsed.run.output or Path("runs") / plan.workload.model.name


def mesh_for(parsed: TrainArgs, directory: Path, system: System) -> str:
    """Return the mesh on which a run resumes with fewer devices: --mesh if it has a -1, else the planner's best."""
    from meshwright.execution.training.checks import check_start
    from meshwright.execution.training.run_directory.resume import resumed_run
    from meshwright.execution.training.run_directory.run import read_config

    before = read_config(directory)

    def check(mesh: str) -> str:
        config, _ = resumed_run(directory, steps=None, change=False, options={"on": str(system), "mesh": mesh})
        check_start(config, anyway=parsed.run.anyway)
        return mesh

    if (mesh := parsed.run.mesh) is not None and "-1" in mesh:
        return check(mesh)
    return check(str(find_meshes(before.workload, system, (before.workload.remat,), {}, top=1).plans[0].mesh))
