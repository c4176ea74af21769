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

SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "jobset_schema.json").read_text())

SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "requeue", "open-mode", "signal",
}  # fmt: skip
"""Options that slurm.schedmd.com/sbatch.html lists, of those that we use."""

SRUN = {"kill-on-bad-exit", "label"}
"""As slurm.schedmd.com/srun.html has them."""

GCLOUD = {
    "queued-resources create": {
        "zone", "runtime-version", "accelerator-type", "topology", "type", "node-id", "node-count", "node-prefix",
    },
    "queued-resources describe": {"zone", "format"},
    "tpu-vm ssh": {"zone", "worker", "command"},
    "queued-resources ssh": {"zone", "node", "worker", "command"},
}  # fmt: skip
"""Flags by command, of those that cloud.google.com/sdk/gcloud/reference/compute/tpus and /alpha/compute/tpus list."""

TRAIN = ["train", "llama3-8b", "--batch", "512", "--seq-len", "4096", "--mesh", "1,-1,1,1", "-o", "/runs/long", "--on"]


def manifest(capsys, on, *kind):
    """What launch prints."""
    assert main(["launch", *kind, "--", *TRAIN, on]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


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
    words = shlex.split(next(line for line in text.splitlines() if line.startswith("srun ")))
    at = words.index("meshwright")
    assert {word[2:].partition("=")[0] for word in words[1:at]} <= SRUN
    assert words[at:] == ["meshwright", *TRAIN, on, "--resume", "--coordinator", "auto"]


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
def test_a_jobset(on, slices, pods, resource, chips, selector, capsys):
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
    check_shell(f"#!/bin/sh\n# shellcheck disable=SC2154\n{shell}\n")
    numbers = set()
    for slice_index in range(slices):
        for pod_index in range(pods):
            environment = {"JOB_INDEX": str(slice_index), "JOB_COMPLETION_INDEX": str(pod_index)}
            if (slice_index, pod_index) in ((0, 0), (slices - 1, pods - 1)):
                words = shell.replace("exec meshwright", "printf '%s\\n'")
                done = subprocess.run(["sh", "-c", words], env=environment, text=True, capture_output=True, check=True)
                numbers.add(int(done.stdout.splitlines()[-1]))
    assert numbers == {0, slices * pods - 1}
    assert f"--coordinator long-workers-0-0.long:8476 --num-processes {slices * pods} " in shell


def test_the_schema_refuses_what_jobset_does(capsys):
    found = yaml.safe_load(manifest(capsys, "v5p:4x4x4", "--jobset", "--image", "image"))
    found["spec"]["failurePolicy"]["maxRestart"] = found["spec"]["failurePolicy"].pop("maxRestarts")
    with pytest.raises(jsonschema.ValidationError, match="'maxRestart' was unexpected"):
        jsonschema.validate(found, SCHEMA)


@pytest.mark.parametrize(
    ("on", "kind"),
    [
        ("v5p:4x4x4", "--type=v5p --topology=4x4x4 --runtime-version=v2-alpha-tpuv5"),
        ("v5e:16x16", "--accelerator-type=v5litepod-256 --runtime-version=v2-alpha-tpuv5-lite"),
        ("2*v6e:16x16", "--accelerator-type=v6e-256 --runtime-version=v2-alpha-tpuv6e"),
    ],
)
def test_a_script_for_cloud_tpu(on, kind, capsys):
    text = manifest(capsys, on, "--tpu-vm")
    check_shell(text)
    assert kind in text
    calls = re.findall(r"gcloud (?:alpha )?compute tpus (\S+ \S+) ((?:[^\n]|\\\n)*)", text)
    assert {name for name, _ in calls} == {
        "queued-resources create",
        "queued-resources describe",
        "queued-resources ssh" if "*" in on else "tpu-vm ssh",
    }
    for name, rest in calls:
        assert set(re.findall(r"(?<= )--([\w-]+)=", rest.partition("; }")[0])) <= GCLOUD[name], name


@pytest.mark.parametrize(
    ("on", "kind", "message"),
    [
        ("v5p:4x4x4", ["--slurm"], "--slurm is for GPUs, and this is v5p:4x4x4"),
        ("h100:64", ["--tpu-vm"], "--tpu-vm is for v3, v4, v5e, v5p, v6e, and this is h100:64"),
        ("tpu7x:4x4x4", ["--tpu-vm"], "and this is tpu7x:4x4x4; --jobset"),
        ("v5p:4x4x4", ["--jobset"], "--jobset wants --image"),
        ("v5p:4x4x4", ["--jobset", "--image", "i", "--name", "Long_Name"], "a JobSet's name has at most 37 letters"),
        ("v5p:4x4x4", ["--jobset", "--tpu-vm"], "are a file each; give one of them"),
        ("cpu:8", ["--slurm"], "is simulated on one machine"),
        ("h100:64", ["--slurm", "--image", "i"], "--image changes nothing"),
        ("h100:64", ["--slurm", "--elastic", "4"], "--elastic changes nothing"),
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
