"""Every product of a train step in the notation, and every move of what several products share.

`X[B_dp, S, D] @ Wquery[D_fsdp, K_tp, G, H] -> query[B_dp, S, K_tp, G, H]`: operands as the rules store them, the result
as they want it; the collectives are those that the notation infers on the way between. What is chosen is in which
layout each product is multiplied, that of `meshwright train`: weights gathered, activations split as they lie.

Letters: B batch, S sequence, T sequence of keys, D stream, K kv heads, G query heads a kv head, H head dim, F mlp,
V vocab, E experts, C tokens of an expert, L and R latents, P positions; d before a name is its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from meshwright.mesh import MeshShape
from meshwright.notation import Chain, Communicate, Inference, Product, ShardedArray, Sizes, infer
from meshwright.record import Collective, Phase

OpPhase = Literal["forward", "recompute", "backward"]


@dataclass(frozen=True, kw_only=True)
class Op:
    """One product of a step, or one move of an array.

    used: the operands as they are multiplied; none of a move. count: how often it runs in a step of the whole model, in
    each of its layers where `is_in_layers`. has_mask: of attention's scores, half of which a causal mask hides; those
    that are computed without a fused kernel are counted.
    """

    name: str
    phase: OpPhase
    expression: Product | Chain
    sizes: Sizes
    used: tuple[ShardedArray, ...] = ()
    count: int = 1
    is_in_layers: bool = True
    has_mask: bool = False

    @cached_property
    def inference(self) -> Inference:
        """What the notation makes of it, with the one way that multiplies the operands as `used` has them.

        Of several the one that sends least: a reduce-scatter and not an all-reduce and a slice.
        """
        found = infer(self.expression, self.sizes)
        ways = found.ways
        if self.used:
            ways = tuple(way for way in ways if way.products[0].operands == self.used)
        assert ways, f"{self.expression} has no way through {' @ '.join(map(str, self.used))}"
        return replace(found, ways=ways[:1], written=ways[0])

    @property
    def flops(self) -> int:
        """The flops of one device each time it runs."""
        return self.inference.way.flops

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of one time that it runs; a weight gathered in backward is so for the second time."""
        return tuple(
            replace(move, phase=_phase(self, step))
            for move, step in zip(self.inference.way.collectives, self.inference.way.communications, strict=True)
        )


def flops_by_phase(ops: Iterable[Op], mesh: MeshShape) -> dict[OpPhase, float]:
    """The flops that one device executes in a step, by phase; over pp, the mean of its stages."""
    sums: dict[OpPhase, float] = {"forward": 0.0, "recompute": 0.0, "backward": 0.0}
    for op in ops:
        sums[op.phase] += op.flops * op.count / mesh.pp
    return sums


def ops_collectives(ops: Iterable[Op], mesh: MeshShape) -> tuple[Collective, ...]:
    """The collectives of a step that its products need, of a pipeline those of the stage with most layers."""
    return tuple(
        replace(move, bytes=move.bytes * count, count=count)
        for op in ops
        for count in (math.ceil(op.count / mesh.pp) if op.is_in_layers else op.count,)
        for move in op.collectives
    )


def _phase(op: Op, step: Communicate) -> Phase:
    """The phase of a collective of an op."""
    is_again = op.phase == "backward" and step.kind == "all-gather" and step.operand.name.startswith("W")
    return "recompute" if is_again else op.phase
