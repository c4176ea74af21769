"""A run as a cluster job: an sbatch script, a Kubernetes JobSet, or a script for Cloud TPU machines.

Each of them starts one process per machine, and repeats the same command if a process is lost; with -o and --resume the
command starts a run or resumes it. The run directory must be on a disk that all machines share.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from meshwright.description.hardware.chip import Chip
from meshwright.errors import MeshwrightError
from meshwright.execution.processes.launch.machines import Machines

GRACE_SECONDS = 120
"""Seconds before the end of a job at which it receives SIGTERM."""

SAVE_SECONDS = GRACE_SECONDS - 20
"""The --grace-seconds of a run in a job; the other 20 s are for the signal to arrive and for the processes to end."""

PORT = 8476
"""The port of the rendezvous in a JobSet; JAX's service uses the next one. Each pod has its own address."""

GKE_ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""{chip: value of the node label cloud.google.com/gke-tpu-accelerator}.

cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
"""

_IMAGE = r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@[\w.+-]+:[0-9a-f]+)?"
_CLAIM = "[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"

RUNTIMES = {
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""{chip: software version of a Cloud TPU machine for JAX} (cloud.google.com/tpu/docs/runtimes).

TPU7x is available only in GKE.
"""


def slurm(name: str, words: Sequence[str], machines: Machines, *, restarts: int) -> str:
    """Return an sbatch script that restarts the command on the same machines if a process is lost.

    If a machine is lost, Slurm itself requeues the job (--requeue). Before the time limit Slurm signals only the script
    (B:), which then has scancel send SIGTERM to the processes. srun must not receive a signal: on SIGTERM, SIGHUP and
    SIGQUIT it kills the processes with SIGKILL (`_srun_signal_mgr` in Slurm's src/srun/srun_job.c), and nothing is
    saved.

    Options are documented in the manual pages sbatch(1), srun(1) and scancel(1) of Slurm 22.05,
    slurm.schedmd.com/sbatch.html.

    Args:
        name: name of the job.
        words: arguments of `meshwright`: a `train` command.
        restarts: maximum number of restarts.

    Raises:
        MeshwrightError: the name is not valid in Slurm, or the chips are not GPUs.
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise MeshwrightError(
            f"a Slurm job's name has letters, digits, -, _ and ., as my-run, and not {name!r}: --name"
        )
    if machines.system.chip.kind != "gpu":
        raise MeshwrightError(f"--slurm is for GPUs, and this is {machines.system}; --jobset or --tpu-vm")
    command = shlex.join(["meshwright", *words, "--coordinator", "auto"])
    return f"""#!/bin/bash
# {machines.system}: {machines.count} machines of {machines.chips}, one process on each. Submit it with sbatch.
#SBATCH --job-name={name}
#SBATCH --nodes={machines.count}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={machines.chips}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{GRACE_SECONDS}

# Before the time limit: the run saves and ends, and the job is queued again. scancel signals the processes, and not
# this script; srun itself would kill them on SIGTERM.
requeue=
trap 'requeue=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
for attempt in $(seq 0 {restarts}); do
    echo "start $attempt"
    srun --kill-on-bad-exit=1 --label {command} &
    run=$!
    wait "$run"
    status=$?
    if [ -n "$requeue" ]; then
        wait "$run" # The wait before ended with the signal.
        exec scontrol requeue "$SLURM_JOB_ID"
    fi
    # Exit code 2 is wrong input, which another start does not change.
    if [ "$status" -eq 0 ] || [ "$status" -eq 2 ]; then
        break
    fi
done
exit "$status"
"""


_POD_SCRIPT = """\
evicted=
trap 'evicted=yes; kill -TERM "$!"' TERM
{command} &
run=$!
wait "$run"
status=$?
if [ -n "$evicted" ]; then
    # The run saves and ends with 0, which Kubernetes would take for the end of the job.
    wait "$run"
    exit 143
fi
exit "$status"
"""
"""Shell script of a pod, where `{command}` is the run. 143 is the exit code of a process ended by SIGTERM."""


def jobset(name: str, words: Sequence[str], machines: Machines, *, restarts: int, image: str, claim: str | None) -> str:
    """Return a JobSet for kubectl, as YAML: a job per slice, a pod per machine. Schema: sigs.k8s.io/jobset, v1alpha2.

    Args:
        name, words, restarts: as in `slurm`.
        image: a container image that has meshwright.
        claim: a persistent volume claim, mounted at /runs in every pod; None for no volume.
    """
    import yaml

    chip, count = machines.system.chip, machines.per_slice
    _check_jobset(name, chip, image, claim)
    meet = f"--coordinator {name}-workers-0-0.{name}:{PORT} --num-processes {machines.count}"
    number = f'--process-id "$((JOB_INDEX * {count} + JOB_COMPLETION_INDEX))"'
    resource = "google.com/tpu" if chip.kind == "tpu" else "nvidia.com/gpu"
    container = {
        "name": "meshwright",
        "image": image,
        "command": [
            "/bin/sh",
            "-c",
            _POD_SCRIPT.format(command=f"{shlex.join(['meshwright', *words])} {meet} {number}"),
        ],
        "env": [
            {
                "name": "JOB_INDEX",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}},
            }
        ],
        "ports": [{"containerPort": PORT}, {"containerPort": PORT + 1}],
        "resources": {"limits": {resource: machines.chips}},
    }
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": GRACE_SECONDS, "containers": [container]}
    metadata: dict[str, object] = {"name": name}
    if chip.kind == "tpu":
        # All machines of a slice are one node pool, which no other job of the set may share.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": GKE_ACCELERATORS[chip.name],
            "cloud.google.com/gke-tpu-topology": machines.topology,
        }
    if claim is not None:
        container["volumeMounts"] = [{"name": "runs", "mountPath": "/runs"}]
        pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}]
    # Exit code 2 is wrong input, which another start does not change.
    wrong_input = {"containerName": "meshwright", "operator": "In", "values": [2]}
    job = {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": wrong_input}]},
        "template": {"spec": pod},
    }
    spec = {
        "failurePolicy": {
            "maxRestarts": restarts,
            "rules": [{"name": "wrongInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "workers", "replicas": machines.system.num_slices, "template": {"spec": job}}],
    }
    manifest = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}
    heading = f"# {machines.system}: {machines.count} pods of {machines.chips} chips. kubectl apply -f this file.\n"
    return heading + yaml.safe_dump(manifest, sort_keys=False, width=1000)


def _check_jobset(name: str, chip: Chip, image: str, claim: str | None) -> None:
    """Raise a `MeshwrightError` if Kubernetes would reject a name, an image or a claim, or GKE has no such chip."""
    if not re.fullmatch(_IMAGE, image):
        raise MeshwrightError(f"{image!r} is not a container image, as us-docker.pkg.dev/me/run:1: --image")
    if claim is not None and not re.fullmatch(_CLAIM, claim):
        raise MeshwrightError(f"{claim!r} is not a persistent volume claim, as my-runs: --claim")
    if chip.kind == "tpu" and chip.name not in GKE_ACCELERATORS:
        raise MeshwrightError(f"GKE has no {chip.name}; it has {', '.join(GKE_ACCELERATORS)}")
    # A pod's name is of at most 63 characters, and ends in -workers-JOB-POD-xxxxx.
    if not re.fullmatch("[a-z]([-a-z0-9]{0,35}[a-z0-9])?", name):
        raise MeshwrightError(
            f"a JobSet's name has at most 37 letters, digits and -, as my-run, and not {name!r}: --name"
        )


def _slice_flags(machines: Machines) -> str:
    """Return gcloud's flags for the chip and the shape of a slice."""
    system, chip = machines.system, machines.system.chip
    if chip.torus is not None and len(system.shape) == 3:
        return f"--type={chip.name} --topology={machines.topology}"
    prefix = "v5litepod" if chip.name == "v5e" else chip.name
    return f"--accelerator-type={prefix}-{system.num_chips // system.num_slices * chip.cloud_cores}"


def tpu_vm(name: str, words: Sequence[str], machines: Machines, *, restarts: int) -> str:
    """Return a script that requests Cloud TPU machines, starts the run on all of them, and restarts it if one is lost.

    gcloud's flags: cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources and /tpu-vm/ssh. Arguments are
    as in `slurm`.

    Raises:
        MeshwrightError: the name is not valid in Google Cloud, or the chips are not Cloud TPUs.
    """
    system, chip = machines.system, machines.system.chip
    if not re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise MeshwrightError(
            f"a Cloud TPU's name has at most 63 small letters, digits and -, as my-run, and not {name!r}: --name"
        )
    if chip.name not in RUNTIMES:
        raise MeshwrightError(f"--tpu-vm is for {', '.join(RUNTIMES)}, and this is {system}; --jobset or --slurm")
    if system.num_slices == 1:
        nodes, ssh = '--node-id="$name"', 'gcloud compute tpus tpu-vm ssh "$name"'
    else:
        nodes = f'--node-prefix="$name" --node-count={system.num_slices}'
        ssh = 'gcloud alpha compute tpus queued-resources ssh "$name" --node=all'
    command = shlex.join(["meshwright", *words, "--coordinator", "auto"])
    return f"""#!/bin/bash
# {system}: {machines.count} machines of {machines.chips} chips, one process on each.
# ZONE: where. INSTALL: the command that installs meshwright on a machine. DIRECTORY: there, on a disk that all share.
set -euo pipefail
zone=${{ZONE:?as us-east5-a}}
install=${{INSTALL:?the command that installs meshwright on a machine}}
directory=${{DIRECTORY:?a directory on a disk that all machines share}}
name={name}

# A preempted resource is SUSPENDED for good: it is deleted and asked for again.
state() {{
    gcloud compute tpus queued-resources describe "$name" --zone="$zone" \\
        --format='value(state.state)' 2> /dev/null || true
}}
get_machines() {{
    until [ "$(state)" = ACTIVE ]; do
        installed=
        case "$(state)" in
        "")
            gcloud compute tpus queued-resources create "$name" --zone="$zone" {nodes} \\
                {_slice_flags(machines)} --runtime-version={RUNTIMES[chip.name]}
            ;;
        SUSPENDED)
            gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force --quiet
            ;;
        FAILED)
            echo "error: the queued resource $name is FAILED; delete it and start this script again" >&2
            exit 1
            ;;
        esac
        sleep "${{POLL_SECONDS:-30}}"
    done
    if [ -z "$installed" ]; then
        {ssh} --zone="$zone" --worker=all --command="$install"
        installed=yes
    fi
}}
run={shlex.quote(command)}
installed=
attempt=0
while [ "$attempt" -le {restarts} ]; do
    get_machines
    echo "start $attempt"
    if {ssh} --zone="$zone" --worker=all --command="cd $directory && $run"; then
        exit 0
    fi
    sleep "${{POLL_SECONDS:-30}}"
    # Machines that were taken away are no failure of the run.
    if [ "$(state)" = ACTIVE ]; then
        attempt=$((attempt + 1))
    fi
done
exit 1
"""
