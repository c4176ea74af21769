"""A plan beside its compiled program: every difference named, times where a schedule or a run gives them."""

import math
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.description.families.load import load_model
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.pictures.screens.comparison import reason
from meshwright.planning.plan import make_plan
from meshwright.proof.verification.comparison import Row, StaticOverhead, compare
from meshwright.proof.verification.differences import Cause, Difference
from meshwright.proof.verification.explain import explain
from meshwright.proof.verification.library import verify
from meshwright.record import Collective, Record

MESH = {"fsdp": 4, "tp": 4}


def sizes(*said: tuple[str, str, str, int]) -> dict:
    """Bytes by kind, axes and phase."""
    return {(kind, tuple(axes.split("*")), phase): size for kind, axes, phase, size in said}


# (planned, found, the names by kind and phase)
EXPLAINED = [
    (
        [("all-gather", "fsdp", "recompute", 100), ("all-reduce", "tp", "backward", 8)],
        [
            ("all-gather", "fsdp", "recompute", 70),
            ("all-gather", "fsdp", "backward", 30),
            ("all-reduce", "tp", "backward", 8),
        ],
        {("all-gather", "recompute"): Difference.OTHER_PHASE, ("all-gather", "backward"): Difference.OTHER_PHASE},
    ),
    (
        # As libtpu makes of a gradient of 2048 rows over 4 devices: 528 rows each, and 3 x 16 sent on.
        [("reduce-scatter", "fsdp", "backward", 2048)],
        [("reduce-scatter", "fsdp", "backward", 2112), ("collective-permute", "fsdp", "backward", 48)],
        {
            ("reduce-scatter", "backward"): Difference.PADDED_SHARDS,
            ("collective-permute", "backward"): Difference.PADDED_SHARDS_PERMUTED,
        },
    ),
    (
        # Of the table of logits libtpu puts rows in place only where the norm needs them.
        [("reduce-scatter", "fsdp", "backward", 2048)],
        [("reduce-scatter", "fsdp", "backward", 2112), ("collective-permute", "fsdp", "update", 48)],
        {
            ("reduce-scatter", "backward"): Difference.PADDED_SHARDS,
            ("collective-permute", "update"): Difference.PADDED_SHARDS_PERMUTED,
        },
    ),
    (
        [("all-gather", "fsdp", "forward", 1000)],
        [("all-gather", "fsdp", "forward", 600), ("collective-permute", "fsdp", "forward", 300)],
        {
            ("all-gather", "forward"): Difference.RING_REMAINDER,
            ("collective-permute", "forward"): Difference.RING_STEPS,
        },
    ),
    (
        [("all-gather", "fsdp", "forward", 1000)],
        [("all-gather", "fsdp", "forward", 600), ("collective-permute", "fsdp", "forward", 299)],
        {},
    ),
    ([("all-gather", "fsdp", "forward", 1000)], [("all-gather", "tp", "forward", 1000)], {}),
    (
        # As libtpu sums norms' gradients and the loss, 4 bytes, over two slices of fsdp=4: 9 scales of 2048 bytes, of
        # which the last goes with the loss in a tile of 4096.
        [
            ("all-reduce", "dp*fsdp", "forward", 4),
            ("all-reduce", "dp*fsdp", "backward", 18432),
            ("all-reduce", "dp", "backward", 6815744),
        ],
        [
            ("all-reduce", "fsdp", "backward", 20480),
            ("all-reduce", "dp", "backward", 6832128),
            ("all-reduce", "dp", "update", 4096),
        ],
        {("all-reduce", phase): Difference.WITHIN_AND_BETWEEN_SLICES for phase in ("forward", "backward", "update")},
    ),
    (
        # As XLA:GPU sums the loss and gradients of norms over both axes at once.
        [
            ("all-reduce", "fsdp", "forward", 4),
            ("all-reduce", "tp", "forward", 4),
            ("all-reduce", "fsdp*tp", "backward", 18432),
        ],
        [("all-reduce", "fsdp*tp", "backward", 18436)],
        {("all-reduce", phase): Difference.COMBINED_SUMS_ACROSS_PHASES for phase in ("forward", "backward")},
    ),
    (
        [("all-reduce", "fsdp", "forward", 4), ("all-reduce", "fsdp*tp", "backward", 18432)],
        [("all-reduce", "fsdp*tp", "backward", 18436)],
        {},
    ),
    (
        [("all-reduce", "fsdp", "update", 36), ("all-reduce", "tp", "update", 36)],
        [("all-reduce", "fsdp", "update", 1024), ("all-reduce", "tp", "update", 40)],
        {("all-reduce", "update"): Difference.REGISTER_ROWS},
    ),
    (
        [("all-reduce", "dp*fsdp", "backward", 18432)],
        [("all-reduce", "fsdp", "backward", 18432), ("all-reduce", "dp", "backward", 18432 + 4096)],
        {},
    ),
]


@pytest.mark.parametrize(("planned", "found", "names"), EXPLAINED)
def test_a_difference_has_a_name_where_the_bytes_add_up_exactly(planned, found, names):
    causes = explain(sizes(*planned), sizes(*found), {"dp": 2, **MESH})
    assert {(kind, phase): cause.difference for (kind, _, phase), cause in causes.items()} == names


def record(**changes) -> Record:
    fields = {
        "origin": "predicted",
        "mesh": MESH,
        "hardware": "v5e:4x4",
        "memory_bytes": {"peak": 100},
        "flops": 1000.0,
    }
    return Record(**(fields | changes))


def test_times_are_rows_where_a_schedule_or_a_run_gives_them():
    plan = record(step_seconds=1.0, breakdown_seconds={"forward": 0.4, "backward": 0.6})
    program = record(
        step_seconds=1.5, breakdown_seconds={"forward": 0.4, "backward": 0.6, "exposed communication": 0.5}
    )
    run = record(step_seconds=1.6, memory_bytes={"peak": 90})
    rows = {row.quantity: row for row in compare(plan, program, argument_bytes=10, measured=run)}
    step = rows["step"]
    assert (step.predicted, step.compiled, step.measured) == (1.0, 1.5, 1.6)
    assert step.causes == (Cause(difference=Difference.STEP_TERM, term="exposed communication", seconds=0.5),)
    assert reason(step) == "exposed communication +500 ms"
    assert step.measured_relative == pytest.approx(0.6)
    assert rows["memory peak"].measured == 90
    assert "tokens a second" not in rows
    assert "step" not in {row.quantity for row in compare(plan, record(), argument_bytes=10)}


def test_a_difference_that_no_rule_explains_says_so_whatever_the_compiler_notes():
    planned = [Collective(kind="all-gather", axes=("fsdp",), phase="forward", bytes=100)]
    found = [Collective(kind="all-gather", axes=("fsdp",), phase="forward", bytes=130, note="as all-reduce of shards")]
    (row,) = compared(planned, found)
    assert (differences(row), row.note) == ([Difference.UNEXPLAINED], "as all-reduce of shards")
    (row,) = compared([], found)
    assert differences(row) == [Difference.NOT_PREDICTED]
    (row,) = compared(planned, [])
    assert differences(row) == [Difference.MISSING]


def test_a_sum_over_two_axes_at_once_is_one_planned_over_each_in_turn_in_whatever_phase_it_stands():
    parts = [
        Collective(kind="all-reduce", axes=(axis,), phase=phase, bytes=size)
        for axis in ("fsdp", "tp")
        for phase, size in (("backward", 4096), ("update", 36))
    ]
    both = [Collective(kind="all-reduce", axes=("fsdp", "tp"), phase="backward", bytes=4132)]
    rows = compared(parts, both)
    assert [(row.quantity, row.predicted, row.compiled) for row in rows] == [
        ("all-reduce fsdp*tp backward", 4096, 4132),
        ("all-reduce fsdp*tp update", 36, None),
    ]
    joined = Cause(difference=Difference.JOINED_AXES, axes=(("fsdp",), ("tp",)))
    assert all(row.causes == (joined, Cause(difference=Difference.OTHER_PHASE)) for row in rows)


def test_sums_over_several_axes_done_together_are_named_where_each_axis_has_as_many_bytes():
    """XLA:TPU sums the squares of gradients over all axes that split a parameter at once."""

    def sums(**sizes):
        return [
            Collective(kind="all-reduce", axes=tuple(axes.split("_")), phase="update", bytes=size)
            for axes, size in sizes.items()
        ]

    planned = sums(fsdp=36, tp=28, fsdp_tp=8)
    rows = compared(planned, sums(fsdp=8, fsdp_tp=36, tp=0))
    assert {one for row in rows if not row.is_equal for one in differences(row)} == {Difference.COMBINED_SUMS}
    rows = compared(planned, sums(fsdp=8, fsdp_tp=37, tp=0))
    assert Difference.COMBINED_SUMS not in {one for row in rows for one in differences(row)}


def test_padding_for_experts_is_named_in_whatever_phase_it_stands():
    """XLA:GPU exchanges in backward what the plan has in the recomputed forward pass."""

    def exchanges(**sizes):
        return [Collective(kind="all-to-all", axes=("tp",), phase=phase, bytes=size) for phase, size in sizes.items()]

    planned, padding = exchanges(forward=100, recompute=40, backward=60), exchanges(forward=1, recompute=1, backward=2)
    overhead = [(Difference.DROPLESS_PADDING, move) for move in padding]
    rows = compared(planned, exchanges(forward=101, recompute=3, backward=100), overhead)
    moved = [Difference.OTHER_PHASE, Difference.DROPLESS_PADDING]
    assert [differences(row) for row in rows] == [[Difference.DROPLESS_PADDING], moved, moved]
    rows = compared(planned, exchanges(forward=102, recompute=41, backward=62), overhead)
    assert [differences(row) for row in rows] == [
        [Difference.UNEXPLAINED],
        [Difference.DROPLESS_PADDING],
        [Difference.DROPLESS_PADDING],
    ]


def test_what_a_program_sums_less_often_is_named():
    """XLA:GPU sums the last norm's gradient once for all microbatches, together with that of other axes."""

    def sums(*sizes):
        return [
            Collective(kind="all-reduce", axes=(axis,), phase="backward", bytes=size)
            for axis, size in zip(("fsdp", "tp"), sizes, strict=True)
        ]

    overhead = [(Difference.SUMMED_ONCE, move) for move in sums(-100, -100)]
    both = Collective(kind="all-reduce", axes=("fsdp", "tp"), phase="backward", bytes=300)
    (row,) = compared(sums(400, 400), [both], overhead)
    assert (row.predicted, row.compiled) == (400, 300)
    assert differences(row) == [Difference.JOINED_AXES, Difference.SUMMED_ONCE]
    (row,) = compared(sums(400, 400), [replace(both, bytes=299)], overhead)
    assert differences(row) == [Difference.UNEXPLAINED]


def differences(row: Row) -> list[Difference]:
    return [cause.difference for cause in row.causes]


def compared(
    planned: list[Collective],
    found: list[Collective],
    overhead: list[tuple[Difference, Collective]] | None = None,
) -> list[Row]:
    """The rows of the collectives alone."""
    plan, program = (record(collectives=tuple(moves)) for moves in (planned, found))
    rows = compare(plan, program, argument_bytes=10, overhead=StaticOverhead(collectives=tuple(overhead or [])))
    return [row for row in rows if "all-" in row.quantity]


TOLERATED = [
    (Row(quantity="q", unit="B", predicted=100, compiled=105), 0.1, False),
    (Row(quantity="q", unit="B", predicted=100, compiled=105), 0.01, True),
    (Row(quantity="q", unit="B", predicted=100, compiled=100, measured=150), 0.1, True),
    (Row(quantity="q", unit="B", predicted=None, compiled=4), 10.0, True),
    (Row(quantity="q", unit="B", predicted=4, compiled=None), 10.0, True),
    (Row(quantity="q", unit="B", predicted=0, compiled=4), 10.0, True),
    (Row(quantity="q", unit="s", predicted=1.0, compiled=None), 0.1, False),
]


@pytest.mark.parametrize(("row", "tolerance", "exceeds"), TOLERATED)
def test_a_difference_exceeds_a_tolerance_by_its_share_or_where_one_side_lacks_a_collective(row, tolerance, exceeds):
    assert row.exceeds(tolerance) is exceeds


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The step of a tiny model on 8 simulated devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        workload = Workload(model=load_model("tiny"), batch=8, seq_len=64, compute_dtype="f32")
        return verify(make_plan(workload, MeshShape(fsdp=2, tp=4), parse_system("cpu:8")))


@pytest.mark.slow
def test_the_schedule_of_a_compiled_step_is_its_step_time(found):
    assert found.schedule is not None
    (step,) = [row for row in found.rows if row.quantity == "step"]
    assert step.compiled == found.schedule.step_seconds
    assert math.isclose(sum(found.compiled.breakdown_seconds.values()), found.schedule.step_seconds)
    assert found.compiled.mfu == pytest.approx(found.plan.predicted.mfu * step.predicted / step.compiled)


@pytest.mark.slow
def test_every_collective_of_a_step_on_simulated_devices_is_as_planned(found):
    rows = [row for row in found.rows if row.unit in ("B", "flop") and not row.quantity.startswith("memory")]
    assert len(rows) > 8
    assert [row for row in rows if not row.is_equal] == []


def test_what_cannot_be_run_is_not_compiled():
    workload = Workload(model=load_model("tiny"), batch=8, seq_len=64, compute_dtype="f32")
    plan = make_plan(workload, MeshShape(dp=8), parse_system("cpu:8"))
    with pytest.raises(MeshwrightError, match="num_microbatches=2 cannot cut a device's share of the batch"):
        verify(replace(plan, strategy=Strategy(num_microbatches=2)))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("schedule", "remat", "targets"),
    [
        ("1f1b", "block", "query,key,value,output"),
        ("gpipe", "block", "query,key,value,output"),
        # The last tick needs no backward pass of attention, or no gradient of keys; and no weights of these.
        ("1f1b", "block", "down"),
        ("gpipe", "attention", "query,value"),
        ("gpipe", "matmuls", "output"),
        ("gpipe", "none", "value"),
    ],
)
def test_gradients_that_no_layer_reads_after_the_last_tick_are_not_planned(schedule, remat, targets):
    """The embedding has no adapters, a stage one layer, and a single tick ends the backward passes of two stages."""
    found = mw.verify(
        "tiny", on="cpu:8", batch=16, seq_len=64, lora_rank=8, lora_targets=targets, mesh="pp=2,fsdp=2,tp=2",
        num_microbatches=2, schedule=schedule, remat=remat,
    )  # fmt: skip
    exact = [row for row in found.rows if row.unit in ("flop", "B") and row.quantity != "memory temporaries"]
    assert all(row.is_equal for row in exact if row.quantity != "memory peak")
    assert "reduce-scatter tp backward" in {row.quantity for row in exact}
