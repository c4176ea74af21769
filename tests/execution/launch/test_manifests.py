"""Jobs of clusters: held to JobSet's schema, to the options that Slurm and gcloud document, and to a shell's syntax."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from meshwright.cli.main import main

SCHEMA = json.loads((Path(__file__).parents[2] / "data" / "jobset_schema.json").read_text())

SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "requeue", "open-mode", "signal",
}  # fmt: skip
"""Options of the manual page sbatch(1) of Slurm 22.05, of those that we use."""

SRUN = {"kill-on-bad-exit", "label"}
"""Options of srun(1), the same."""

GCLOUD = {
    "queued-resources create": {
        "zone", "runtime-version", "accelerator-type", "topology", "type", "node-id", "node-count", "node-prefix",
    },
    "queued-resources describe": {"zone", "format"},
    "queued-resources delete": {"zone", "force", "quiet"},
    "tpu-vm ssh": {"zone", "worker", "command"},
    "queued-resources ssh": {"zone", "node", "worker", "command"},
}  # fmt: skip
"""Flags by command, of those that cloud.google.com/sdk/gcloud/reference/compute/tpus and /alpha/compute/tpus list."""

TRAIN = ["train", "llama3-8b", "--batch", "512", "--seq-len", "4096", "--mesh", "1,-1,1,1", "-o", "/runs/long", "--on"]


def manifest(capsys, on, *kind):
    """What launch prints."""
    assert main(["launch", *kind, "--", *TRAIN, on]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def run_script(text, tmp_path, environment=None, **programs):
    """Run a script whose cluster is made of small shell programs; what it printed, and its exit code."""
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", text], env=path | (environment or {}), text=True, capture_output=True, timeout=60
    )
    return done.stdout.splitlines(), done.returncode


def check_shell(text):
    """Raise where a shell cannot read a script, or shellcheck, where it is installed, finds anything."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", "-"], input=text, text=True, capture_output=True)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(("on", "nodes", "gpus"), [("h100:64", 8, 8), ("h100:4", 1, 4), ("a100:16", 2, 8)])
def test_an_sbatch_script(on, nodes, gpus, capsys):
    text = manifest(capsys, on, "--slurm")
    check_shell(text)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert options.keys() <= SBATCH
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == (str(nodes), "1", str(gpus))
    words = shlex.split(next(line for line in text.splitlines() if line.startswith("    srun ")))
    at = words.index("meshwright")
    assert {word[2:].partition("=")[0] for word in words[1:at]} <= SRUN
    assert words[at:] == ["meshwright", *TRAIN, on, "--resume", "--grace-seconds", "100", "--coordinator", "auto", "&"]


SRUN_OF_A_RUN = """
trap 'echo "forcing job termination"; kill -KILL $task' TERM HUP QUIT
trap 'kill -USR1 $task' USR1
(trap 'echo saved; exit 0' TERM; sleep 20 >/dev/null 2>&1 & wait) &
task=$!
echo $task > task
sleep 0.3
{then}
until wait $task; status=$?; ! kill -0 $task 2>/dev/null; do :; done
exit $status
"""
"""srun as Slurm's src/srun/srun_job.c has it: on SIGTERM its process is killed, and other signals are passed on."""

SCANCEL = '[ "$*" = "--signal=TERM 7" ] && kill -TERM "$(cat task)"'
"""scancel of a job with a signal reaches the processes of its steps, and not srun or the script."""


@pytest.mark.parametrize(
    ("srun", "starts", "requeued", "code"),
    [
        ("exit 0", 1, False, 0),
        ("exit 2", 1, False, 2),
        ("exit 1", 4, False, 1),
        ("[ -e started ] && exit 0; touch started; exit 137", 2, False, 0),
        # The time limit is near: Slurm signals the script, which stops the run; this one saves and ends with 0.
        ("kill -USR1 $PPID", 1, True, 0),
    ],
    ids=["finished", "wrong input", "always lost", "lost once", "time limit"],
)
def test_what_an_sbatch_script_does(srun, starts, requeued, code, capsys, tmp_path):
    text = manifest(capsys, "h100:64", "--slurm")
    if requeued:
        srun = SRUN_OF_A_RUN.format(then=srun)
    printed, ended_with = run_script(text, tmp_path, srun=srun, scontrol='echo "scontrol $*"', scancel=SCANCEL)
    assert [line for line in printed if line.startswith("start")] == [f"start {number}" for number in range(starts)]
    assert printed[starts:] == (["saved", "scontrol requeue 7"] if requeued else [])
    assert ended_with == code


@pytest.mark.parametrize(
    ("on", "slices", "pods", "resource", "chips", "selector"),
    [
        ("v5p:4x4x4", 1, 16, "google.com/tpu", 4, ("tpu-v5p-slice", "4x4x4")),
        ("2*v6e:16x16", 2, 64, "google.com/tpu", 4, ("tpu-v6e-slice", "16x16")),
        ("v5e:2x4", 1, 1, "google.com/tpu", 8, ("tpu-v5-lite-podslice", "2x4")),
        ("tpu7x:4x4x4", 1, 16, "google.com/tpu", 4, ("tpu7x", "4x4x4")),
        ("h100:64", 1, 8, "nvidia.com/gpu", 8, None),
    ],
)
def test_a_jobset(on, slices, pods, resource, chips, selector, capsys, tmp_path):
    found = yaml.safe_load(manifest(capsys, on, "--jobset", "--image", "image", "--claim", "runs"))
    jsonschema.validate(found, SCHEMA)
    [workers] = found["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert (workers["replicas"], job["parallelism"], job["completions"]) == (slices, pods, pods)
    assert container["resources"]["limits"] == {resource: chips}
    labels = pod.get("nodeSelector", {})
    expected = {} if selector is None else dict(zip(("accelerator", "topology"), selector, strict=True))
    assert labels == {f"cloud.google.com/gke-tpu-{name}": value for name, value in expected.items()}
    shell = container["command"][2]
    check_shell(f"#!/bin/sh\n# shellcheck disable=SC2154\n{shell}")
    numbers = set()
    for slice_index in range(slices):
        for pod_index in range(pods):
            environment = {"JOB_INDEX": str(slice_index), "JOB_COMPLETION_INDEX": str(pod_index)}
            if (slice_index, pod_index) in ((0, 0), (slices - 1, pods - 1)):
                printed, code = run_script(shell, tmp_path, environment, meshwright="printf '%s\\n' \"$@\"")
                assert code == 0
                numbers.add(int(printed[-1]))
    assert numbers == {0, slices * pods - 1}
    assert f"--coordinator long-workers-0-0.long:8476 --num-processes {slices * pods} " in shell


@pytest.mark.parametrize(
    ("meshwright", "code"),
    [("exit 0", 0), ("exit 2", 2), ("trap 'exit 0' TERM; kill -TERM $PPID; sleep 20 >/dev/null 2>&1 & wait", 143)],
    ids=["finished", "wrong input", "evicted"],
)
def test_what_a_pod_ends_with(meshwright, code, capsys, tmp_path):
    """A run that SIGTERM stopped has ended with 0; the pod has not, or Kubernetes would take its job for complete."""
    found = yaml.safe_load(manifest(capsys, "h100:64", "--jobset", "--image", "image"))
    [container] = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    environment = {"JOB_INDEX": "0", "JOB_COMPLETION_INDEX": "0"}
    assert run_script(container["command"][2], tmp_path, environment, meshwright=meshwright) == ([], code)


@pytest.mark.parametrize(
    ("path", "name", "wrong"),
    [
        ("spec.failurePolicy", "maxRestarts", "maxRestart"),
        ("spec.replicatedJobs.0.template.spec", "backoffLimit", "backOffLimit"),
        ("spec.replicatedJobs.0.template.spec.template.spec.containers.0.ports.0", "containerPort", "port"),
        ("spec.replicatedJobs.0.template.spec.template.spec.containers.0.resources", "limits", "limit"),
    ],
)
def test_the_schema_refuses_what_jobset_does(path, name, wrong, capsys):
    found = yaml.safe_load(manifest(capsys, "v5p:4x4x4", "--jobset", "--image", "image"))
    part = found
    for step in path.split("."):
        part = part[int(step) if step.isdigit() else step]
    part[wrong] = part.pop(name)
    with pytest.raises(jsonschema.ValidationError, match=f"'{wrong}' was unexpected|'{name}' is a required"):
        jsonschema.validate(found, SCHEMA)


@pytest.mark.parametrize(
    ("on", "kind"),
    [
        ("v5p:4x4x4", "--type=v5p --topology=4x4x4 --runtime-version=v2-alpha-tpuv5"),
        ("v5e:16x16", "--accelerator-type=v5litepod-256 --runtime-version=v2-alpha-tpuv5-lite"),
        ("2*v6e:16x16", "--accelerator-type=v6e-256 --runtime-version=v2-alpha-tpuv6e"),
    ],
)
def test_a_script_for_cloud_tpu(on, kind, capsys, tmp_path):
    text = manifest(capsys, on, "--tpu-vm")
    check_shell(text)
    assert kind in text
    # The queued resource cannot be had: the script says so and ends, where it waited for ever.
    zone = {"ZONE": "z", "INSTALL": "i", "DIRECTORY": "/d", "POLL_SECONDS": "0"}
    refused = 'case "$*" in *describe*) [ -e made ] && echo FAILED;; *create*) echo create; touch made;; esac'
    assert run_script(text, tmp_path, zone, gcloud=refused) == (["create"], 1)
    ready = """case "$*" in
        *describe*) echo ACTIVE;;
        *--command=i) echo install;;
        *) [ -e lost ] || { touch lost; exit 1; };;
    esac"""
    assert run_script(text, tmp_path, zone, gcloud=ready) == (["install", "start 0", "start 1"], 0)
    # Machines that are preempted twice are asked for again, and the restarts are for what else is lost.
    preempted = """case "$*" in
        *describe*) cat state 2>/dev/null;;
        *create*) echo create; echo ACTIVE > state;;
        *delete*) echo delete; rm state;;
        *--command=i) echo install;;
        *) echo x >> runs; [ "$(wc -l < runs)" -gt 2 ] || { echo SUSPENDED > state; exit 1; };;
    esac"""
    once = ["create", "install", "start 0"]
    found = run_script(text.replace("-le 3", "-le 0"), tmp_path, zone, gcloud=preempted)
    assert found == ([*once, "delete", *once, "delete", *once], 0)
    calls = re.findall(r"gcloud (?:alpha )?compute tpus (\S+ \S+) ((?:[^\n]|\\\n)*)", text)
    assert {name for name, _ in calls} == {
        "queued-resources create",
        "queued-resources describe",
        "queued-resources delete",
        "queued-resources ssh" if "*" in on else "tpu-vm ssh",
    }
    for name, rest in calls:
        assert set(re.findall(r"(?<= )--([\w-]+)=", rest.partition(" 2> ")[0])) <= GCLOUD[name], name


@pytest.mark.parametrize(
    ("on", "kind", "message"),
    [
        ("v5p:4x4x4", ["--slurm"], "--slurm is for GPUs, and this is v5p:4x4x4"),
        ("h100:64", ["--tpu-vm"], "--tpu-vm is for v3, v4, v5e, v5p, v6e, and this is h100:64"),
        ("tpu7x:4x4x4", ["--tpu-vm"], "and this is tpu7x:4x4x4; --jobset"),
        ("v5p:4x4x4", ["--jobset"], "--jobset needs --image"),
        ("v5p:4x4x4", ["--jobset", "--image", "i", "--name", "Long_Name"], "a JobSet's name has at most 37 letters"),
        (
            "h100:64",
            ["--slurm", "--name", "bad;rm -rf"],
            "a Slurm job's name has letters, digits, -, _ and ., as my-run",
        ),
        ("v5p:4x4x4", ["--tpu-vm", "--name", "a;b"], "a Cloud TPU's name has at most 63 small letters"),
        ("v5p:4x4x4", ["--jobset", "--image", "a b"], "'a b' is not a container image, as us-docker.pkg.dev/me/run:1"),
        (
            "v5p:4x4x4",
            ["--jobset", "--image", "i", "--claim", "A B"],
            "'A B' is not a persistent volume claim, as my-runs",
        ),
        ("v5p:4x4x4", ["--jobset", "--tpu-vm"], "are a file each; give one of them"),
        ("cpu:8", ["--slurm"], "is simulated on one machine"),
        ("h100:64", ["--slurm", "--image", "i"], "--image has no effect"),
        ("h100:64", ["--slurm", "--elastic", "4"], "--elastic has no effect"),
    ],
)
def test_what_cannot_be_written_is_one_line(on, kind, message, capsys):
    assert main(["launch", *kind, "--", *TRAIN, on, "--anyway"]) == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


def test_a_manifest_is_written_to_a_file(tmp_path, capsys):
    file = tmp_path / "long.sh"
    out = manifest(capsys, "h100:64", "--slurm", "-o", str(file))
    assert out == f"{file}: 8 machines, 8 chips of h100 on each\n"
    check_shell(file.read_text())
