"""A run over a split sequence: a ring in zigzag order learns what one device does."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.training.library import train
from meshwright.execution.training.run_directory.run import RunConfig, read_metrics
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape

CONFIG = RunConfig(
    workload=Workload(
        model=replace(PRESETS["tiny"], embed=64, mlp=64, num_layers=1), batch=8, seq_len=32, compute_dtype="f32"
    ),
    mesh=MeshShape(dp=8),
    hardware="cpu:8",
    optimizer=Optimizer(warmup_steps=2, decay_steps=6, first_rate=0.0),
    steps=3,
)
RING = replace(CONFIG, mesh=MeshShape(dp=2, sp=4), strategy=Strategy(attention="flash", sp_method="ring"))


def losses(config, directory):
    """The loss of each step of a run."""
    train(config, directory)
    return [row["loss"] for row in read_metrics(directory)]


@pytest.mark.matrix
def test_a_ring_in_zigzag_order_takes_the_steps_of_scores_in_order(tmp_path):
    assert losses(RING, tmp_path / "ring") == pytest.approx(losses(CONFIG, tmp_path / "scores"), rel=1e-5)


def test_a_ring_without_a_fused_attention_is_one_clear_error(tmp_path):
    with pytest.raises(MeshwrightError, match="sp_method='ring' needs a fused attention: attention='flash'"):
        train(replace(RING, strategy=Strategy(sp_method="ring")), tmp_path)


def test_a_length_that_no_zigzag_divides_is_one_clear_error(tmp_path):
    with pytest.raises(MeshwrightError, match="sequence length 36 cannot be cut into 8 parts"):
        train(replace(RING, workload=replace(CONFIG.workload, seq_len=36)), tmp_path)
