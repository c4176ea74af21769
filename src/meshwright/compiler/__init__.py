"""Compile programs for hardware that is not present, and read what the compiler made of them."""

from meshwright.compiler.compile import cache_directory, compile_all, compile_in_child
from meshwright.compiler.full_rematerializations import read_full_rematerializations
from meshwright.compiler.program import CompiledProgram, CompileRequest, LoweredProgram, MeshMethod, UnusedConstraint
from meshwright.compiler.records import read_optimized, read_program
from meshwright.compiler.shardings import ShardingPair, read_shardings
from meshwright.compiler.targets import Effort, compiler_name

__all__ = [
    "CompileRequest",
    "CompiledProgram",
    "Effort",
    "LoweredProgram",
    "MeshMethod",
    "ShardingPair",
    "UnusedConstraint",
    "cache_directory",
    "compile_all",
    "compile_in_child",
    "compiler_name",
    "read_full_rematerializations",
    "read_optimized",
    "read_program",
    "read_shardings",
]
