"""The least time of a decode step's ops: against numbers by hand, and where there is none."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.serving import Serving, ServingLayout
from meshwright.mesh import MeshShape
from meshwright.planning.cost.rates.achieved import HBM_SHARE
from meshwright.planning.cost.serving_seconds import serving_step

TP8 = ServingLayout(MeshShape(tp=8))


def small_ops(serving, layout, on, batch=64, **figures):
    """The term of a step; figures: those of `SmallOps` that differ from the chip's."""
    system = parse_system(on)
    if figures:
        system = replace(system, chip=replace(system.chip, small_ops=replace(system.chip.small_ops, **figures)))
    return serving_step(serving, layout, batch, lay_mesh(system, layout.mesh.layout)).breakdown_seconds["small ops"]


@pytest.mark.parametrize(
    ("model", "of_layer"),
    [
        # Seven matmuls, of which gate and up are one op; two norms; rotary embedding of queries and keys; attention.
        ("llama3-8b", 6 + 4 + 4 + 7),
        ("qwen3-8b", 6 + 8 + 4 + 7),  # and norms of queries and keys
        ("gemma2-9b", 6 + 8 + 4 + 7),  # and norms after attention and after the MLP
        ("mixtral-8x7b", 5 + 4 + 4 + 7 + 15),  # with a router; experts' matmuls are kernels
        ("gpt-oss-20b", 5 + 4 + 4 + 7 + 15 + 6),  # and a bias of each of an expert's three matmuls
    ],
)
def test_every_op_of_a_layer_takes_the_least_time(model, of_layer):
    serving = Serving(model=PRESETS[model], prompt_len=1024, output_len=1024)
    # Outside the layers are sixty ops, and two where the likeliest tokens of all parts of the vocab are gathered.
    seconds = small_ops(serving, TP8, "tpu7x:2x2x1", least_seconds=1e-6, read_ahead=1e-9)
    assert seconds == pytest.approx(1e-6 * (60 + 2 + serving.model.num_layers * of_layer), rel=1e-6)


@pytest.mark.parametrize(
    ("model", "of_layer"),
    [
        # Two norms and two sums; an activation; queries and pages around attention, and its division by sums.
        ("llama3-8b", 4 + 1 + 3),
        ("gemma3-1b", 4 + 1 + 3 + 4),  # and norms of queries, of keys, after attention and after the MLP
        ("mixtral-8x7b", 4 + 1 + 3 + 15),  # and routing
    ],
)
def test_every_small_kernel_of_a_gpu_takes_its_least_time(model, of_layer):
    serving = Serving(model=PRESETS[model], prompt_len=1024, output_len=1024)
    seconds = small_ops(serving, TP8, "h200:8")
    assert seconds == pytest.approx(1.8e-6 * (11 + serving.model.num_layers * of_layer))


def test_experts_of_other_devices_take_ops_for_what_is_exchanged():
    serving = Serving(model=PRESETS["mixtral-8x7b"], prompt_len=1024, output_len=1024)
    figures = {"least_seconds": 1e-6, "read_ahead": 1e-9}
    alone, split = (
        small_ops(serving, ServingLayout(mesh), "v5e:4x4", **figures)
        for mesh in (MeshShape(sp=2, tp=8), MeshShape(ep=2, tp=8))
    )
    # In a layer ten, and two for each of two all-to-alls, a gather and a scatter; then the newest tokens are gathered.
    assert split - alone == pytest.approx(1e-6 * (32 * (10 + 8) + 2), rel=1e-6)


def test_what_a_layer_reads_ahead_is_its_weights_at_what_memory_achieves():
    """A layer of Llama 3 8B over 8 chips, at batch 1."""
    model = PRESETS["llama3-8b"]
    serving = Serving(model=replace(model, num_layers=1), prompt_len=1024, output_len=1024, batch=1)
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    moved = 2 * layer / 8 + 2 * (4 * 4096 + 3 * 4096 + 3 * 14336 / 8 + (4096 * 2 + 2048) / 8)  # and a row in and out
    read = moved / (HBM_SHARE * 8.2e11)
    assert small_ops(serving, TP8, "v5e:2x4", 1) == pytest.approx(83 * 1.21e-6 - 0.75 * read, rel=1e-3)


def test_exchanges_of_rows_take_ops_before_and_after():
    serving = Serving(model=PRESETS["gemma3-1b"], prompt_len=1024, output_len=1024)
    one, split = (ServingLayout(MeshShape(sp=4), cache) for cache in ("heads", "batch"))
    # Two all-to-alls of 26 layers.
    more = small_ops(serving, split, "v6e:2x2") - small_ops(serving, one, "v6e:2x2")
    assert more == pytest.approx(2 * 2 * 26 * 1.21e-6, rel=1e-3)


def test_other_hardware_prefill_and_steps_that_read_long_enough_have_no_such_term():
    serving = Serving(model=PRESETS["llama3-8b"], prompt_len=1024, output_len=1024)
    assert small_ops(serving, TP8, "cpu:8") == 0
    for on in ("tpu7x:2x2x1", "h100:8"):
        assert small_ops(replace(serving, phase="prefill"), TP8, on) == 0
    assert small_ops(serving, TP8, "v5e:2x4", 1) == 0 < small_ops(serving, TP8, "tpu7x:2x2x1", 1)
