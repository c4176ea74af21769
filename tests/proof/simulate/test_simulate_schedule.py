# ruff: noqa: E501 - HLO prints an instruction in a line
"""Simulated runs of programs written by hand, against times worked out by hand, and of programs as compilers make them."""

import math

import pytest
import toy_programs as toys

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.collectives import read_collectives
from meshwright.description.hlo.flops import count_flops
from meshwright.description.hlo.parser import parse_hlo
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.rates.achieved import HBM_SHARE
from meshwright.planning.cost.rates.attention import tpu_kernel_share
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.cost.rates.links import collective_efficiency
from meshwright.proof.simulate.events import COMPUTE
from meshwright.proof.simulate.op_seconds import clock_hertz
from meshwright.proof.simulate.schedule import simulate
from meshwright.record import PHASES, Kind

V5E, H100 = parse_system("v5e:4x4"), parse_system("h100:8")
MESH = {"fsdp": 4, "tp": 4}
OVER = {
    "fsdp": "{{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}",
    "tp": "{{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}",
}
BIG, SMALL = "bf16[4096,4096]{1,0:T(8,128)(2,1)}", "bf16[1024,4096]{1,0:T(8,128)(2,1)}"
NBYTES = 2 * 4096**2

HEADER = "HloModule m, is_scheduled=true, num_partitions={devices}\n\n"
ADDITION = """%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %c = bf16[] add(%a, %b)
}

"""


def compute_seconds(schedule):
    return math.fsum(schedule.breakdown_seconds[phase] for phase in PHASES)


def program(*body: str, computations: str = "", devices: int = 16) -> str:
    """A module whose entry takes a large and a small array and runs some instructions; the last is what it returns."""
    lines = [f"  %big = {BIG} parameter(0)", f"  %small = {SMALL} parameter(1)", *(f"  {line}" for line in body)]
    lines[-1] = f"  ROOT {lines[-1].strip()}"
    signature = f"ENTRY %main (big: {BIG.split('{')[0]}, small: {SMALL.split('{')[0]}) -> token[] {{"
    return HEADER.format(devices=devices) + ADDITION + computations + "\n".join([signature, *lines, "}"]) + "\n"


def op(name: str, seconds: float, *, of: str = "%big", scope: str = "jit(f)/jvp(mlp)/mul") -> str:
    """An op for which the TPU compiler estimates so many seconds of v5e's clock, more than its bytes take."""
    cycles = round(seconds * clock_hertz(V5E))
    return f'%{name} = {BIG} negate({of}), metadata={{op_name="{scope}"}}, backend_config={{"estimated_cycles":"{cycles}"}}'


def gather(name: str, axis: str, *, of: str = "%small", start: bool = True) -> str:
    """An all-gather of the small array to the large one, started or whole."""
    shape = f"({SMALL}, {BIG})" if start else BIG
    opcode = "all-gather-start" if start else "all-gather"
    return f'%{name} = {shape} {opcode}({of}), replica_groups={OVER[axis]}, dimensions={{0}}, metadata={{op_name="jit(f)/jvp(mlp)/reshard"}}'


def done(name: str, start: str) -> str:
    return f"%{name} = {BIG} all-gather-done(%{start})"


def priced(kind: Kind, nbytes: float, axes, system=V5E, mesh=MESH) -> float:
    """What a plan takes a collective for."""
    time = collective_seconds(kind, nbytes, lay_mesh(system, mesh).placement(axes))
    return max(time.bandwidth_seconds / collective_efficiency(system, time), time.latency_seconds)


def run(text: str, mesh=MESH, system=V5E):
    return simulate(parse_hlo(text), mesh, system)


ONE = priced("all-gather", NBYTES, "fsdp")


def seconds(value: float):
    return pytest.approx(value, rel=1e-5)  # cycles are whole numbers


def test_an_op_takes_the_cycles_that_the_compiler_estimates():
    schedule = run(program(op("x", 0.004)))
    assert schedule.step_seconds == compute_seconds(schedule) == seconds(0.004)
    assert [(event.name, event.basis, event.scope) for event in schedule.events] == [("x", "compiler", "mlp/mul")]


@pytest.mark.parametrize("cycles", [1000, 2**63 - 1])
def test_an_op_takes_no_less_than_its_bytes_and_no_estimate_where_the_compiler_has_none(cycles):
    text = program(f'%x = {BIG} negate(%big), backend_config={{"estimated_cycles":"{cycles}"}}')
    once = 2 * NBYTES / V5E.hbm_bytes_per_second
    assert once <= run(text).step_seconds <= 1.2 * once


def test_a_whole_collective_is_waited_for_and_costs_what_a_plan_takes_it_for():
    schedule = run(program(gather("g", "fsdp", start=False)))
    assert schedule.step_seconds == schedule.breakdown_seconds["exposed communication"] == pytest.approx(ONE)
    assert schedule.exposed_by("axes") == {"fsdp": pytest.approx(ONE)}
    assert schedule.exposed_by("scope") == {"mlp/reshard": pytest.approx(ONE)}
    (entry,) = schedule.collectives
    assert (entry.kind, entry.axes, entry.bytes, entry.count) == ("all-gather", ("fsdp",), NBYTES, 1)
    assert entry.seconds == entry.exposed_seconds == pytest.approx(ONE)


@pytest.mark.parametrize(("share", "exposed"), [(2.0, 0.0), (1.0, 0.0), (0.25, 0.75), (0.0, 1.0)])
def test_a_started_collective_is_exposed_as_far_as_ops_do_not_hide_it(share, exposed):
    ops = [op("x", share * ONE)] if share else []
    schedule = run(program(gather("g", "fsdp"), *ops, done("d", "g")))
    assert schedule.step_seconds == seconds(max(share, 1.0) * ONE)
    assert schedule.breakdown_seconds.get("exposed communication", 0.0) == pytest.approx(exposed * ONE, abs=1e-5 * ONE)


def test_collectives_on_the_same_links_follow_each_other_and_on_others_run_at_once():
    def both(second: str) -> float:
        return run(program(gather("g", "fsdp"), gather("h", second), done("d", "g"), done("e", "h"))).step_seconds

    assert both("fsdp") == pytest.approx(2 * ONE)
    assert both("tp") == pytest.approx(max(ONE, priced("all-gather", NBYTES, "tp")))


def permute(name: str, by: int) -> str:
    pairs = ",".join(f"{{{d},{d // 4 * 4 + (d + by) % 4}}}" for d in range(16))
    return f"%{name} = ({BIG}, {BIG}) collective-permute-start(%big), source_target_pairs={{{pairs}}}"


def test_permutes_that_go_opposite_ways_run_at_once_and_those_that_go_further_take_longer():
    def both(*shifts: int) -> float:
        starts = [permute(f"p{i}", by) for i, by in enumerate(shifts)]
        ends = [f"%d{i} = {BIG} collective-permute-done(%p{i})" for i in range(len(shifts))]
        return run(program(*starts, *ends)).step_seconds

    assert both(1, -1) == pytest.approx(both(1))
    assert both(1, 1) == pytest.approx(2 * both(1))
    assert both(2) == pytest.approx(2 * both(1), rel=0.01)  # the hops' latency apart


LOOP = """%body (t: (s32[], {big}, {small})) -> (s32[], {big}, {small}) {{
  %t = (s32[], {big}, {small}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %inner = {big} get-tuple-element(%t), index=1
  %part = {small} get-tuple-element(%t), index=2
  {inside}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %r = (s32[], {big}, {small}) tuple(%next, %inner, %part)
}}

%condition (u: (s32[], {big}, {small})) -> pred[] {{
  %u = (s32[], {big}, {small}) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  %limit = s32[] constant({trips})
  ROOT %more = pred[] compare(%j, %limit), direction=LT
}}

"""


def looped(*inside: str, trips: int, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> str:
    """A loop of some instructions, with others around it."""
    shape = f"(s32[], {BIG}, {SMALL})"
    text = LOOP.format(big=BIG, small=SMALL, inside="\n  ".join(inside), trips=trips)
    enter = ["%zero = s32[] constant(0)", f"%init = {shape} tuple(%zero, %big, %small)"]
    loop = f"%loop = {shape} while(%init), condition=%condition, body=%body"
    return program(*before, *enter, loop, *after, computations=text)


def test_a_loop_takes_its_trips_and_the_simulation_no_longer_for_them():
    def schedule(trips: int):
        return run(looped(op("x", 0.002, of="%inner"), gather("g", "fsdp", of="%part", start=False), trips=trips))

    few, many = schedule(3), schedule(3000)
    assert few.step_seconds == seconds(3 * (0.002 + ONE))
    assert many.step_seconds == seconds(3000 * (0.002 + ONE))
    assert [event.name for event in few.events] == [event.name for event in many.events] == ["loop", "x", "g", "next"]
    assert [event.count for event in many.events] == [1, 3000, 3000, 3000]
    assert many.collectives[0].count == 3000


def test_the_trips_that_something_started_before_a_loop_slows_down_are_told_from_the_others():
    inside = (gather("g", "fsdp", of="%part"), op("x", ONE, of="%inner"), done("d", "g"))
    alone = run(looped(*inside, trips=10))
    assert alone.step_seconds == seconds(10 * ONE)
    busy = run(looped(*inside, trips=10, before=(gather("first", "fsdp"),), after=(done("last", "first"),)))
    # The first trip's collective waits for the links until the one before the loop is done, and is then late.
    assert busy.step_seconds == seconds(11 * ONE)
    assert sum(event.count for event in busy.events if event.name == "g") == 10


FUSED = """%starts (p: {small0}) -> ({small0}, {big0}) {{
  %p = {small} parameter(0)
  %g0 = {big} all-gather(%p), channel_id=7, replica_groups={groups}, dimensions={{0}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"-1"}}}}
  ROOT %s = ({small}, {big}) custom-call(%g0), custom_call_target="AsyncCollectiveStart"
}}

%works (q: {small0}, x: {big0}) -> ({big0}, {small0}) {{
  %q = {small} parameter(0)
  %x = {big} parameter(1)
  %n = {big} negate(%x)
  %g1 = {big} all-gather(%q), channel_id=7, replica_groups={groups}, dimensions={{0}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %w = ({big}, {small}) tuple(%n, %q)
}}

%ends (v: {small0}) -> {big0} {{
  %v = {small} parameter(0)
  %g2 = {big} all-gather(%v), channel_id=7, replica_groups={groups}, dimensions={{0}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"8"}}}}
  ROOT %e = {big} custom-call(%v, %g2), custom_call_target="AsyncCollectiveDone"
}}

"""


@pytest.mark.parametrize("share", [2.0, 0.5])
def test_a_collective_spread_over_fusions_runs_beside_the_op_of_the_one_between(share):
    shapes = {"big": BIG, "small": SMALL, "big0": BIG.split("{")[0], "small0": SMALL.split("{")[0]}
    cycles = round(share * ONE * clock_hertz(V5E))
    schedule = run(
        program(
            f"%start = ({SMALL}, {BIG}) fusion(%small), kind=kCustom, calls=%starts",
            f"%sent = {SMALL} get-tuple-element(%start), index=0",
            f'%work = ({BIG}, {SMALL}) fusion(%sent, %big), kind=kOutput, calls=%works, backend_config={{"estimated_cycles":"{cycles}"}}',
            f"%passed = {SMALL} get-tuple-element(%work), index=1",
            f"%end = {BIG} fusion(%passed), kind=kCustom, calls=%ends",
            computations=FUSED.format(groups=OVER["fsdp"], **shapes),
        )
    )
    assert compute_seconds(schedule) == seconds(share * ONE)
    assert schedule.step_seconds == seconds(max(share, 1.0) * ONE)
    assert [event.name for event in schedule.events if event.lane != COMPUTE] == ["start"]


def test_a_fusion_that_is_one_reduce_scatter_is_waited_for():
    scatter = f"""%all-reduce-scatter (p: {BIG.split("{")[0]}) -> {SMALL.split("{")[0]} {{
  %p = {BIG} parameter(0)
  %r = {BIG} all-reduce(%p), channel_id=3, replica_groups={OVER["fsdp"]}, to_apply=%add
  ROOT %s = {SMALL} slice(%r), slice={{[0:1024], [0:4096]}}
}}

"""
    text = program(f"%f = {SMALL} fusion(%big), kind=kCustom, calls=%all-reduce-scatter", computations=scatter)
    schedule = run(text)
    assert [event.kind for event in schedule.events] == ["reduce-scatter"]
    assert schedule.step_seconds == pytest.approx(priced("reduce-scatter", NBYTES, "fsdp"))


@pytest.mark.parametrize(("opcode", "shape"), [("copy", "({dst}, {src}, u32[])"), ("slice", "(({src}), {dst}, s32[])")])
def test_copies_to_fast_memory_go_at_the_rate_of_memory_beside_the_ops(opcode, shape):
    fast = BIG.replace("(2,1)}", "(2,1)S(1)}")
    started = f"%s = {shape.format(dst=fast, src=BIG)} {opcode}-start(%big)"
    schedule = run(program(started, f"%d = {fast} {opcode}-done(%s)"))
    assert schedule.breakdown_seconds["exposed copies"] == schedule.step_seconds
    assert schedule.step_seconds == pytest.approx(NBYTES / V5E.hbm_bytes_per_second)


def test_copies_to_the_host_go_at_the_rate_of_its_link():
    host = BIG.replace("(2,1)}", "(2,1)S(5)}")
    schedule = run(program(f"%s = ({host}, {BIG}, u32[]) copy-start(%big)", f"%d = {host} copy-done(%s)"))
    assert schedule.step_seconds == pytest.approx(NBYTES / V5E.host_bytes_per_second)
    assert [event.kind for event in schedule.events] == ["host copy"]


WHOLE, PART = "bf16[8,4096,4096]{2,1,0:S(5)}", "bf16[1,4096,4096]{2,1,0}"
OFFLOADS = f"""%offloads (w: {WHOLE.split("{")[0]}, q: {PART.split("{")[0]}, i: s32[]) -> {WHOLE.split("{")[0]} {{
  %w = {WHOLE} parameter(0)
  %q = {PART} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = {WHOLE} dynamic-update-slice(%w, %q, %i, %i, %i)
}}

"""


@pytest.mark.parametrize("opcode", ["dynamic-update-slice", "fusion"])
def test_what_is_offloaded_goes_over_the_link_to_the_host_and_no_more_than_that(opcode):
    """As the compilers for TPU and for GPU write it."""
    text = program(
        f'%whole = {WHOLE} custom-call(), custom_call_target="AllocateBuffer"',
        f"%part = {PART} bitcast(%big)",
        "%i = s32[] constant(3)",
        f"%s = (({WHOLE}, {PART}, s32[]), {WHOLE}, u32[]) {opcode}-start(%whole, %part, %i), calls=%offloads",
        f"%d = {WHOLE} {opcode}-done(%s)",
        computations=OFFLOADS,
    )
    schedule = run(text.replace("%i, %i, %i), calls=%offloads", "%i, %i, %i)") if opcode != "fusion" else text)
    assert [event.kind for event in schedule.events] == ["host copy"]
    assert schedule.step_seconds == pytest.approx(NBYTES / V5E.host_bytes_per_second)


def test_work_that_is_started_beside_the_ops_is_waited_for_where_it_is_awaited():
    beside = f"%beside (p: {BIG.split('{')[0]}) -> {BIG.split('{')[0]} {{\n  %p = {BIG} parameter(0)\n  ROOT %n = {BIG} negate(%p)\n}}\n\n"
    start = f"%s = (({BIG}), {BIG}, u32[]) fusion-start(%big), calls=%beside"
    schedule = run(program(start, op("x", 1e-5), f"%d = {BIG} fusion-done(%s)", computations=beside))
    assert schedule.breakdown_seconds["exposed calls"] == schedule.step_seconds - compute_seconds(schedule) > 0
    assert schedule.step_seconds == pytest.approx(2 * NBYTES / V5E.hbm_bytes_per_second / HBM_SHARE)


def test_a_collective_in_an_asynchronous_call_takes_the_time_of_the_collective():
    """As libtpu runs an all-reduce on the SparseCores of TPU7x."""
    inside = f"%sums (p: {BIG.split('{')[0]}) -> {BIG.split('{')[0]} {{\n  %p = {BIG} parameter(0)\n  ROOT %r = {BIG} all-reduce(%p), replica_groups={OVER['tp']}, to_apply=%add\n}}\n\n"
    start = f'%s = (({BIG}), {BIG}) call-start(%big), async_execution_thread="sparsecore", to_apply=%sums'
    schedule = run(program(start, op("x", 1e-5), f"%d = {BIG} call-done(%s)", computations=inside))
    assert [(event.kind, event.axes) for event in schedule.events] == [("all-reduce", ("tp",)), ("op", ())]
    assert schedule.step_seconds == pytest.approx(priced("all-reduce", NBYTES, ("tp",)))


def test_a_collective_between_slices_goes_over_the_data_centre_network():
    two = parse_system("2*v5e:4x4")
    attributes = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}'
    text = program(
        "%t = token[] after-all()",
        f"%r = ({BIG}, u32[], token[]) recv(%t), channel_id=1, {attributes}",
        f"%s = ({BIG}, u32[], token[]) send(%big, %t), channel_id=2, {attributes}",
        op("x", 0.001),
        f"%sd = token[] send-done(%s), channel_id=2, {attributes}",
        f"%rd = ({BIG}, token[]) recv-done(%r), channel_id=1, {attributes}",
    )
    schedule = run(text, {"dp": 2, **MESH}, two)
    # 2 slices: each chip sends half of its array twice, and the slices' cards are shared evenly.
    assert schedule.step_seconds == pytest.approx(NBYTES / 3.125e9, rel=0.01)
    assert list(schedule.exposed_by("axes")) == ["dp"]


def test_the_longest_branch_of_a_conditional_is_taken():
    branch = "%{name} (p: {big0}) -> {big0} {{\n  %p = {big} parameter(0)\n  ROOT {op}\n}}\n\n"
    branches = "".join(
        branch.format(name=name, big0=BIG.split("{")[0], big=BIG, op=op(f"x{name}", time, of="%p"))
        for name, time in (("short", 0.001), ("long", 0.005))
    )
    pick = "%which = pred[] constant(true)"
    choose = f"%c = {BIG} conditional(%which, %big, %big), true_computation=%long, false_computation=%short"
    schedule = run(program(pick, choose, computations=branches))
    assert schedule.step_seconds == seconds(0.005)
    assert any("longest branch" in note for note in schedule.notes)


GPU_MESH = {"fsdp": 2, "tp": 4}
GPU_OVER = {"fsdp": "{{0,4},{1,5},{2,6},{3,7}}", "tp": "{{0,1,2,3},{4,5,6,7}}"}


def on_gpu(*axes: str, is_sync: bool = False):
    """All-reduces started one after the other on 8 GPUs, a product, then all of them awaited."""
    config = f'backend_config={{"collective_backend_config":{{"is_sync":{str(is_sync).lower()}}}}}'
    plain = BIG.split(":")[0] + "}"
    starts = [
        f"%r{i} = {plain} all-reduce-start(%big), replica_groups={GPU_OVER[axis]}, to_apply=%add, {config}"
        for i, axis in enumerate(axes)
    ]
    product = f"%y = {plain} dot(%big, %big), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    ends = [f"%d{i} = {plain} all-reduce-done(%r{i})" for i in range(len(axes))]
    text = program(*starts, product, *ends, devices=8).replace(":T(8,128)(2,1)", "")
    return run(text, GPU_MESH, H100)


def test_a_gpu_runs_all_collectives_in_one_stream():
    times = [priced("all-reduce", NBYTES, axis, H100, GPU_MESH) for axis in ("fsdp", "tp")]
    moves = [event for event in on_gpu("fsdp", "tp").events if event.lane != COMPUTE]
    assert [event.seconds for event in moves] == [pytest.approx(time) for time in times]
    assert moves[1].start_seconds == pytest.approx(times[0])


def test_a_gpu_waits_for_the_collectives_that_xla_marked_as_synchronous():
    beside, waited = on_gpu("tp"), on_gpu("tp", is_sync=True)
    alone = priced("all-reduce", NBYTES, "tp", H100, GPU_MESH)
    assert waited.breakdown_seconds["exposed communication"] == pytest.approx(alone)
    assert beside.breakdown_seconds.get("exposed communication", 0.0) < alone
    assert "stragglers" in waited.breakdown_seconds


def test_a_product_without_an_estimate_takes_the_time_of_its_size():
    (product,) = [event for event in on_gpu().events if event.lane == COMPUTE]
    assert product.basis == "roofline"
    assert 0.5 < 2 * 4096**3 / (product.seconds * H100.peak("bf16")) < 0.9


@pytest.mark.parametrize(("kernel", "block", "products"), [("fwd", "q", 2), ("dq", "q_dq", 3), ("dkv", "q_dkv", 4)])
def test_attention_kernels_that_say_no_flops_are_counted_by_their_name(kernel, block, products):
    heads = "bf16[2,8,4096,128]{3,2,1,0:T(8,128)(2,1)}"
    call = f'custom-call(%q, %q, %q), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{"xprof_metadata":"{{\\"block_{block}\\": 512}}"}}}}'
    text = (
        HEADER.format(devices=16)
        + f"ENTRY %main (q: bf16[2,8,4096,128]) -> bf16[2,8,4096,128] {{\n  %q = {heads} parameter(0)\n  ROOT %splash_mha_{kernel}_residuals.1 = {heads} {call}\n}}\n"
    )
    schedule = run(text)
    # Products of queries with keys, of which 8 x 8 blocks those on and below the diagonal: 36 of 64.
    worked = products * 2 * 2 * 8 * 4096**2 * 128 * 36 / 64
    assert [event.basis for event in schedule.events] == ["kernel"]
    reached = worked / (schedule.step_seconds * V5E.peak())
    assert reached == pytest.approx(tpu_kernel_share(V5E, kernel, 128, 128))
    assert schedule.notes == ("1 calls a step of tpu_custom_call have no known flops",)


def test_a_program_that_is_not_scheduled_is_an_error():
    with pytest.raises(MeshwrightError, match="not scheduled"):
        run(program(op("x", 0.001)).replace("is_scheduled=true, ", ""))


def test_a_program_that_contradicts_itself_is_an_error():
    with pytest.raises(MeshwrightError, match="contradicts itself"):
        run(program(gather("g", "fsdp").replace(f"({SMALL}, {BIG})", BIG), done("d", "g")))


def test_a_program_for_another_number_of_devices_is_an_error():
    with pytest.raises(MeshwrightError, match="runs on 16 devices; the mesh has 8"):
        run(program(op("x", 0.001)), {"fsdp": 2, "tp": 4}, parse_system("v5e:2x4"))


@pytest.fixture(scope="module")
def compiled():
    """A train step as XLA:CPU makes it, with its record of collectives, and its simulated run."""
    mesh = MeshShape(fsdp=2, tp=4)
    module = parse_hlo(toys.train_step(toys.cpu_mesh(**mesh.degrees), layers=5).compile().as_text())
    return module, read_collectives(module, mesh.layout), simulate(module, mesh.layout, parse_system("cpu:8"))


def test_the_parts_of_a_step_sum_to_the_end_of_its_timeline(compiled):
    _, _, schedule = compiled
    assert math.fsum(schedule.breakdown_seconds.values()) == schedule.step_seconds
    end = max(event.start_seconds + event.seconds for event in schedule.events)
    assert schedule.step_seconds == pytest.approx(end)
    assert sum(schedule.exposed_by("axes").values()) == pytest.approx(
        schedule.breakdown_seconds["exposed communication"]
    )


def test_a_simulated_run_has_the_collectives_that_the_program_is_read_to_have(compiled):
    _, traffic, schedule = compiled
    for what in ("bytes", "count"):
        amounts = {}
        for sign, entries in ((1, traffic.collectives), (-1, schedule.collectives)):
            for entry in entries:
                # One that carries arrays of two phases is one run, and two entries of the record.
                key = (entry.kind, entry.axes)
                amounts[key] = amounts.get(key, 0) + sign * getattr(entry, what)
        assert what == "count" or set(amounts.values()) == {0}
        assert all(amount >= 0 for amount in amounts.values())


def test_utilisation_is_flops_over_the_time_of_the_step(compiled):
    module, _, schedule = compiled
    peak = parse_system("cpu:8").peak("f32")
    assert schedule.hfu == pytest.approx(count_flops(module).total / (schedule.step_seconds * peak))
    assert schedule.mfu(1e6) == pytest.approx(1e6 / 8 / (schedule.step_seconds * peak))
