"""The collectives of small programs, against what their reshards ask for, counted by hand."""
# ruff: noqa: E501 - HLO prints an instruction in a line

import math

import jax
import jax.numpy as jnp
import pytest
import toy_programs as toys
from jax import P

from meshwright.description.hlo.canonical import canonicalize_collective
from meshwright.description.hlo.collectives import read_collectives
from meshwright.description.hlo.parser import parse_hlo
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.program import LoweredProgram, MeshMethod
from meshwright.proof.compiler.records import read_optimized
from meshwright.proof.compiler.worker import compile_lowered
from meshwright.record import LoweredAs, Lowering, merge

LAYERS = 3
ACTIVATIONS = 4 * toys.SEQ_LEN * toys.EMBED  # of one row, float32
WEIGHTS = 4 * 2 * toys.EMBED * toys.MLP  # of one layer, both matrices


def collectives_of(lowered, **degrees):
    program = compile_lowered(LoweredProgram(lowered), options={}, compiler="jaxlib", mesh_method=MeshMethod.MAKE_MESH)
    return read_collectives(read_optimized(program), MeshShape(**degrees).layout)


def expected_of_training(mesh: MeshShape) -> dict[tuple, int]:
    """The bytes of a step of the toy by kind, axes and phase, as a plan names them."""
    activations = LAYERS * ACTIVATIONS * toys.BATCH // mesh.degree(("dp", "fsdp"))
    weights = LAYERS * WEIGHTS // mesh.tp
    found = {}
    if mesh.tp > 1:
        found |= {("all-gather", ("tp",), phase): activations for phase in ("forward", "recompute", "backward")}
        found |= {("reduce-scatter", ("tp",), phase): activations for phase in ("forward", "backward")}
    if mesh.fsdp > 1:
        found |= {("all-gather", ("fsdp",), phase): weights for phase in ("forward", "recompute")}
        found["reduce-scatter", ("fsdp",), "backward"] = weights
    if mesh.dp > 1:
        found["all-reduce", ("dp",), "backward"] = weights // mesh.fsdp
    return found


MESHES = [
    MeshShape(dp=8), MeshShape(fsdp=8), MeshShape(tp=8), MeshShape(dp=2, fsdp=4), MeshShape(fsdp=2, tp=4),
    MeshShape(dp=4, tp=2), MeshShape(dp=2, fsdp=2, tp=2),
]  # fmt: skip


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_train_step_has_the_collectives_its_reshards_ask_for_with_their_trips(shape):
    lowered = toys.train_step(toys.cpu_mesh(**shape.degrees), layers=LAYERS)
    traffic = collectives_of(lowered, **shape.degrees)
    plain = merge(one for found in traffic.collectives for one in canonicalize_collective(found, shape.degrees))
    found = {(c.kind, c.axes, c.phase): c.bytes for c in plain if c.phase != "update"}
    assert found == expected_of_training(shape)
    assert traffic.notes == ()


def test_a_gather_in_a_loop_is_counted_once_a_trip_and_says_where_it_comes_from():
    traffic = collectives_of(toys.train_step(toys.cpu_mesh(fsdp=8), layers=5), fsdp=8)
    gathers = [c for c in traffic.collectives if (c.kind, c.phase) == ("all-gather", "forward")]
    assert sorted((c.count, c.bytes, c.array) for c in gathers) == [
        (5, 5 * WEIGHTS // 2, "f32[32,64]"),
        (5, 5 * WEIGHTS // 2, "f32[64,32]"),
    ]
    assert all("toy_programs.py:" in c.source and c.source.endswith("(layers/mlp/reshard)") for c in gathers)


def test_without_remat_nothing_is_gathered_again():
    traffic = collectives_of(toys.train_step(toys.cpu_mesh(fsdp=2, tp=4), remat=False), fsdp=2, tp=4)
    assert {c.phase for c in traffic.collectives} == {"forward", "backward", "update"}


def test_the_update_phase_is_what_stands_under_its_scope():
    traffic = collectives_of(toys.train_step(toys.cpu_mesh(fsdp=2, tp=4)), fsdp=2, tp=4)
    updates = [c for c in traffic.collectives if c.phase == "update"]
    assert {c.kind for c in updates} == {"all-reduce"}
    assert all("update" in c.source for c in updates)
    assert {axis for c in updates for axis in c.axes} == {"fsdp", "tp"}


def test_bf16_collectives_that_the_cpu_carries_in_f32_are_noted_and_meant_as_bf16():
    traffic = collectives_of(toys.train_step(toys.cpu_mesh(fsdp=8), dtype="bfloat16"), fsdp=8)
    layers = [c for c in traffic.collectives if c.phase != "update"]
    assert layers
    assert all(c.lowerings[0].promoted_from == "bf16" and c.array.startswith("f32") for c in layers)
    gathers = [c for c in layers if (c.kind, c.phase) == ("all-gather", "forward")]
    assert sum(canonicalize_collective(c, {"fsdp": 8})[0].bytes for c in gathers) == 3 * WEIGHTS // 2


def test_f32_gathers_of_an_f32_program_are_not_promoted():
    traffic = collectives_of(toys.train_step(toys.cpu_mesh(fsdp=8)), fsdp=8)
    assert not any(one.promoted_from for c in traffic.collectives for one in c.lowerings)


def test_a_reduction_over_two_axes_that_is_sliced_along_one_is_both():
    traffic = collectives_of(toys.train_step(toys.cpu_mesh(dp=2, fsdp=4)), dp=2, fsdp=4)
    gradients = [c for c in traffic.collectives if c.phase == "backward"]
    partly = Lowering(form=LoweredAs.PARTLY_SLICED_ALL_REDUCE, scatter_axes=("fsdp",), reduce_axes=("dp",))
    assert [(c.kind, c.axes, c.lowerings) for c in gradients] == [("all-reduce", ("dp", "fsdp"), (partly,))]
    scattered, reduced = canonicalize_collective(gradients[0], {"dp": 2, "fsdp": 4})
    assert (scattered.kind, scattered.axes, scattered.bytes) == ("reduce-scatter", ("fsdp",), 3 * WEIGHTS)
    assert (reduced.kind, reduced.axes, reduced.bytes) == ("all-reduce", ("dp",), 3 * WEIGHTS // 4)


# Each row: what every device does, the shapes it does it on and over which axes they are split, and what that is.
MANUAL = [
    (lambda x: jax.lax.all_to_all(x, "tp", 0, 1, tiled=True), (16, 4), P("fsdp"), P(("fsdp", "tp")),
     ("all-to-all", ("tp",), 4 * 8 * 4)),
    (lambda x: jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]), (4, 8), P("fsdp"), P("fsdp"),
     ("collective-permute", ("fsdp",), 4 * 2 * 8)),
    (lambda x: jax.lax.all_gather(x, ("fsdp", "tp"), tiled=True), (8, 2), P(("fsdp", "tp")), P(),
     ("all-gather", ("fsdp", "tp"), 4 * 16)),
    (lambda x: jax.lax.psum(x, ("fsdp", "tp")), (8, 2), P(("fsdp", "tp")), P(), ("all-reduce", ("fsdp", "tp"), 4 * 2)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "shape", "spec", "out", "expected"), MANUAL)
def test_each_kind_has_its_axes_and_the_bytes_one_device_sees(function, shape, spec, out, expected):
    mesh = toys.cpu_mesh(fsdp=2, tp=4)
    traffic = collectives_of(toys.per_device(mesh, function, shape, specs=[spec], out=out), fsdp=2, tp=4)
    assert [(c.kind, c.axes, c.bytes) for c in traffic.collectives] == [expected]


def test_collectives_over_axes_of_degree_one_are_left_out():
    mesh = toys.cpu_mesh(tp=8)
    lowered = toys.per_device(mesh, lambda x: jax.lax.psum(x, "dp"), (8, 2), specs=[P("tp")], out=P("tp"))
    assert collectives_of(lowered, tp=8).collectives == ()


def test_nested_loops_multiply():
    def function(x):
        def inner(x, _):
            return jax.lax.ppermute(x, "tp", [(i, (i + 1) % 8) for i in range(8)]), None

        def outer(x, _):
            return jnp.sin(jax.lax.scan(inner, x, None, length=5)[0]), None

        return jax.lax.scan(outer, x, None, length=7)[0]

    lowered = toys.per_device(toys.cpu_mesh(tp=8), function, (8, 4), specs=[P("tp")], out=P("tp"))
    (found,) = collectives_of(lowered, tp=8).collectives
    assert (found.kind, found.count, found.bytes) == ("collective-permute", 35, 35 * 16)


def test_every_branch_of_a_conditional_is_counted_and_a_note_says_so():
    def function(x, flag):
        return jax.lax.cond(flag[0] > 0, lambda x: jax.lax.psum(x, "tp"), lambda x: 2 * x, x)

    lowered = toys.per_device(toys.cpu_mesh(tp=8), function, (8, 4), (1,), specs=[P("tp"), P()], out=P("tp"))
    traffic = collectives_of(lowered, tp=8)
    assert [(c.kind, c.count) for c in traffic.collectives] == [("all-reduce", 1)]
    assert "conditional" in traffic.notes[0]


def test_a_loop_whose_trips_depend_on_data_counts_once_and_a_note_says_so():
    def function(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9.0, lambda x: jax.lax.psum(x, "tp") + 1.0, x)

    lowered = toys.per_device(toys.cpu_mesh(tp=8), function, (8, 4), specs=[P("tp")], out=P("tp"))
    traffic = collectives_of(lowered, tp=8)
    assert [(c.kind, c.count) for c in traffic.collectives] == [("all-reduce", 1)]
    assert "depend on data" in traffic.notes[0]


HEADER = "HloModule m, num_partitions=8\n\n"
ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

"""
ROWS, ALL = "{{0,1,2,3},{4,5,6,7}}", "{{0,1,2,3,4,5,6,7}}"


def read(text, **degrees):
    return read_collectives(parse_hlo(HEADER + text), degrees or {"fsdp": 2, "tp": 4})


def summary(traffic):
    return [(c.kind, c.axes, c.phase, c.bytes, c.count) for c in traffic.collectives]


def entry(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"ENTRY %main (p: f32[4,8]) -> f32[4,8] {{\n  %p = f32[4,8]{{1,0}} parameter(0)\n{body}\n}}\n"


def test_a_start_and_its_done_are_one_collective_with_the_bytes_of_the_result_or_the_operand():
    traffic = read(
        ADD
        + entry(
            f"%ag = (f32[4,8]{{1,0}}, f32[16,8]{{1,0}}) all-gather-start(%p), channel_id=1, replica_groups={ROWS}, dimensions={{0}}",
            "%ag.done = f32[16,8]{1,0} all-gather-done(%ag)",
            f"%ar = f32[4,8]{{1,0}} all-reduce-start(%p), channel_id=2, replica_groups={ALL}, to_apply=%add",
            "%ar.done = f32[4,8]{1,0} all-reduce-done(%ar)",
            f"%rs = ((f32[4,8]{{1,0}}), f32[1,8]{{1,0}}) reduce-scatter-start(%p), channel_id=3, replica_groups={ROWS}, dimensions={{0}}, to_apply=%add",
            "%rs.done = f32[1,8]{1,0} reduce-scatter-done(%rs)",
            "%cp = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%p), channel_id=4, source_target_pairs={{0,1},{1,0}}",
            "ROOT %cp.done = f32[4,8]{1,0} collective-permute-done(%cp)",
        )
    )
    assert summary(traffic) == [
        ("all-gather", ("tp",), "forward", 4 * 128, 1),
        ("all-reduce", ("fsdp", "tp"), "forward", 4 * 32, 1),
        ("reduce-scatter", ("tp",), "forward", 4 * 32, 1),
        ("collective-permute", ("tp",), "forward", 4 * 32, 1),
    ]


def test_a_combined_gather_has_the_bytes_of_all_its_arrays():
    traffic = read(
        entry(
            f"%ag = ((f32[4,8]{{1,0}}, f32[4,8]{{1,0}}), (f32[16,8]{{1,0}}, f32[4,32]{{1,0}})) all-gather-start(%p, %p), channel_id=1, replica_groups={ROWS}, dimensions={{0}}",
            "ROOT %ag.done = (f32[16,8]{1,0}, f32[4,32]{1,0}) all-gather-done(%ag)",
        )
    )
    (found,) = traffic.collectives
    assert (found.bytes, found.count, found.array) == (2 * 4 * 128, 1, "f32[16,8] and 1 more")


def test_a_combined_collective_is_parted_by_the_phases_that_its_joined_op_name_gives_its_arrays():
    name = "jit(step)/transpose(jvp(layers))/while/body/checkpoint/(mlp/reshard:rematted_computation/mlp/reshard)"
    traffic = read(
        entry(
            f'%ag = (f32[16,8]{{1,0}}, f32[4,32]{{1,0}}) all-gather(%p, %p), channel_id=1, replica_groups={ROWS}, metadata={{op_name="{name}"}}',
            "ROOT %x = f32[4,32]{1,0} get-tuple-element(%ag), index=1",
        )
    )
    assert [(c.phase, c.array) for c in traffic.collectives] == [
        ("backward", "f32[16,8]"),
        ("recompute", "f32[4,32]"),
    ]


def test_a_reduce_scatter_that_the_tpu_compiler_hides_in_a_fusion_is_one():
    traffic = read(
        ADD
        + f"""%all-reduce-scatter.clone (input: f32[4,8]) -> f32[1,8] {{
  %input = f32[4,8]{{1,0}} parameter(0)
  %all-reduce.1 = f32[4,8]{{1,0}} all-reduce(%input), channel_id=1, replica_groups={ROWS}, to_apply=%add
  %table = u32[8]{{0}} constant({{...}})
  %id = u32[] partition-id()
  %row = u32[1]{{0}} dynamic-slice(%table, %id), dynamic_slice_sizes={{1}}
  %offset = u32[] bitcast(%row)
  %zero = u32[] constant(0)
  ROOT %share = f32[1,8]{{1,0}} dynamic-slice(%all-reduce.1, %offset, %zero), dynamic_slice_sizes={{1,8}}
}}

"""
        + entry(
            'ROOT %rs = f32[1,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.clone, metadata={op_name="jit(f)/transpose(jvp())/dot"}'
        )
    )
    (found,) = traffic.collectives
    assert summary(traffic) == [("reduce-scatter", ("tp",), "backward", 4 * 32, 1)]
    assert found.lowerings == ()


def test_a_gather_spread_over_the_fusions_of_a_computation_is_counted_once_by_its_channel():
    def step(number):
        return f"""%step.{number} (q: f32[4,8]) -> f32[16,8] {{
  %q.{number} = f32[4,8]{{1,0}} parameter(0)
  ROOT %all-gather.{number} = f32[16,8]{{1,0}} all-gather(%q.{number}), channel_id=5, replica_groups={ROWS}, dimensions={{0}}
}}

"""

    traffic = read(
        step(1)
        + step(2)
        + step(3)
        + entry(
            "%a = f32[16,8]{1,0} fusion(%p), kind=kCustom, calls=%step.1",
            "%b = f32[16,8]{1,0} fusion(%p), kind=kOutput, calls=%step.2",
            "ROOT %c = f32[16,8]{1,0} fusion(%p), kind=kCustom, calls=%step.3",
        )
    )
    assert summary(traffic) == [("all-gather", ("tp",), "forward", 4 * 128, 1)]


def test_what_an_asynchronous_call_wraps_is_counted_in_the_computation_it_calls():
    traffic = read(
        f"""%called (q: f32[4,8]) -> f32[16,8] {{
  %q = f32[4,8]{{1,0}} parameter(0)
  ROOT %inside = f32[16,8]{{1,0}} all-gather(%q), channel_id=5, replica_groups={ROWS}, dimensions={{0}}
}}, execution_thread="sparsecore"

"""
        + entry(
            '%start = ((f32[4,8]{1,0}), f32[16,8]{1,0}) call-start(%p), async_execution_thread="sparsecore", to_apply=%called, metadata={op_name="jit(f)/update/norm"}',
            "ROOT %done = f32[16,8]{1,0} call-done(%start)",
        )
    )
    assert summary(traffic) == [("all-gather", ("tp",), "update", 4 * 128, 1)]


def test_groups_that_are_no_product_of_axes_are_said_so():
    traffic = read(
        entry("ROOT %ag = f32[8,8]{1,0} all-gather(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}")
    )
    (found,) = traffic.collectives
    assert (found.axes, found.bytes) == ((), 4 * 64)
    assert "not a product of mesh axes: {{0,1},{2,3},{4,5},{6,7}}" in found.note


def test_sends_between_slices_are_noted_and_not_counted():
    traffic = read(
        entry(
            "%token = token[] after-all()",
            "%send = (f32[4,8]{1,0}, u32[], token[]) send(%p, %token), channel_id=2, is_host_transfer=true",
            "%send.done = token[] send-done(%send), channel_id=2",
            "ROOT %out = f32[4,8]{1,0} copy(%p)",
        )
    )
    assert (traffic.collectives, traffic.uncounted) == ((), {"send": 1})


def test_a_permute_of_several_arrays_has_the_bytes_of_all_and_one_in_place_of_its_own():
    pairs = "source_target_pairs={{0,1},{1,0}}"
    traffic = read(
        entry(
            f"%both = (f32[4,8]{{1,0}}, f32[4,8]{{1,0}}) collective-permute(%p, %p), channel_id=1, {pairs}",
            "%at = s32[] constant(0)",
            f"ROOT %placed = f32[4,8]{{1,0}} collective-permute(%p, %p, %at, %at), channel_id=2, {pairs}",
        )
    )
    assert [c.bytes for c in traffic.collectives] == [2 * 4 * 32, 4 * 32]


def test_pieces_of_an_all_to_all_are_one_array():
    pieces = ", ".join(["f32[4,8]{1,0}"] * 4)
    traffic = read(entry(f"ROOT %a2a = ({pieces}) all-to-all(%p, %p, %p, %p), replica_groups={ROWS}"))
    assert [(c.kind, c.bytes, c.array) for c in traffic.collectives] == [("all-to-all", 4 * 4 * 32, "f32[4,4,8]")]


def test_a_permute_without_pairs_moves_nothing():
    assert read(entry("ROOT %cp = f32[4,8]{1,0} collective-permute(%p), source_target_pairs={}")).collectives == ()


def test_an_op_name_that_the_compiler_left_out_is_taken_from_who_uses_a_gather_and_from_what_a_sum_adds():
    traffic = read(
        ADD
        + entry(
            '%made = f32[4,8]{1,0} negate(%p), metadata={op_name="jit(f)/transpose(jvp())/neg"}',
            f"%ar = f32[4,8]{{1,0}} all-reduce(%made), replica_groups={ROWS}, to_apply=%add",
            f"%ag = f32[16,8]{{1,0}} all-gather(%made), replica_groups={ROWS}, dimensions={{0}}",
            '%used = f32[16,8]{1,0} sine(%ag), metadata={op_name="jit(f)/transpose(jvp())/checkpoint/rematted_computation/sin"}',
            'ROOT %out = f32[4,8]{1,0} sine(%ar), metadata={op_name="jit(f)/update/sin"}',
        )
    )
    assert [(c.kind, c.phase) for c in traffic.collectives] == [("all-reduce", "backward"), ("all-gather", "recompute")]


def test_each_array_of_a_combined_sum_without_op_name_is_what_its_operand_is_made_of():
    traffic = read(
        ADD
        + entry(
            '%first = f32[4,8]{1,0} negate(%p), metadata={op_name="jit(f)/transpose(jvp(mlp))/neg"}',
            "%copied = f32[4,8]{1,0} copy(%first)",
            '%second = f32[4,8]{1,0} sine(%p), metadata={op_name="jit(f)/update/sin"}',
            f"%ar = (f32[4,8]{{1,0}}, f32[4,8]{{1,0}}) all-reduce(%copied, %second), replica_groups={ROWS}, to_apply=%add",
            "ROOT %out = f32[4,8]{1,0} get-tuple-element(%ar), index=1",
        )
    )
    assert [(c.phase, c.source) for c in traffic.collectives] == [("backward", "(mlp/neg)"), ("update", "(update/sin)")]


def test_the_bytes_of_a_mesh_of_other_axes_are_read_as_well():
    traffic = read(
        entry(f"ROOT %ag = f32[16,8]{{1,0}} all-gather(%p), replica_groups={ROWS}, dimensions={{0}}"),
        data=2, model=4,
    )  # fmt: skip
    assert summary(traffic) == [("all-gather", ("model",), "forward", 4 * math.prod((16, 8)), 1)]


def test_sliced_stands_for_a_reduce_scatter():
    traffic = collectives_of(toys.train_step(toys.cpu_mesh(fsdp=8)), fsdp=8)
    (gradient,) = [c for c in traffic.collectives if c.phase == "backward"]
    assert (gradient.kind, gradient.lowerings) == ("all-reduce", (Lowering(form=LoweredAs.SLICED_ALL_REDUCE),))
    assert [c.kind for c in canonicalize_collective(gradient, {"fsdp": 8})] == ["reduce-scatter"]


def test_a_gather_that_goes_on_through_an_inner_loop_is_counted_once_where_it_begins():
    """As the TPU compiler does at its default effort: the gather of a layer was counted five times, 1 + 4 trips."""

    def step(name):
        return f"""%{name} (q: f32[4,8]) -> f32[16,8] {{
  %q.{name} = f32[4,8]{{1,0}} parameter(0)
  ROOT %ag.{name} = f32[16,8]{{1,0}} all-gather(%q.{name}), channel_id=5, replica_groups={ROWS}, dimensions={{0}}
}}

"""

    loop = """%body (p: (f32[4,8])) -> (f32[4,8]) {
  %p.body = (f32[4,8]) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%p.body), index=0
  %inner = f32[16,8]{1,0} fusion(%x), kind=kOutput, calls=%goes_on
  ROOT %t = (f32[4,8]) tuple(%x)
}

%condition (p: (f32[4,8])) -> pred[] {
  %p.condition = (f32[4,8]) parameter(0)
  ROOT %more = pred[] constant(true)
}

"""
    trips = """backend_config={"known_trip_count":{"n":"4"}}"""
    traffic = read(
        step("goes_on")
        + step("begins")
        + loop
        + entry(
            "%a = f32[16,8]{1,0} fusion(%p), kind=kCustom, calls=%begins",
            "%in = (f32[4,8]) tuple(%p)",
            f"%loop = (f32[4,8]) while(%in), condition=%condition, body=%body, {trips}",
            "ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=0",
        )
    )
    assert summary(traffic) == [("all-gather", ("tp",), "forward", 4 * 128, 1)]


def test_a_loop_whose_first_iteration_is_peeled_keeps_the_trips_of_the_others():
    """Parts of one channel were one collective: of a gather in each of 6 layers 5 were lost."""

    def part(name, *, starts):
        target = '"AsyncCollectiveStart"' if starts else '"AsyncCollectiveDone"'
        return f"""%{name} (q: f32[4,8]) -> f32[16,8] {{
  %q.{name} = f32[4,8]{{1,0}} parameter(0)
  %ag.{name} = f32[16,8]{{1,0}} all-gather(%q.{name}), channel_id=5, replica_groups={ROWS}, dimensions={{0}}
  ROOT %of.{name} = f32[16,8]{{1,0}} custom-call(%ag.{name}), custom_call_target={target}
}}

"""

    loop = """%body (p: (f32[4,8])) -> (f32[4,8]) {
  %p.body = (f32[4,8]) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%p.body), index=0
  %begun = f32[16,8]{1,0} fusion(%x), kind=kCustom, calls=%start_of_others
  %ended = f32[16,8]{1,0} fusion(%x), kind=kCustom, calls=%end_of_others
  ROOT %t = (f32[4,8]) tuple(%x)
}

%condition (p: (f32[4,8])) -> pred[] {
  %p.condition = (f32[4,8]) parameter(0)
  ROOT %more = pred[] constant(true)
}

"""
    traffic = read(
        part("start_of_others", starts=True)
        + part("end_of_others", starts=False)
        + part("start_of_first", starts=True)
        + part("end_of_first", starts=False)
        + loop
        + entry(
            "%a = f32[16,8]{1,0} fusion(%p), kind=kCustom, calls=%start_of_first",
            "%b = f32[16,8]{1,0} fusion(%p), kind=kCustom, calls=%end_of_first",
            "%in = (f32[4,8]) tuple(%p)",
            "%loop = (f32[4,8]) while(%in), condition=%condition, body=%body,"
            """ backend_config={"known_trip_count":{"n":"5"}}""",
            "ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=0",
        )
    )
    assert sum(count for *_, count in summary(traffic)) == 6
    assert sum(moved for *_, moved, _ in summary(traffic)) == 6 * 4 * 128


def test_arrays_summed_at_once_under_the_op_name_of_one_are_in_the_phases_that_made_them():
    """The TPU compiler keeps the last op_name: gradients of norms came out in the update, the loss too."""
    traffic = read(
        ADD
        + entry(
            '%gradient = f32[4,8]{1,0} negate(%p), metadata={op_name="jit(f)/transpose(jvp(mlp))/neg"}',
            '%norm = f32[4,8]{1,0} sine(%p), metadata={op_name="jit(f)/update/sin"}',
            f"%ar = (f32[4,8]{{1,0}}, f32[4,8]{{1,0}}) all-reduce(%norm, %gradient), replica_groups={ROWS},"
            ' to_apply=%add, metadata={op_name="jit(f)/update/reduce_sum"}',
            "ROOT %out = f32[4,8]{1,0} get-tuple-element(%ar), index=1",
        )
    )
    assert [(c.phase, c.source) for c in traffic.collectives] == [("update", "(update/sin)"), ("backward", "(mlp/neg)")]


PROMOTED = """\
HloModule m, num_partitions=2

%add_promoted (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[8], y: f32[]) -> (bf16[8], f32[]) {
  %x = bf16[8] parameter(0)
  %y = f32[] parameter(1)
  %wide = f32[8] convert(%x)
  %all = (f32[8], f32[]) all-reduce(%wide, %y), channel_id=1, replica_groups={{0,1}}, to_apply=%add_promoted
  %first = f32[8] get-tuple-element(%all), index=0
  %second = f32[] get-tuple-element(%all), index=1
  %narrow = bf16[8] convert(%first)
  ROOT %out = (bf16[8], f32[]) tuple(%narrow, %second)
}
"""


def test_float32_that_is_combined_with_promoted_data_is_float32():
    """Both have the reduction of the first, `..._promoted` (jaxlib 0.12.0.1)."""
    found = read_collectives(parse_hlo(PROMOTED), {"x": 2}).collectives
    assert [(one.array, [how.promoted_from for how in one.lowerings]) for one in found] == [
        ("f32[8]", ["bf16"]),
        ("f32[]", []),
    ]
