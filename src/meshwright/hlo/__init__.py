"""HLO text as data: instructions, loops, dataflow, collectives by mesh axis, flops."""

from meshwright.hlo.between_slices import collectives_between_slices
from meshwright.hlo.collectives import each_collective, groups_of, read_collectives
from meshwright.hlo.dataflow import VIEWS, origin, uses
from meshwright.hlo.evaluation import evaluate
from meshwright.hlo.flops import count_flops, flops_of
from meshwright.hlo.groups import axes_of_groups
from meshwright.hlo.loops import Runs, count_runs
from meshwright.hlo.module import CALL_KEYS, Instruction, Module, contradictions
from meshwright.hlo.parser import parse_hlo
from meshwright.hlo.phases import Description, describe, scope_of, split_op_name
from meshwright.hlo.records import read_hlo, read_module
from meshwright.hlo.respelled import PADDED, PROMOTED, SLICED, SLICED_IN_PART, UNREAD, meant
from meshwright.hlo.shapes import Shape
from meshwright.hlo.specs import Spec, spec_by_axes, spec_by_devices
from meshwright.hlo.tally import Tally

__all__ = [
    "CALL_KEYS",
    "PADDED",
    "PROMOTED",
    "SLICED",
    "SLICED_IN_PART",
    "UNREAD",
    "VIEWS",
    "Description",
    "Instruction",
    "Module",
    "Runs",
    "Shape",
    "Spec",
    "Tally",
    "axes_of_groups",
    "collectives_between_slices",
    "contradictions",
    "count_flops",
    "count_runs",
    "describe",
    "each_collective",
    "evaluate",
    "flops_of",
    "groups_of",
    "meant",
    "origin",
    "parse_hlo",
    "read_collectives",
    "read_hlo",
    "read_module",
    "scope_of",
    "spec_by_axes",
    "spec_by_devices",
    "split_op_name",
    "uses",
]
