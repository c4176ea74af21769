"""What methods over a split sequence cost beyond what `kit_rows.py` holds: memory, long rings, TPUs."""

from dataclasses import asdict, replace

import jax
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.training.step import lower_train_step
from meshwright.mesh import MeshShape
from meshwright.planning.cost.memory import step_memory
from meshwright.planning.cost.rates.ring import RingWork
from meshwright.planning.cost.seconds import PassSeconds
from meshwright.planning.plan import make_plan
from meshwright.proof.verification.differences import Difference
from meshwright.proof.verification.library import verify

TINY = Workload(
    model=replace(PRESETS["tiny"], embed=64, mlp=128, num_heads=16, num_kv_heads=8, head_dim=4),
    batch=8,
    seq_len=32,
    compute_dtype="f32",
)


@pytest.mark.parametrize(
    ("degree", "phase", "keys", "gradients", "exposed"),
    [
        (4, "forward", 1.5, 0.0, 3 * 0.5),
        (4, "recompute", 0.9, 0.0, 0.0),
        # Keys in three turns, with gradients in the third; these alone in the last, and after it.
        (4, "backward", 3.5, 4.0, 2 * 0.5 + 4.5 + 1.0 + 3.5),
        (3, "backward", 2.0, 4.0, 1.0 + 3.5),
        (2, "backward", 0.0, 4.0, 3.5),
    ],
)
def test_a_ring_waits_for_what_the_work_of_a_turn_does_not_hide(degree, phase, keys, gradients, exposed):
    work = RingWork(degree, step_attention=PassSeconds(1.0, 1.0, 3.0), query_backward=0.5)
    sends = (degree - 1) * (keys + gradients)
    assert work.exposed_share(phase, keys, gradients) == pytest.approx(exposed / sends)


@pytest.mark.parametrize(("length", "is_hidden"), [(32768, True), (4096, False)])
def test_a_long_sequence_hides_all_that_goes_round_a_ring_but_its_last_send(length, is_hidden):
    """As `planning/cost/rates/ring.py` schedules: work grows with the square of a device's tokens, sends with these."""
    model = replace(PRESETS["llama3-8b"], num_layers=2, embed=1024, mlp=4096)
    plan = make_plan(
        Workload(model=model, batch=1, seq_len=length),
        MeshShape(sp=8),
        parse_system("v5e:2x4"),
        Strategy(attention="flash", sp_method="ring"),
    )
    sends = {move.phase: move for move in plan.predicted.collectives if move.kind == "collective-permute"}
    assert (sends["forward"].exposed_seconds == 0) is is_hidden
    assert (sends["recompute"].exposed_seconds == 0) is is_hidden
    backward = sends["backward"]
    assert 0 < backward.exposed_seconds < backward.seconds
    assert (backward.exposed_seconds < backward.seconds / 10) is is_hidden


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("gather", MeshShape(fsdp=4)),
        ("gather", MeshShape(sp=4)),
        ("ring", MeshShape(sp=4)),
        ("ulysses", MeshShape(sp=4)),
    ],
    ids=str,
)
def test_the_peak_of_memory_is_that_of_blocks_and_not_of_scores(method, shape):
    """JAX once made the masks of all blocks before the first layer, as they follow from places alone: 30 times this."""
    workload = replace(TINY, model=replace(TINY.model, head_dim=16), batch=4, seq_len=8192)
    strategy = Strategy(attention="flash", sp_method=method)
    mesh = build_mesh(shape, jax.devices()[:4])
    stats = lower_train_step(mesh, workload=asdict(workload), strategy=asdict(strategy)).compile().memory_analysis()
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    peak = max(stats.peak_memory_in_bytes, held + stats.temp_size_in_bytes)
    assert step_memory(workload, shape, strategy)["peak"] == pytest.approx(peak, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "shape", "kernels"),
    [
        pytest.param("gather", MeshShape(fsdp=8), 4, marks=pytest.mark.matrix),
        pytest.param("ulysses", MeshShape(tp=2, sp=4), 4, marks=pytest.mark.matrix),
        pytest.param("ring", MeshShape(tp=2, sp=4), 12, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_the_tpu_compiler_moves_as_much_over_sp_and_runs_attention_in_kernels(method, shape, kernels):
    """Forward, forward again, and of queries' and keys' gradients; a ring's before, in and after its loop.

    A ring's kernels state their flops, splash attention's none.
    """
    model = replace(TINY.model, embed=256, num_heads=8, head_dim=64)
    workload = Workload(model=model, batch=8, seq_len=1024)
    strategy = Strategy(attention="flash", sp_method=method)
    found = verify(make_plan(workload, shape, parse_system("v5e:2x4"), strategy))
    assert found.program.hlo.count('custom_call_target="tpu_custom_call"') == kernels
    (flops,) = (row for row in found.rows if row.quantity == "flops")
    stated = Difference.KERNEL_ESTIMATES if method == "ring" else Difference.OPAQUE_KERNELS
    assert [cause.difference for cause in flops.causes] == [stated]
    over_sp = [row for row in found.rows if row.quantity in MOVES]
    assert all(row.is_equal for row in over_sp)
    assert len(over_sp) == {"gather": 0, "ulysses": 3, "ring": 3}[method]


MOVES = {
    f"{kind} sp {phase}"
    for kind in ("all-to-all", "collective-permute")
    for phase in ("forward", "recompute", "backward")
}
