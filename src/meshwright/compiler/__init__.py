"""Compile programs for hardware that need not be there, and read what the compiler made of them."""

from meshwright.compiler.compile import cache_directory, compile_all, compile_in_child
from meshwright.compiler.optimized import read_optimized
from meshwright.compiler.program import CompiledProgram, CompileRequest
from meshwright.compiler.records import read_program
from meshwright.compiler.rematerialized import read_rematerialized
from meshwright.compiler.shardings import Laid, read_shardings
from meshwright.compiler.targets import Effort, compiler_name

__all__ = [
    "CompileRequest",
    "CompiledProgram",
    "Effort",
    "Laid",
    "cache_directory",
    "compile_all",
    "compile_in_child",
    "compiler_name",
    "read_optimized",
    "read_program",
    "read_rematerialized",
    "read_shardings",
]
