"""The flops of a train step: those the model needs, and those a device executes, recomputation included.

Only products count, 2 flops for a multiply and an add: norms, rotary embedding, softmax and the optimizer are under a
percent of them at real widths. What the model needs of attention is counted full, not causal. What a device executes of
it has the scores behind the mask too, but for the quarter that halves of a sequence leave out; of an attention that
goes block by block, the blocks that it skips are counted like the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.cost.ticks import all_runs, before_stages, is_lockstep, of_stages, told_runs
from meshwright.mesh import MeshShape
from meshwright.workload import (
    DEFAULT,
    NEVER_RECOMPUTED,
    ModelConfig,
    Parameter,
    Remat,
    Strategy,
    Workload,
    active_share,
    device_blocks,
    dropless_padding,
    leaves,
    num_query_chunks,
    parameters,
    scores_made,
    sent_copies,
    sent_tokens,
    token_axes,
    used_shape,
)


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The flops of one step on one device, by phase."""

    forward: float
    recompute: float
    backward: float

    @property
    def total(self) -> float:
        """All that is executed."""
        return self.forward + self.recompute + self.backward

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(
            forward=self.forward + other.forward,
            recompute=self.recompute + other.recompute,
            backward=self.backward + other.backward,
        )

    def __mul__(self, times: float) -> StepFlops:
        return StepFlops(forward=times * self.forward, recompute=times * self.recompute, backward=times * self.backward)


ALTERNATE = ("key", "output", "up", "expert_up", "shared_up")
"""Every second product of a layer: of queries, keys, values, their output, gate, up and down."""

SCORES_AGAIN: Mapping[Remat, float] = {
    "none": 0.0,
    "attention": 0.5,
    "matmuls": 1.0,
    "block": 1.0,
    "offload": 1.0,
    "alternate": 0.0,
}
"""The share of attention's two products that backward makes again; `attention` keeps what comes of the second."""


def is_recomputed(path: str, remat: Remat, strategy: Strategy = DEFAULT) -> bool:
    """Whether backward makes the product with a weight again."""
    name = path.rpartition(".")[2]
    if strategy.reruns_blocks and remat in ("block", "offload"):
        return "." in path
    if remat == "alternate":
        return "." in path and name in ALTERNATE
    return remat in ("block", "offload") and name not in NEVER_RECOMPUTED


def model_flops(workload: Workload) -> float:
    """The flops that a step of the model needs over all devices, nothing recomputed: what MFU counts.

    6 for each weight that multiplies and each token, and 12 layers x heads x head_dim x seq_len a token for attention
    scores (PaLM, arXiv:2204.02311, appendix B).
    """
    weights = sum(size for _, size in _weights(workload.model, MeshShape()))
    return 3 * workload.tokens * (2 * weights + _score_flops(workload))


def step_flops(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> StepFlops:
    """The flops that one device executes in a step; over pp, the mean of its stages.

    Stages in lockstep go through their layers in the ticks of the bubble too, and through plain layers before those of
    experts; GPipe's make the logits again.
    """
    logits = _logits(workload, mesh, strategy)
    again = logits if is_lockstep(mesh, strategy) and strategy.schedule == "gpipe" else 0.0
    ends = StepFlops(forward=logits, recompute=again, backward=2 * logits)
    return _over_layers(_layers, workload, mesh, strategy) + ends


def _over_layers(
    part: Callable[[Workload, MeshShape, Strategy], StepFlops], workload: Workload, mesh: MeshShape, strategy: Strategy
) -> StepFlops:
    """What a part of layers takes, in those that stages share out and in those before them."""
    found = part(of_stages(workload, mesh, strategy), mesh, strategy)
    if before := before_stages(workload, mesh, strategy):
        runs = all_runs(before.workload.model.num_layers, mesh, strategy)
        found += part(*before) * (runs.first / strategy.num_microbatches)
    return found


def _layers(workload: Workload, mesh: MeshShape, strategy: Strategy) -> StepFlops:
    """The flops of layers that run alike."""
    in_ticks, attention = _ticks_factor(workload.model, mesh, strategy), _attention(workload, mesh, strategy)
    products = {path: in_ticks * flops for path, flops in _products(workload, mesh, strategy).items() if "." in path}
    again = sum(flops for path, flops in products.items() if is_recomputed(path, workload.remat, strategy))
    forward = sum(products.values())
    return attention + StepFlops(forward=forward, recompute=again, backward=2 * forward)


def _logits(workload: Workload, mesh: MeshShape, strategy: Strategy) -> float:
    """The flops of the logits, forward."""
    return sum(flops for path, flops in _products(workload, mesh, strategy).items() if "." not in path)


def attention_flops(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> StepFlops:
    """The flops of attention among those of `step_flops`.

    A fused one makes its scores again in backward, always: five products for the two forward (arXiv:2307.08691,
    section 4.1).
    """
    return _over_layers(_attention, workload, mesh, strategy)


def _attention(workload: Workload, mesh: MeshShape, strategy: Strategy) -> StepFlops:
    """The flops of attention in layers that run alike."""
    tokens, in_ticks = workload.tokens / mesh.degree(token_axes()), _ticks_factor(workload.model, mesh, strategy)
    scores = in_ticks * tokens * _score_flops(workload) / (mesh.tp * mesh.pp)
    share = SCORES_AGAIN[workload.remat]
    if strategy.attention != "scores":
        return StepFlops(forward=scores, recompute=0 if share < 1 else scores, backward=2.5 * scores)
    scores *= scores_made(workload, mesh)
    # Each chunk makes its scores, half of attention's products, once more.
    chunked = 0.5 if num_query_chunks(workload.seq_len) > 1 and workload.remat != "attention" else 0.0
    return StepFlops(forward=scores, recompute=scores * (share + chunked), backward=2 * scores)


def _ticks_factor(model: ModelConfig, mesh: MeshShape, strategy: Strategy) -> float:
    """How often the layers of a device run beside once for each microbatch and layer of the mean stage."""
    if not is_lockstep(mesh, strategy):
        return 1.0
    runs = all_runs(model.num_layers, mesh, strategy).layers
    return runs * mesh.pp / (strategy.num_microbatches * model.num_layers)


def room_flops(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT, *, has_ragged: bool) -> float:
    """The flops that the program of a step says it does beyond its plan, as experts without a capacity make them.

    Each of their products is one of all the rows that there is room for, of which those that no routing filled are left
    out as it runs; in blocks (`workload.expert_blocks`) of all that some routing needs. So are the gradients of weights
    everywhere. has_ragged: whether the compiler has a product whose rows are each of one expert, which the others are.
    """
    experts = workload.model.experts
    if experts is None or experts.capacity_factor is not None:
        return 0.0
    workload = of_stages(workload, mesh, strategy)
    room, padding = dropless_padding(workload, mesh), device_blocks(workload, mesh, strategy).padding
    more = 0.0
    for path, flops in _products(workload, mesh, strategy).items():
        if _is_of_experts(path):
            of_rows = 2 + is_recomputed(path, workload.remat, strategy)
            more += flops * (of_rows * (room * (1 if has_ragged else padding) - 1) + room * padding - 1)
    return _ticks_factor(workload.model, mesh, strategy) * more


def branch_flops(workload: Workload, mesh: MeshShape, strategy: Strategy) -> float:
    """The flops that the text of a program says beyond a step's, of what few ticks make (`told_runs`).

    That is the logits, and what all stages run before their layers.
    """
    runs, told = (counted(workload.model.num_layers, mesh, strategy) for counted in (all_runs, told_runs))
    passes, before = 3 + (strategy.schedule == "gpipe"), before_stages(workload, mesh, strategy)
    ahead = _layers(*before).total / strategy.num_microbatches if before else 0.0
    logits = passes * (told.last / runs.last - 1) * _logits(workload, mesh, strategy)
    return logits + (told.first - runs.first) * ahead


def _products(workload: Workload, mesh: MeshShape, strategy: Strategy) -> dict[str, float]:
    """The flops of each product with a weight on one device, forward; over pp, the mean of its stages.

    An unused embedding table has no product; each device multiplies by its own part of a weight.
    """
    tokens = workload.tokens / mesh.degree(token_axes())
    return {
        path: 2 * tokens * size * _rows_a_token(path, workload, mesh, strategy) / mesh.pp
        for path, size in _weights(workload.model, mesh)
    }


def _is_of_experts(path: str) -> bool:
    """Whether a weight is that of experts that few tokens come to."""
    return path.rpartition(".")[2].startswith("expert_")


def _weights(model: ModelConfig, mesh: MeshShape) -> list[tuple[str, float]]:
    """Each weight that multiplies activations, and the elements of it that one device multiplies a token by."""
    return [
        (
            path,
            math.prod(used_shape(parameter, mesh, path))
            * active_share(parameter, model)
            * _experts_degree(parameter, mesh),
        )
        for path, parameter in leaves(parameters(model))
        if parameter.role == "product"
    ]


def _rows_a_token(path: str, workload: Workload, mesh: MeshShape, strategy: Strategy) -> float:
    """The rows that a product has for each token that the model multiplies by its weight: 1 but for a few.

    A router multiplies the stream as it is split between blocks, experts with a capacity whatever is in their slots.
    """
    experts = workload.model.experts
    if path.rpartition(".")[2] == "router":
        return 1 / mesh.tp if strategy.sequence_parallel else 1.0
    if experts is None or not _is_of_experts(path):
        return 1.0
    return sent_copies(workload, mesh) / (sent_tokens(workload, mesh) * experts.num_active)


def _experts_degree(parameter: Parameter, mesh: MeshShape) -> int:
    """The devices whose tokens come to the experts of one."""
    return mesh.ep if "expert" in parameter.axes else 1


def _score_flops(workload: Workload) -> float:
    """The flops of attention scores and their product with the values, a token, forward, over all layers."""
    model = workload.model
    return 2 * model.num_layers * model.num_heads * (model.query_key_dim + model.value_dim) * workload.seq_len
