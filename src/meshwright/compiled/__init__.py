"""A compiled program, for hardware that need not be there, and the record that is read from it."""

from meshwright.compiled.collectives import Traffic, read_collectives
from meshwright.compiled.compare import Row, compare, in_plans_terms
from meshwright.compiled.compile import cache_directory, compile_in_child
from meshwright.compiled.flops import Flops, count_flops
from meshwright.compiled.hlo import Computation, Instruction, Module
from meshwright.compiled.parser import parse_hlo
from meshwright.compiled.program import CompiledProgram, CompileRequest
from meshwright.compiled.report import read_hlo, read_program
from meshwright.compiled.respelled import PADDED, PROMOTED, SLICED, SLICED_IN_PART, UNREAD, meant
from meshwright.compiled.shapes import Shape
from meshwright.compiled.targets import Effort, check_compiler, compiler_name
from meshwright.compiled.verify import Verification, verify

__all__ = [
    "PADDED",
    "PROMOTED",
    "SLICED",
    "SLICED_IN_PART",
    "UNREAD",
    "CompileRequest",
    "CompiledProgram",
    "Computation",
    "Effort",
    "Flops",
    "Instruction",
    "Module",
    "Row",
    "Shape",
    "Traffic",
    "Verification",
    "cache_directory",
    "check_compiler",
    "compare",
    "compile_in_child",
    "compiler_name",
    "count_flops",
    "in_plans_terms",
    "meant",
    "parse_hlo",
    "read_collectives",
    "read_hlo",
    "read_program",
    "verify",
]
