"""The sharding algebra: what can be written, whether it is legal, and what it takes to compute it. No JAX."""

from meshwright.notation.array import ShardedArray
from meshwright.notation.cases import AxisCase
from meshwright.notation.expression import Chain, Expression, Product, Stage
from meshwright.notation.infer import Inference, infer
from meshwright.notation.legality import Sizes, check
from meshwright.notation.parse import parse, parse_numbers
from meshwright.notation.parse_array import parse_array
from meshwright.notation.steps import Communicate, Multiply, Slice, Step, Way

__all__ = [
    "AxisCase",
    "Chain",
    "Communicate",
    "Expression",
    "Inference",
    "Multiply",
    "Product",
    "ShardedArray",
    "Sizes",
    "Slice",
    "Stage",
    "Step",
    "Way",
    "check",
    "infer",
    "parse",
    "parse_array",
    "parse_numbers",
]
