"""LoRA (arXiv:2106.09685): low-rank branches beside a model's matmuls, the only parameters that train.

`with_lora` adds a branch to each targeted matmul. Parameters, forward pass, flops, communication and memory of branches
then follow as for any op.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.description.step.layer import Block, EndOp, LayerOp, Linear, Lookup, LowRank, Program, Stack
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.support.field_types import check_fields

MAX_RANK, MAX_SLOTS = 65_536, 1024

EMBEDDING, UNEMBEDDING = "embedding", "unembedding"
"""Targets outside the layers: the lookup of tokens, and the logits. Each has its own branch, even if tied."""


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters of some matmuls, which then compute W x + alpha / rank * B A x.

    All other parameters are frozen (`step.trained`).
    """

    rank: int
    alpha: float
    # Names of matmuls in layers, as `query` or `down`, and `EMBEDDING` and `UNEMBEDDING`. For PEFT's names see
    # `families.adapters.lora_targets`.
    targets: tuple[str, ...]
    dropout: float = 0.0  # Probability of dropping an element of a branch's input, sampled for each branch.
    # Whether each output also has a trained magnitude (DoRA, arXiv:2402.09353).
    dora: bool = False
    # Number of adapters of this rank that a server holds at once; 0: one adapter, which all tokens use.
    slots: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.rank <= MAX_RANK:
            raise MeshwrightError(f"lora rank is {self.rank}; it is a whole number from 1 to {MAX_RANK:,}, as 16")
        if self.alpha <= 0:
            raise MeshwrightError(f"lora alpha is {self.alpha:g}; it is a number above 0, as 32")
        if not 0 <= self.dropout < 1:
            raise MeshwrightError(f"lora dropout is {self.dropout:g}; it is a share from 0 to below 1, as 0.05")
        if not 0 <= self.slots <= MAX_SLOTS:
            raise MeshwrightError(f"adapter slots are {self.slots}; they are a whole number from 0 to {MAX_SLOTS:,}")
        if self.dora and self.slots:
            raise MeshwrightError(
                "adapters by name are not DoRA here, whose magnitudes depend on the weights; merge it"
            )
        if not self.targets:
            raise MeshwrightError("lora has no targets; name the matmuls that get adapters, as query")

    @property
    def low_rank(self) -> LowRank:
        """The branch that each target gets."""
        return LowRank(
            rank=self.rank,
            scale=self.alpha / self.rank,
            dropout=self.dropout,
            slots=self.slots,
            has_magnitude=self.dora,
        )


def can_adapt(op: LayerOp) -> bool:
    """Whether a matmul of a layer can have a low-rank branch.

    Matmuls of experts, routers, gates of shared experts, and matmuls from or to latents cannot.
    """
    return (
        isinstance(op, Linear)
        and not op.num_experts
        and op.outputs[0][0] not in ("latent", "router")
        and math.prod(size for _, size in op.outputs) > 1
        and op.inputs[0][0] != "latent_input"
    )


def adaptable(program: Program) -> tuple[str, ...]:
    """Return the names of the layers' matmuls that can have a low-rank branch, in order."""
    return tuple(dict.fromkeys(op.name for op in _linears(program) if can_adapt(op)))


def with_lora(program: Program, lora: LoRA) -> Program:
    """Return the program with a low-rank branch beside each target: matmuls, and the lookup of tokens.

    Raises:
        MeshwrightError: a target is in no layer, or cannot have a branch.
    """
    known = (*adaptable(program), EMBEDDING, UNEMBEDDING)
    for target in lora.targets:
        if target not in known:
            raise MeshwrightError(_no_target(target, program, known))
    branch = lora.low_rank

    def adapted(op: LayerOp) -> LayerOp:
        return replace(op, low_rank=branch) if isinstance(op, Linear) and op.name in lora.targets else op

    def of_block(block: Block) -> Block:
        return replace(block, ops=tuple(map(adapted, block.ops)))

    def of_stack(stack: Stack) -> Stack:
        return replace(stack, blocks=tuple(map(of_block, stack.blocks)))

    def of_end(op: EndOp) -> EndOp:
        is_target = (isinstance(op, Lookup) and op.name in lora.targets) or (
            isinstance(op, Linear) and op.branch in lora.targets
        )
        # PEFT has no dropout in a lookup, whose input is a token id.
        own = replace(branch, dropout=0.0) if isinstance(op, Lookup) else branch
        return replace(op, low_rank=own) if is_target else op  # type: ignore[call-arg]

    return replace(
        program,
        embedding=tuple(map(of_end, program.embedding)),
        stacks=tuple(map(of_stack, program.stacks)),
        logits=tuple(map(of_end, program.logits)),
    )


def _no_target(target: str, program: Program, known: tuple[str, ...]) -> str:
    """Return the error text that explains why a target has no adapter."""
    choices = f"targets are {', '.join(known) or 'none in this model'}"
    for op in _linears(program):
        if op.name == target:
            what = (
                "of experts" if op.num_experts
                else "a router" if op.outputs[0][0] == "router"
                else "of latents" if not can_adapt(op) and (op.outputs[0][0] == "latent" or op.inputs[0][0] != "embed")
                else "a gate of one number"
            )  # fmt: skip
            return f"lora target {target!r} is {what}, which has no adapter here; {choices}"
    hint = did_you_mean(map(repr, difflib.get_close_matches(target, known, n=1)))
    return f"lora target {target!r} is not a matmul of the layers; {hint}{choices}"


def _linears(program: Program) -> Iterator[Linear]:
    """Yield every matmul of the layers."""
    for stack in program.stacks:
        yield from (op for op in stack.ops if isinstance(op, Linear))
