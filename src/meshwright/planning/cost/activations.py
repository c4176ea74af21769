"""Fold over a step: activations of one microbatch on one device, from the arrays of a layer's ops.

What a layer saves for backward follows from the remat policy and equals what XLA saves of the decoder in
`meshwright.execution.models`. The other live buffers were read from compiled steps at their peak
(`benchmarks/memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.step.blocks import program
from meshwright.description.step.ir import Array, ForwardOps, Step
from meshwright.description.step.layer import Lookup
from meshwright.description.step.passes.pipeline import LOGITS, is_spmd_pipeline
from meshwright.description.step.passes.rematerialize import keeps_read
from meshwright.description.step.rules import RULES, token_axes
from meshwright.description.step.sequence import BLOCK, scores_made
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.token_routing import dropless_padding
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import Workload, num_query_chunks
from meshwright.mesh import MeshShape


@dataclass(frozen=True)
class Activations:
    """Bytes of each kind of activation in a layer of `stack`; widths are in elements of the compute dtype.

    stack: its name; the model's last stack by default.
    """

    workload: Workload
    mesh: MeshShape
    strategy: Strategy = DEFAULT
    stack: str = ""

    @cached_property
    def step(self) -> Step:
        """The step."""
        return train_step(self.workload, self.mesh, self.strategy)

    @cached_property
    def ops(self) -> ForwardOps:
        """The ops of one layer, forward."""
        return self.step.ops.forward[self.stack or program(self.workload.model).stacks[-1].name]

    @cached_property
    def tokens(self) -> int:
        """The tokens of one microbatch on one device."""
        return self.workload.tokens // self.mesh.degree(token_axes()) // self.strategy.num_microbatches

    @property
    def kept(self) -> float:
        """Bytes that one layer saves for backward in device memory.

        The residual stream before both blocks; the gathered inputs of both; queries, keys and values as attention reads
        them, and its output; gate and up. `matmuls` saves queries, keys and values before rotation, and no gathered
        inputs.
        """
        stream, heads = 2 * self.stream, self.queries + self.keys
        match self.workload.remat:
            case "block":
                elements = self.stream
            case "offload":
                elements = 0.0
            case "matmuls":
                elements = stream + heads + self.first_products
            case "alternate":
                # Its input; of its products queries, values, gate and the mlp's last one; what attention mixes.
                elements = stream + self.queries + self.values + self.mixed + self.width
            case _:
                elements = stream + 2 * self.inputs + self.queries + self.mixed + self.seen + self.first_products
        return self.narrow * elements + self._kept_scores

    @property
    def on_host(self) -> float:
        """The bytes that one layer keeps for backward in the host's memory."""
        return self.narrow * self.stream if self.workload.remat == "offload" else 0.0

    @property
    def read(self) -> float:
        """The bytes that one layer's backward reads of activations, kept or recomputed."""
        return (
            self.narrow
            * (2 * self.stream + 2 * self.inputs + self.queries + self.mixed + self.seen + 1.5 * self.first_products)
            + 4 * self.scores
        )

    def in_attention(self, *, on_tpu: bool) -> float:
        """Bytes live in the backward pass of attention, besides saved activations.

        For one chunk of queries: the float32 gradient of the softmax output and the narrow gradient of the scores. TPUs
        compute the latter without writing the weights; elsewhere XLA also has the weights in float32 and in the narrow
        dtype (PyTorch one narrow array at a time); float32 products need no narrow copies. Queries, keys and values
        with their gradients; the MLP's first products and the gradient of its last product's input, whose weight
        gradients come later; the stream and its gradient. All compilers except the TPU's also hold the gathered inputs
        of both blocks and their gathered output gradients.
        """
        copies = (1 if self.strategy.profile.recomputes_whole_blocks else 2) * self.narrow if self.narrow < 4 else 0
        scores = self.scores * (4 + self.narrow if on_tpu else 8 + copies) + self._in_blocks(on_tpu=on_tpu)
        heads = 2 * self.queries + 2 * self.mixed + 2 * self.seen
        stream = 4 * self.stream + (0.0 if on_tpu else 4 * self.inputs)
        recomputed = 0.0 if self.workload.remat == "matmuls" else self.width
        return scores + self.narrow * (stream + heads + recomputed + self.first_products)

    @property
    def in_mlp(self) -> float:
        """Bytes live in the backward pass of the MLP, besides saved activations.

        First products and their gradients, input, and stream; for experts, the rows that they process and the gradients
        of these.
        """
        return self.narrow * (
            2 * self.first_products + self.width + 2 * self.inputs + 2 * self.routed + 4 * self.stream
        )

    @property
    def logits(self) -> float:
        """Bytes of the logits and of the loss until their gradient has been used.

        The float32 logits once, because XLA writes their gradient over them; the input of the product and its gradient.
        Op by op there are three float32 arrays: the log-softmax, its gradient, and the gradient of the logits; and a
        fourth, the exponential, if tp splits the vocabulary (torch/distributed/tensor/parallel/loss.py).
        """
        arrays = 1 if self.strategy.profile.fused_loss else 3 if self.mesh.tp == 1 else 4
        return 4 * arrays * self.logit_elements + 2 * self.narrow * self.inputs

    @cached_property
    def logit_elements(self) -> float:
        """The logits of one device."""
        local = self.step.extents.local_dims
        return sum(local((*op.rows, *op.columns)) for op in self.step.ops.forward[LOGITS].matmuls)

    @cached_property
    def table_elements(self) -> float:
        """Elements of the embedding tables in use on one device."""
        ops = program(self.workload.model).embedding
        # A table that is looked up in twice is one.
        tables = {op.name: op for op in ops if isinstance(op, Lookup) and not op.is_positional}
        degree = self.mesh.degree(RULES["vocab"]) * (self.mesh.pp if is_spmd_pipeline(self.mesh, self.strategy) else 1)
        return sum(op.rows[1] * op.columns[1] for op in tables.values()) / degree

    @property
    def trains_tables(self) -> bool:
        """Whether a table that tokens are looked up in has a gradient."""
        ops = program(self.workload.model).embedding
        tables = (op for op in ops if isinstance(op, Lookup) and not op.is_positional)
        return any(op.name not in self.workload.frozen_paths for op in tables)

    @cached_property
    def lookup_elements(self) -> float:
        """Elements of the tables that are not also the output head."""
        return 0.0 if self.workload.model.tied_embeddings else self.table_elements

    @cached_property
    def narrow(self) -> float:
        """Bytes of an element in the compute dtype."""
        return dtype_bytes(self.workload.compute_dtype)

    def _size(self, array: Array) -> float:
        """The elements of an array on one device."""
        return self.step.extents.local(array)

    @cached_property
    def inputs(self) -> float:
        """A block's gathered input."""
        residual = self._residual
        gathered = tuple(axis for axis in residual.dims[1].axes if axis not in RULES["sequence"])
        return self._size(residual) * self.mesh.degree(gathered)

    @cached_property
    def stream(self) -> float:
        """The residual stream between blocks."""
        return self._size(self._residual)

    @cached_property
    def _residual(self) -> Array:
        """Elements of the residual stream in the ops that add to it."""
        return next(op.arrays[0] for op in self.ops.elementwise if op.kind == "residual")

    @cached_property
    def queries(self) -> float:
        """The queries."""
        return sum(self._size(op.query) for op in self.ops.attention)

    @cached_property
    def mixed(self) -> float:
        """Elements of the output of attention, before its projection."""
        return sum(self._size(op.output) for op in self.ops.attention)

    @property
    def keys(self) -> float:
        """The keys and values of the device's own tokens."""
        return self.seen / (self.mesh.degree(RULES["sequence"]) if self._is_gathered else 1)

    @cached_property
    def values(self) -> float:
        """The values of the device's own tokens."""
        gathered = self.mesh.degree(RULES["sequence"]) if self._is_gathered else 1
        return sum(self._size(op.value) for op in self.ops.attention) / gathered

    @cached_property
    def seen(self) -> float:
        """Elements of keys and values saved for the queries of a device.

        Gathered: those of the whole sequence. Ring: the device's own, since backward sends the others again. Ulysses:
        those of all tokens, for fewer heads.
        """
        return sum(self._size(op.key) + self._size(op.value) for op in self.ops.attention)

    @property
    def _is_gathered(self) -> bool:
        """Whether keys and values of a split sequence are gathered."""
        return self.strategy.attention == "scores" or self.strategy.sp_method == "gather"

    @cached_property
    def width(self) -> float:
        """Elements of the input of an MLP's last product; for experts including padding."""
        return sum(size for size, _ in self._gated)

    @cached_property
    def first_products(self) -> float:
        """Elements of the outputs of an MLP's first products."""
        return sum(size * count for size, count in self._gated)

    @cached_property
    def _gated(self) -> list[tuple[float, int]]:
        """The elements of each activation function's result, and how many products it reads."""
        return [
            (self._size(op.arrays[0]) * self._padding(op.arrays[0]), 2 if op.kind == "gated" else 1)
            for op in self.ops.elementwise
            if op.kind in ("gated", "activation")
        ]

    def _padding(self, array: Array) -> float:
        """Capacity of an array of expert rows relative to balanced routing; 1 for other arrays."""
        return dropless_padding(self.workload, self.mesh) if "R" in array.symbols else 1.0

    @cached_property
    def routed(self) -> float:
        """The rows that experts of a device work on, of whichever device their tokens are."""
        local, first = self.step.extents.local_dims, next((op for op in self.ops.matmuls if op.experts), None)
        if first is None:
            return 0.0
        return local((*first.experts, *first.rows, *first.inner)) * dropless_padding(self.workload, self.mesh)

    @property
    def scores(self) -> float:
        """Elements of the attention scores of one chunk of queries, or of both halves; 0 for fused kernels."""
        if self.strategy.attention != "scores":
            return 0.0
        made = scores_made(self.workload, self.mesh) / num_query_chunks(self.workload.seq_len)
        return made * self._heads * self.workload.seq_len

    @cached_property
    def _heads(self) -> float:
        """The heads of all queries on one device: tokens x heads."""
        return sum(self._size(op.query) / op.qk_dim for op in self.ops.attention)

    def _in_blocks(self, *, on_tpu: bool) -> float:
        """Bytes live in a fused attention that goes block by block; TPU kernels keep the blocks on the chip.

        For one block of queries and one of keys: float32 scores, exponentials, and the gradients of both. In a ring
        also the arriving keys and values, and the float32 gradients of the local and the arriving ones.
        """
        strategy, is_split = self.strategy, self.mesh.sp > 1 and self.strategy.sp_method != "ulysses"
        if strategy.attention != "flash":
            return 0.0
        round_ring = (self.narrow + 2 * 4) * self.keys if is_split and strategy.sp_method == "ring" else 0.0
        if on_tpu:
            return round_ring
        sequences = self.tokens * self.mesh.sp / self.workload.seq_len
        side = min(BLOCK, self.workload.seq_len // (self.mesh.sp if is_split else 1) // 2)
        heads = self._heads / self.tokens / (1 if is_split else self.mesh.sp)
        return 4 * 4 * sequences * heads * side**2 + round_ring

    @property
    def _kept_scores(self) -> float:
        """Bytes of saved scores: all if they are computed at once; chunks are recomputed.

        A fused kernel saves the float32 softmax sum of each query (arXiv:2205.14135).
        """
        if not keeps_read(self.workload.remat) and self.workload.remat != "alternate":
            return 0.0
        if self.strategy.attention != "scores":
            return 4 * self._heads
        is_whole = num_query_chunks(self.workload.seq_len) == 1 and self.workload.remat == "none"
        return 4 * self.scores if is_whole else 0.0
