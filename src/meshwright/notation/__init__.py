"""The sharding algebra: parse sharded products, check them, infer the collectives they need. Imports no JAX."""

from meshwright.notation.array import ShardedArray
from meshwright.notation.array_parser import parse_array
from meshwright.notation.expression import Chain, Product, Stage
from meshwright.notation.inference import Inference, infer
from meshwright.notation.legality import Sizes, check
from meshwright.notation.parser import parse, parse_numbers
from meshwright.notation.steps import Communicate, Implementation, Multiply, Slice, Step

__all__ = [
    "Chain",
    "Communicate",
    "Implementation",
    "Inference",
    "Multiply",
    "Product",
    "ShardedArray",
    "Sizes",
    "Slice",
    "Stage",
    "Step",
    "check",
    "infer",
    "parse",
    "parse_array",
    "parse_numbers",
]
