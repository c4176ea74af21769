"""Attention on a sequence split over sp: which collectives bring keys to queries, and the order of tokens."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.description.step.blocks import layers
from meshwright.description.step.layer import Attention, GatedDelta
from meshwright.description.step.model import Model
from meshwright.description.step.rules import RULES
from meshwright.description.step.strategy import SequenceMethod, Strategy
from meshwright.description.step.workload import Workload, can_halve_queries
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape, check_divides

HEAD_AXES = (*RULES["kv_heads"], *RULES["sequence"])
"""The mesh axes that split heads during attention with Ulysses."""


BLOCK = 512
"""Largest number of queries, and of keys, in a block of blockwise attention."""


def sequence_method(model: Model, mesh: MeshShape) -> SequenceMethod:
    """Return the method by which fused attention sends fewer bytes: Ulysses if sp > 1 + heads / kv heads, else a ring.

    In the forward pass, with n tokens per device, H heads and K kv heads of h elements, and P = sp, Ulysses exchanges
    queries and outputs of H heads and keys and values of K heads: (2 H + 2 K) n h (P - 1) / P elements per device. A
    ring sends keys and values P - 1 times: 2 K n h (P - 1) elements, as many as a gather. So Ulysses sends less if
    (H + K) / P < K. It requires that sp * tp divides the kv heads (arXiv:2309.14509). In a ring a device holds the keys
    of two devices at most, in a gather those of all devices.

    The rule counts bytes, not time. A ring's sends overlap with its compute and cost nothing if n is large
    (`benchmarks/sequence_methods.py --compile`); Ulysses' exchanges are exposed.
    """
    heads = next(attention_ops(model), None)
    if heads is None:
        return "ring"
    is_less = mesh.sp > 1 + heads.num_heads / heads.num_kv_heads
    return "ulysses" if is_less and heads.num_kv_heads % mesh.degree(HEAD_AXES) == 0 else "ring"


def attention_ops(model: Model) -> Iterator[Attention]:
    """Yield the attention op of each of a model's stacks."""
    return (op for stack in layers(model) for op in stack.ops if isinstance(op, Attention))


def has_attention(model: Model) -> bool:
    """Whether a model has attention; a device with a part of a sequence then needs the positions of its tokens."""
    return any(True for _ in attention_ops(model))


def linear_attention_ops(model: Model) -> Iterator[GatedDelta]:
    """Yield the linear attention of each of a model's stacks that has it."""
    return (op for stack in layers(model) for op in stack.ops if isinstance(op, GatedDelta))


def least_length(model: Model, num_parts: int) -> int:
    """Return the fewest tokens of a sequence that sp can cut into parts; 0 without sp or linear attention.

    Each part has at least as many tokens as the convolutions of linear attention read, so that they read only tokens of
    their part and of the part before it.
    """
    taps = max((op.taps for op in linear_attention_ops(model)), default=0)
    return taps * num_parts if num_parts > 1 else 0


def reads_key_segments(model: Model, method: SequenceMethod) -> bool:
    """Whether layers read the document ids of all tokens of a packed row that sp splits.

    Linear attention does, and attention except in a ring, which sends the ids with the keys.
    """
    return any(True for _ in linear_attention_ops(model)) or (method != "ring" and has_attention(model))


def halves_queries(workload: Workload, mesh: MeshShape) -> bool:
    """Whether attention skips a quarter of the scores (`can_halve_queries`), which requires undivided sequences."""
    return mesh.degree(RULES["sequence"]) == 1 and can_halve_queries(workload.seq_len)


def scores_made(workload: Workload, mesh: MeshShape) -> float:
    """Return the fraction of all query-key pairs whose scores are computed, in attention with scores in memory."""
    return 0.75 if halves_queries(workload, mesh) else 1.0


def visible_pairs(length: float, window: int | None, *, is_chunked: bool) -> float:
    """Return the number of pairs of a query and a key that it attends to, in a sequence of `length` tokens.

    For s tokens and a sliding window of w keys it is s w - w^2 / 2. In chunks it is w^2 / 2 for each chunk of w tokens.

    Args:
        length: tokens of the sequence.
        window: keys that a query attends to at most; None for all before it.
        is_chunked: whether the window is a chunk.
    """
    keys = min(window or length, length)
    if not is_chunked:
        return length * keys - keys * keys / 2
    whole, rest = divmod(length, keys)
    return (whole * keys * keys + rest * rest) / 2


def num_parts(mesh: MeshShape, strategy: Strategy) -> int:
    """Return the number of parts into which sp cuts a sequence: one for each device, or two in zigzag order."""
    return 2 * mesh.sp if is_zigzag(mesh, strategy) else mesh.sp


def is_zigzag(mesh: MeshShape, strategy: Strategy) -> bool:
    """Whether tokens are in zigzag order over sp, which balances causal attention; batches then include positions.

    Fused attention uses this order if keys are gathered or sent round a ring.
    """
    return mesh.sp > 1 and strategy.attention != "scores" and strategy.sp_method != "ulysses"


def check_sequence(model: Model, mesh: MeshShape, strategy: Strategy) -> None:
    """Raise if the strategy's sequence method cannot split a model's sequence over the mesh's sp."""
    if mesh.sp == 1:
        return
    if strategy.attention == "scores" and strategy.sp_method != "gather":
        raise MeshwrightError(
            f"sp_method={strategy.sp_method!r} needs a fused attention: attention='flash'; scores that go through"
            f" memory are made of gathered keys, sp_method='gather'"
        )
    if strategy.attention == "cudnn" and strategy.sp_method != "ulysses":
        raise MeshwrightError(
            f"attention='cudnn' works on whole sequences, sp_method={strategy.sp_method!r} on parts of them over"
            f" sp={mesh.sp}; use sp_method='ulysses', or attention='flash'"
        )
    is_fused_gather = strategy.attention != "scores" and strategy.sp_method == "gather"
    if is_fused_gather and any(op.is_sharing for op in attention_ops(model)):
        raise MeshwrightError(
            f"several layers of {model.name} attend to the same keys, which attention={strategy.attention!r} with"
            f" sp_method='gather' would gather in each; use sp_method='ring' or 'ulysses', or attention='scores'"
        )
    if strategy.sp_method == "ulysses":
        for op in attention_ops(model):
            check_divides("kv_heads", op.num_kv_heads, mesh, HEAD_AXES)
