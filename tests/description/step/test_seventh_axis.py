"""A seventh mesh axis and a new chip, each added as a user would, and what has to be given for that.

An axis is a name in `mesh.py` (a field of `MeshShape`, a place in `LAYOUT`) and a rule in `description/step/rules.py`:
two files. A chip is a TOML file.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.workload import Workload
from meshwright.planning.search import find_best

PACKAGE = Path(meshwright.__file__).parent

NAME = {
    "mesh.py": (
        ("    pp: int = 1\n", "    pp: int = 1\n    xp: int = 1\n"),
        ('LAYOUT = ("pp", ', 'LAYOUT = ("pp", "xp", '),
    )
}
"""The axis itself, wherever it is used."""

OF_BATCH = NAME | {
    "description/step/rules.py": (('"batch": ("dp", "fsdp", "ep")', '"batch": ("dp", "fsdp", "ep", "xp")'),)
}
OF_MLP = NAME | {"description/step/rules.py": (('"mlp": ("tp",)', '"mlp": ("tp", "xp")'),)}

PRICE = """
import json, sys
from dataclasses import replace
from meshwright.planning.cost.comm_volume import step_collectives
from meshwright.planning.cost.flops import step_flops
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.mesh import parse_mesh
from meshwright.planning.prediction import predict
from meshwright.planning.search import rank
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload

workload = Workload(model=PRESETS["llama3-8b"], batch=64, seq_len=2048)
system = parse_system("h100:8")
found = {}
for text in sys.argv[1:]:
    mesh = parse_mesh(text, num_devices=8)
    record = predict(workload, mesh, system)
    found[text] = {
        "flops": record.flops,
        "memory": record.memory_bytes,
        "seconds": record.step_seconds,
        "exposed": record.breakdown_seconds["exposed communication"],
        "collectives": sorted((c.kind, c.axes, c.phase, c.bytes) for c in record.collectives),
    }
found["best"] = [plan.mesh.degrees for plan in rank(workload, system, top=3, remats=("block",)).plans]
print(json.dumps(found))
"""


def price_with(changes, folder, *meshes):
    """The prices of some meshes by a copy of the package with some changes in its text."""
    shutil.copytree(PACKAGE, folder / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    for name, pairs in changes.items():
        path = folder / "meshwright" / name
        text = path.read_text()
        for before, after in pairs:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        path.write_text(text)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", PRICE, *meshes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_axis_that_splits_the_batch_is_another_dp(tmp_path):
    assert len(OF_BATCH) <= 3
    found = price_with(OF_BATCH, tmp_path, "dp=2,fsdp=4", "xp=2,fsdp=4")
    by_dp, by_xp = found["dp=2,fsdp=4"], found["xp=2,fsdp=4"]
    for name in ("flops", "memory"):
        assert by_xp[name] == by_dp[name]
    assert by_xp["seconds"] == pytest.approx(by_dp["seconds"])
    renamed = json.loads(json.dumps(by_xp["collectives"]).replace('"xp"', '"dp"'))
    assert sorted((c[0], sorted(c[1]), *c[2:]) for c in renamed) == sorted(
        (c[0], sorted(c[1]), *c[2:]) for c in by_dp["collectives"]
    )
    assert all("xp" in degrees for degrees in found["best"])


@pytest.mark.slow
def test_an_axis_that_splits_the_mlp_sums_its_products(tmp_path):
    """Each device has half of the columns of gate and up, and of the rows of down, and none of attention's less."""
    found = price_with(OF_MLP, tmp_path, "fsdp=8", "xp=2,fsdp=4")
    whole, split = found["fsdp=8"], found["xp=2,fsdp=4"]
    kinds = {(kind, tuple(axes), phase) for kind, axes, phase, _ in split["collectives"]}
    # A sum of what is added to the stream, forward; of the gradient of what gate and up read, backward.
    assert {("all-reduce", ("xp",), "forward"), ("all-reduce", ("xp",), "backward")} <= kinds
    # Twice the tokens a device as over fsdp=8, half of the MLP: more flops by what is not split.
    assert whole["flops"] < split["flops"] < 2 * whole["flops"]
    # Products wait for these sums.
    assert split["exposed"] > whole["exposed"]


CHIP = """
name = "toy"
title = "Toy"
kind = "gpu"
devices_per_chip = 1
chips_per_host = 4

[peak_flops]
bf16 = 2e15
f32 = 1e15
source = "none"

[hbm]
bytes = 100e9
physical_bytes = 102e9
runtime_bytes = 1e9
bytes_per_second = 5e12
source = "none"

[[levels]]
name = "node"
degree = 4
link_bytes_per_second = 6e11
hop_seconds = 1e-6
source = "none"

[[levels]]
name = "leaf"
degree = 64
link_bytes_per_second = 2e11
hop_seconds = 5e-6
source = "none"

[host]
bytes_per_second = 6e10
source = "none"
"""
"""The facts of a chip; all else that a plan wants of one is borrowed from others, and the plan says so."""


def test_a_chip_is_a_file(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(CHIP)
    system = parse_system("toy:8", hardware_file=path)
    workload = Workload(model=PRESETS["llama3-8b"], batch=64, seq_len=2048)
    best = find_best(workload, system, remats=("block",))
    assert best.predicted.fits
    assert best.predicted.step_seconds > best.predicted.flops / 2e15
    assert any("toy" in note for note in best.predicted.notes)
