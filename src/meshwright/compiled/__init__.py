"""A compiled program, for hardware that need not be there, and the record that is read from it."""

from meshwright.compiled.buffers import Buffer, Memory, read_buffers
from meshwright.compiled.collectives import Traffic, each_collective, groups_of, read_collectives
from meshwright.compiled.compare import Row, compare, in_plans_terms
from meshwright.compiled.compile import cache_directory, compile_all, compile_in_child
from meshwright.compiled.dataflow import VIEWS, element, origin, uses
from meshwright.compiled.evaluate import evaluate
from meshwright.compiled.flops import count_flops, flops_of
from meshwright.compiled.groups import axes_of_groups
from meshwright.compiled.hbm import count_hbm_bytes
from meshwright.compiled.hlo import CALL_KEYS, Computation, Instruction, Module, contradictions
from meshwright.compiled.loops import Runs, count_runs
from meshwright.compiled.optimized import read_optimized
from meshwright.compiled.parser import parse_hlo
from meshwright.compiled.phases import Description, describe, scope_of, split_op_name
from meshwright.compiled.program import CompiledProgram, CompileRequest
from meshwright.compiled.rematerialized import Rematerialized, read_rematerialized
from meshwright.compiled.report import read_hlo, read_module, read_program, within_slice
from meshwright.compiled.respelled import PADDED, PROMOTED, SLICED, SLICED_IN_PART, UNREAD, meant
from meshwright.compiled.schedule import Schedule, simulate
from meshwright.compiled.schedule_events import COMPUTE, Event, Repeat
from meshwright.compiled.shapes import Shape
from meshwright.compiled.shardings import Laid, read_shardings
from meshwright.compiled.specs import Spec, spec_by_axes, spec_by_devices
from meshwright.compiled.tally import Tally
from meshwright.compiled.targets import Effort, check_compiler, compiler_name
from meshwright.compiled.trace import trace, write_trace
from meshwright.compiled.verify import Verification, verify, verify_all

__all__ = [
    "CALL_KEYS",
    "COMPUTE",
    "PADDED",
    "PROMOTED",
    "SLICED",
    "SLICED_IN_PART",
    "UNREAD",
    "VIEWS",
    "Buffer",
    "CompileRequest",
    "CompiledProgram",
    "Computation",
    "Description",
    "Effort",
    "Event",
    "Instruction",
    "Laid",
    "Memory",
    "Module",
    "Rematerialized",
    "Repeat",
    "Row",
    "Runs",
    "Schedule",
    "Shape",
    "Spec",
    "Tally",
    "Traffic",
    "Verification",
    "axes_of_groups",
    "cache_directory",
    "check_compiler",
    "compare",
    "compile_all",
    "compile_in_child",
    "compiler_name",
    "contradictions",
    "count_flops",
    "count_hbm_bytes",
    "count_runs",
    "describe",
    "each_collective",
    "element",
    "evaluate",
    "flops_of",
    "groups_of",
    "in_plans_terms",
    "meant",
    "origin",
    "parse_hlo",
    "read_buffers",
    "read_collectives",
    "read_hlo",
    "read_module",
    "read_optimized",
    "read_program",
    "read_rematerialized",
    "read_shardings",
    "scope_of",
    "simulate",
    "spec_by_axes",
    "spec_by_devices",
    "split_op_name",
    "trace",
    "uses",
    "verify",
    "verify_all",
    "within_slice",
    "write_trace",
]
