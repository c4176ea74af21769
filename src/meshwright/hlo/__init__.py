"""HLO text as data: instructions, loops, dataflow, collectives by mesh axis, flops. Imports no JAX."""

from meshwright.hlo.canonical import canonicalize_collective
from meshwright.hlo.collectives import each_collective, groups_of, read_collectives
from meshwright.hlo.dataflow import VIEWS, origin, uses
from meshwright.hlo.dcn import dcn_kind
from meshwright.hlo.evaluation import evaluate
from meshwright.hlo.flops import count_flops, flops_of
from meshwright.hlo.groups import axes_of_groups
from meshwright.hlo.loops import ExecutionCounts, count_executions
from meshwright.hlo.module import CALL_KEYS, Instruction, Module, contradictions_as_errors
from meshwright.hlo.parser import parse_hlo
from meshwright.hlo.phases import Description, describe, scope_of, split_op_name
from meshwright.hlo.records import read_hlo, read_module
from meshwright.hlo.shapes import Shape
from meshwright.hlo.specs import Spec, parse_hlo_sharding, parse_shardy_sharding
from meshwright.hlo.updates import Share, Updates

__all__ = [
    "CALL_KEYS",
    "VIEWS",
    "Description",
    "ExecutionCounts",
    "Instruction",
    "Module",
    "Shape",
    "Share",
    "Spec",
    "Updates",
    "axes_of_groups",
    "canonicalize_collective",
    "contradictions_as_errors",
    "count_executions",
    "count_flops",
    "dcn_kind",
    "describe",
    "each_collective",
    "evaluate",
    "flops_of",
    "groups_of",
    "origin",
    "parse_hlo",
    "parse_hlo_sharding",
    "parse_shardy_sharding",
    "read_collectives",
    "read_hlo",
    "read_module",
    "scope_of",
    "split_op_name",
    "uses",
]
