"""The names of what XLA's partitioner makes by itself (jaxlib 0.11), with the module it left and without."""

import pytest

from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.phases import describe
from meshwright.proof.compiler.program import CompiledProgram, MeshMethod
from meshwright.proof.compiler.records import read_optimized

BACKWARD = "jit(step)/transpose(jvp(layers))/while/body/eval_jaxpr"
GATHERED = f"{BACKWARD}/checkpoint/rematted_computation/mlp"

MODULE = """\
HloModule m, num_partitions=2

%product (x: f32[8,8], y: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8] parameter(0)
  %y = f32[8,8] parameter(1)
  ROOT %dot = f32[8,8] dot(%x, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="{used}/dot_general"}}
}}

ENTRY %main (w: f32[4,8]) -> f32[8,8] {{
  %w = f32[4,8] parameter(0)
  %gather = f32[8,8] all-gather(%w), channel_id=3, replica_groups={{{{0,1}}}}, dimensions={{0}}, use_global_device_ids=true, frontend_attributes={{is_spmd_generated="true"}}, metadata={{op_name="{named}"}}
  %copy = f32[8,8] copy(%gather){copied}
  ROOT %out = f32[8,8] fusion(%copy, %copy), kind=kLoop, calls=%product, metadata={{op_name="jit(step)/update/mul"}}
}}
"""  # noqa: E501 - HLO prints an instruction in a line

BY_ITSELF = ', frontend_attributes={is_spmd_generated="true"}, metadata={op_name="jit(step)/jit"}'


def text(named: str, *, used: str, copied: str = BY_ITSELF) -> str:
    return MODULE.format(named=named, used=used, copied=copied)


def gather_of(module):
    (found,) = describe(module, module.computations["main"].instructions["gather"], moves=True)
    return found.op_name, found.phase


@pytest.mark.parametrize(("call", "phase"), [("remat2", "recompute"), ("jit", "recompute")])
def test_a_gather_that_has_the_name_of_a_call_is_for_what_uses_it(call, phase):
    module = parse_hlo(text(f"{BACKWARD}/{call}", used=GATHERED))
    assert gather_of(module) == (f"{GATHERED}/dot_general", phase)


def test_a_gather_that_has_a_name_of_its_own_keeps_it():
    module = parse_hlo(text(f"{GATHERED}/reshard", used=f"{BACKWARD}/checkpoint/mlp"))
    assert gather_of(module) == (f"{GATHERED}/reshard", "recompute")


def test_what_the_partitioner_left_says_what_a_gather_is_for():
    """The optimized module has only the product, in backward; the reshard that asked for the gather is gone."""
    asked = f', metadata={{op_name="{GATHERED}/reshard"}}'
    program = CompiledProgram(
        hlo=text(f"{BACKWARD}/remat2", used=f"{BACKWARD}/checkpoint/mlp"),
        memory_bytes={},
        messages="",
        compile_seconds=0.0,
        compiler="",
        mesh_method=MeshMethod.MAKE_MESH,
        partitioned=text(f"{BACKWARD}/remat2", used=f"{BACKWARD}/checkpoint/mlp", copied=asked),
    )
    assert gather_of(parse_hlo(program.hlo))[1] == "backward"
    assert gather_of(read_optimized(program)) == (f"{GATHERED}/reshard", "recompute")


APART = """\
HloModule m, num_partitions=2

ENTRY %main (w: f32[4,8], v: f32[4,8]) -> (f32[8,8], f32[8,8]) {{
  %w = f32[4,8] parameter(0)
  %v = f32[4,8] parameter(1)
  %gather.1 = f32[8,8] all-gather(%w), channel_id=3, replica_groups=[1,2]<=[2], dimensions={{0}}, use_global_device_ids=true, frontend_attributes={{is_spmd_generated="true"}}, metadata={{op_name="{named}"}}
  %gather.2 = f32[8,8] all-gather(%v), channel_id=4, replica_groups={{{{0,1}}}}, dimensions={{0}}, use_global_device_ids=true, frontend_attributes={{is_spmd_generated="true"}}, metadata={{op_name="{named}"}}
  %neg.1 = f32[8,8] negate(%gather.1), metadata={{op_name="{first}"}}
  %neg.2 = f32[8,8] negate(%gather.2), metadata={{op_name="{second}"}}
  ROOT %out = (f32[8,8], f32[8,8]) tuple(%neg.1, %neg.2)
}}
"""  # noqa: E501
COMBINED = """\
HloModule m, num_partitions=2

ENTRY %main (w: f32[4,8], v: f32[4,8]) -> (f32[8,8], f32[8,8]) {{
  %w = f32[4,8] parameter(0)
  %v = f32[4,8] parameter(1)
  %gather = ((f32[4,8], f32[4,8]), (f32[8,8], f32[8,8])) all-gather-start(%w, %v), channel_id=3, replica_groups={{{{0,1}}}}, dimensions={{0}}, use_global_device_ids=true, frontend_attributes={{is_spmd_generated="true"}}, metadata={{op_name="{named}"}}
  ROOT %done = (f32[8,8], f32[8,8]) all-gather-done(%gather)
}}
"""  # noqa: E501


def test_each_gather_of_a_combined_one_is_for_what_used_it():
    """The combined one has the channel and the name of the first, which is that of a call (jaxlib 0.12.0.1)."""
    names = {"named": f"{BACKWARD}/remat2", "first": f"{BACKWARD}/checkpoint/mlp/neg", "second": f"{GATHERED}/neg"}
    program = CompiledProgram(
        hlo=COMBINED.format(**names),
        memory_bytes={},
        messages="",
        compile_seconds=0.0,
        compiler="",
        mesh_method=MeshMethod.MAKE_MESH,
        partitioned=APART.format(**names),
    )
    module = read_optimized(program)
    found = describe(module, module.computations["main"].instructions["gather"], number=2, moves=True)
    assert [(one.op_name, one.phase) for one in found] == [
        (names["first"], "backward"),
        (names["second"], "recompute"),
    ]
