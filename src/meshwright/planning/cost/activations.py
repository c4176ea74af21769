"""Activation memory of one microbatch on one device, summed over the arrays of a layer's ops.

The remat policy determines what a layer saves for backward; these arrays are the ones that XLA saves for the decoder in
`meshwright.execution.models`. The other live buffers are modelled on the memory peaks of compiled steps
(`benchmarks/memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.step.blocks import program
from meshwright.description.step.ir import Array, Block, ForwardOps, Step
from meshwright.description.step.layer import Linear, Lookup
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import is_adapter
from meshwright.description.step.passes.pipeline import EMBEDDING, LOGITS, is_spmd_pipeline
from meshwright.description.step.passes.rematerialize import keeps_read
from meshwright.description.step.rules import RULES, token_axes
from meshwright.description.step.sequence import BLOCK, scores_made
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.token_routing import dropless_padding
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import Workload, num_query_chunks
from meshwright.mesh import MeshShape

LIVE_OF_DELTA = {"delta": 64, "delta_factors": 16, "delta_parts": 12}
"""Bytes live in the backward pass of the gated delta rule for each element of the arrays of its passes, by kind."""


@dataclass(frozen=True)
class Activations:
    """Sizes of one layer's activations on one device, for one microbatch: totals in bytes, single arrays in elements.

    stack: the name of the layer's stack; by default the model's last one.
    """

    workload: Workload
    mesh: MeshShape
    strategy: Strategy = DEFAULT
    stack: str = ""

    @cached_property
    def step(self) -> Step:
        """The train step as ops."""
        return train_step(self.workload, self.mesh, self.strategy)

    @cached_property
    def ops(self) -> ForwardOps:
        """The forward ops of one layer."""
        return self.step.ops.forward[self.stack or program(self.workload.model).stacks[-1].name]

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of one microbatch on one device."""
        return self.workload.tokens // self.mesh.degree(token_axes()) // self.strategy.num_microbatches

    @property
    def kept(self) -> float:
        """Bytes that one layer saves for backward in the memory of one device, per microbatch.

        Without recompute a layer saves the residual stream before each block (attention, MLP) and the block's gathered
        input, if a trained weight reads it; queries, keys and values as attention reads them; attention's output; the
        MLP's gate and up outputs. The policy `matmuls` saves queries, keys and values before the rotary embedding, and
        no gathered inputs.
        """
        stream, heads, profile = self.streams + self.stream, self.queries + self.own_keys_values, self.strategy.profile
        match self.workload.remat:
            case "block":
                elements = self.streams
            case "offload":
                elements = 0.0
            case "matmuls":
                elements = stream + heads + self.gates + self.first_products
            case "alternate":
                # The layer's input; the outputs of its query, value, gate and last MLP matmuls; the output of
                # attention.
                elements = stream + self.queries + self.own_values + self.attention_output + self.mlp_hidden
            case "named":
                sizes = {
                    "query": self.queries,
                    "key": self.own_keys_values - self.own_values,
                    "value": self.own_values,
                    "context": self.attention_output,
                    "output": self.stream,
                    "mlp": self.first_products,
                    "down": self.stream,
                }
                elements = self.stream + sum(sizes[name] for name in profile.saved_values)
            case _:
                inputs = self.stream if profile.saves_shards else self.inputs
                elements = stream + self._num_saved_inputs * inputs + self.queries + self.attention_output
                elements += self.saved_keys_values
                # Of silu(gate) * up, PyTorch saves silu(gate) and the product, of another activation its result.
                elements += self.gates + self.first_products * (2 if profile.saves_results else 1)
        return self.compute_bytes * elements + self._kept_scores

    @property
    def on_host(self) -> float:
        """Bytes of one layer's activations that a device saves in its host's memory for backward, per microbatch."""
        return self.compute_bytes * self.streams if self.workload.remat == "offload" else 0.0

    @property
    def read(self) -> float:
        """Bytes of activations, saved or recomputed, that one layer's backward reads, per device and microbatch."""
        return (
            self.compute_bytes
            * (
                self.streams
                + self.stream
                + 2 * self.inputs
                + self.queries
                + self.attention_output
                + self.read_keys_values
                + self.gates
                + 1.5 * self.first_products
            )
            + 4 * self.scores
        )

    def in_attention(self, *, on_tpu: bool) -> float:
        """Return the bytes per device that are live in the backward pass of attention, besides saved activations.

        For one chunk of queries these are the float32 gradient of the softmax output and, in the compute dtype, the
        gradient of the scores. Except on TPUs, XLA also holds the softmax weights, in float32 and in the compute dtype;
        PyTorch holds one array in the compute dtype at a time. Float32 matmuls need no copies in the compute dtype.

        Also live are queries, keys and values with their gradients; the outputs of the MLP's first matmuls and the
        gradient of its last matmul's input, because their weight gradients are computed later; the residual stream and
        its gradient. All compilers except the TPU's also hold the gathered inputs of both blocks (attention, MLP) and
        the gathered gradients of their outputs.
        """
        copies = (
            (1 if self.strategy.profile.recomputes_whole_blocks else 2) * self.compute_bytes
            if self.compute_bytes < 4
            else 0
        )
        scores = self.scores * (4 + self.compute_bytes if on_tpu else 8 + copies) + self._in_blocks(on_tpu=on_tpu)
        heads = 2 * self.queries + 2 * self.attention_output + 2 * self.read_keys_values
        stream = 3 * self.streams + self.stream + (0.0 if on_tpu else 4 * self.inputs)
        recomputed = 0.0 if self.workload.remat == "matmuls" else self.mlp_hidden
        # The gated delta rule keeps 64 bytes for each element of the values live in its backward pass, between its
        # matmuls: the float32 arrays of the pass over memory (`elementwise.OF_DELTA`), the states of all chunks, and
        # gradients. With sp, 16 bytes for each element of a state's further columns, and three float32 arrays of the
        # size of the gathered states: these, the states before all parts with their gradient, and the states' gradient.
        return (
            scores
            + self.compute_bytes * (stream + heads + 2 * self.gates + recomputed + self.first_products)
            + sum(
                LIVE_OF_DELTA.get(op.kind, 0) * self._size(array) for op in self.ops.elementwise for array in op.arrays
            )
        )

    @property
    def in_mlp(self) -> float:
        """Bytes per device that are live in the backward pass of the MLP, besides saved activations.

        They are the outputs of its first matmuls and their gradients, the gathered input, and the residual stream; for
        experts also their input rows and these rows' gradients.
        """
        return self.compute_bytes * (
            2 * self.first_products
            + self.mlp_hidden
            + 2 * self.inputs
            + 2 * self.routed
            + 3 * self.streams
            + self.stream
        )

    @property
    def kept_by_loops(self) -> float:
        """Bytes that a layer saves beside `kept` if its experts' matmuls run in loops: their inputs."""
        are_saved = self.workload.remat in ("none", "attention") and self.routed > 0
        return self.compute_bytes * (self.routed + self.mlp_hidden) if are_saved else 0.0

    @property
    def in_loops(self) -> float:
        """Bytes that are live beside `in_mlp` if experts' matmuls run in loops, each of which writes to an array.

        They are the gradients of experts' input rows by the gate and by the up matmul, and their sum.
        """
        return self.compute_bytes * 3 * self.routed

    @property
    def logits(self) -> float:
        """Bytes per device that are live in the loss, until the gradient of the logits has been used.

        They are the input of the output head and its gradient, and the float32 logits, over which XLA writes their
        gradient. In a loss that runs op by op, as in PyTorch, there are three float32 arrays in place of the logits:
        the log-softmax, its gradient, and the gradient of the logits; if tp splits the vocabulary also a fourth, the
        exponential (torch/distributed/tensor/parallel/loss.py).
        """
        profile = self.strategy.profile
        arrays = 1 if profile.fused_loss else profile.loss_arrays or (3 if self.mesh.tp == 1 else 4)
        return 4 * arrays * self.logit_elements + 2 * self.compute_bytes * self.inputs

    @cached_property
    def logit_elements(self) -> float:
        """The number of logits of one microbatch on one device."""
        local = self.step.extents.local_dims
        return sum(local((*op.rows, *op.columns)) for op in self.step.ops.forward[LOGITS].matmuls)

    @cached_property
    def table_elements(self) -> float:
        """Elements per device of the token embedding tables, gathered over fsdp."""
        ops = program(self.workload.model).embedding
        # A table with two lookups counts once.
        tables = {op.name: op for op in ops if isinstance(op, Lookup) and not op.is_positional}
        degree = self.mesh.degree(RULES["vocab"]) * (self.mesh.pp if is_spmd_pipeline(self.mesh, self.strategy) else 1)
        return sum(op.rows[1] * op.columns[1] for op in tables.values()) / degree

    @property
    def trains_tables(self) -> bool:
        """Whether an embedding table of tokens is trained."""
        ops = program(self.workload.model).embedding
        tables = (op for op in ops if isinstance(op, Lookup) and not op.is_positional)
        return any(op.name not in self.workload.frozen_paths for op in tables)

    @cached_property
    def _num_saved_inputs(self) -> int:
        """The number of blocks (attention, MLP) whose gathered input is saved, because a trained weight reads it.

        Adapters read the residual stream before it is gathered, after a norm that backward computes again. In PyTorch
        they save what they read.
        """
        trained = (op for op in self.ops.matmuls if op.name not in self.workload.frozen_paths)
        is_pytorch = not self.strategy.profile.spmd_pipeline
        return len({op.block for op in trained if is_pytorch or not is_adapter(op.name)})

    @cached_property
    def lookup_elements(self) -> float:
        """Elements per device of the gathered token embedding tables; 0 if one of them is tied to the output head."""
        return 0.0 if self.workload.model.tied_embeddings else self.table_elements

    @cached_property
    def compute_bytes(self) -> float:
        """Bytes of one element of the compute dtype."""
        return dtype_bytes(self.workload.compute_dtype)

    def _size(self, array: Array) -> float:
        """Return the number of elements of an array on one device."""
        return self.step.extents.local(array)

    @cached_property
    def inputs(self) -> float:
        """Elements of the input of attention or MLP, gathered over tp, per device and microbatch."""
        residual = self._residual
        gathered = tuple(axis for axis in residual.dims[1].axes if axis not in RULES["sequence"])
        return self._size(residual) * self.mesh.degree(gathered)

    @cached_property
    def stream(self) -> float:
        """Elements of the residual stream between attention and MLP, per device and microbatch."""
        return self._size(self._residual)

    @property
    def streams(self) -> float:
        """Elements of all streams that a layer reads, per device and microbatch: of one, or with AltUp of several."""
        model = self.workload.model
        return self.stream * (model.altup.num_streams if isinstance(model, ModelConfig) and model.altup else 1)

    @cached_property
    def _residual(self) -> Array:
        """The array of the residual stream, found as the array of the first op that adds to it."""
        adds = (op.arrays[0] for op in self.ops.elementwise if op.kind == "residual")
        return next(array for array in adds if len(array.dims) == 3)

    @cached_property
    def queries(self) -> float:
        """Elements of a layer's queries, per device and microbatch."""
        return sum(self._size(op.query) for op in self.ops.attention)

    @cached_property
    def attention_output(self) -> float:
        """Elements of attention's output before the output projection, per device and microbatch."""
        return sum(self._size(op.output) for op in self.ops.attention)

    @cached_property
    def gates(self) -> float:
        """Elements per device of attention's output gates; for linear attention also queries, keys and values."""
        return sum(
            self._size(array)
            for op in self.ops.elementwise
            if op.kind == "convolution" or (op.kind == "gated" and op.block is Block.ATTENTION)
            for array in op.arrays
        )

    @property
    def own_keys_values(self) -> float:
        """Elements of a layer's keys and values, per device and microbatch, for the device's own tokens only."""
        return self.saved_keys_values / (self.mesh.degree(RULES["sequence"]) if self._is_gathered else 1)

    @cached_property
    def own_values(self) -> float:
        """Elements of a layer's attention values, per device and microbatch, for the device's own tokens only."""
        gathered = self.mesh.degree(RULES["sequence"]) if self._is_gathered else 1
        return sum(self._size(op.value) for op in self.ops.attention if not op.is_sharing) / gathered

    @cached_property
    def saved_keys_values(self) -> float:
        """Elements of a layer's own keys and values that a device saves for backward, per microbatch.

        If sp splits the sequence, the saved keys and values depend on the method: with `gather` they are those of the
        whole sequence; with `ring` the device's own, because backward sends the others again; with `ulysses` those of
        the whole sequence, for a part of the heads.
        """
        return self.read_keys_values if not any(op.is_sharing for op in self.ops.attention) else 0.0

    @cached_property
    def read_keys_values(self) -> float:
        """Elements of the keys and values that a layer attends to, its own or an earlier layer's, as those it saves."""
        return sum(self._size(op.key) + self._size(op.value) for op in self.ops.attention)

    @cached_property
    def between_layers(self) -> float:
        """Bytes per device of what all layers share, with its gradients, per microbatch.

        They are the layers' own inputs, also before their norm, and keys and values to which several layers attend.
        """
        local, forward = self.step.extents.local_dims, self.step.ops.forward
        before = forward[EMBEDDING].matmuls if EMBEDDING in forward else ()
        names = {op.name for op in program(self.workload.model).layer_inputs if isinstance(op, Linear)}
        inputs = sum(local((*op.rows, *op.columns)) for op in before if op.name in names)
        sharing = (op for ops in forward.values() for op in ops.attention if op.is_sharing)
        return self.compute_bytes * (
            3 * inputs + sum(2 * (self._size(op.key) + self._size(op.value)) for op in sharing)
        )

    @property
    def _expert_padding(self) -> float:
        """Rows that are allocated for experts, divided by the rows that balanced routing fills."""
        return 1.0 if self.strategy.profile.balanced_routing else dropless_padding(self.workload, self.mesh)

    @property
    def _is_gathered(self) -> bool:
        """Whether the keys and values of a split sequence are all-gathered."""
        return self.strategy.attention == "scores" or self.strategy.sp_method == "gather"

    @cached_property
    def mlp_hidden(self) -> float:
        """Elements per device of the input of an MLP's last matmul; for experts, padding included."""
        return sum(size for size, _ in self._gated)

    @cached_property
    def first_products(self) -> float:
        """Elements per device of the outputs of an MLP's first matmuls (gate and up)."""
        return sum(size * count for size, count in self._gated)

    @cached_property
    def _gated(self) -> list[tuple[float, int]]:
        """For each activation function of the MLP: (elements of its result on one device, matmul outputs it reads)."""
        return [
            (self._size(op.arrays[0]) * self._padding(op.arrays[0]), 2 if op.kind == "gated" else 1)
            for op in self.ops.elementwise
            if op.kind in ("gated", "activation") and op.block is Block.MLP
        ]

    def _padding(self, array: Array) -> float:
        """Return the factor by which expert padding enlarges an array; 1 for arrays without expert rows."""
        return self._expert_padding if "R" in array.symbols else 1.0

    @cached_property
    def routed(self) -> float:
        """Elements per device of the rows that its experts receive from all devices, padding included; 0 if dense."""
        local, first = self.step.extents.local_dims, next((op for op in self.ops.matmuls if op.experts), None)
        if first is None:
            return 0.0
        return local((*first.experts, *first.rows, *first.inner)) * self._expert_padding

    @property
    def scores(self) -> float:
        """The number of scores that a device computes for one chunk of queries, over all heads; 0 for fused kernels."""
        if self.strategy.attention != "scores":
            return 0.0
        made = scores_made(self.workload, self.mesh) / num_query_chunks(self.workload.seq_len)
        return made * self._num_queries * self.workload.seq_len

    @cached_property
    def _num_queries(self) -> float:
        """The number of a layer's query vectors on one device, for one microbatch: tokens x heads."""
        return sum(self._size(op.query) / op.qk_dim for op in self.ops.attention)

    def _in_blocks(self, *, on_tpu: bool) -> float:
        """Return the bytes per device that are live in block-wise fused attention; 0 unless attention is `flash`.

        For one block of queries and one of keys they are the float32 scores, their exponentials, and the gradients of
        both; TPU kernels keep them on the chip. In ring attention also the keys and values that arrive, and the float32
        gradients of the local and of the arriving ones.
        """
        strategy, is_split = self.strategy, self.mesh.sp > 1 and self.strategy.sp_method != "ulysses"
        if strategy.attention != "flash":
            return 0.0
        round_ring = (
            (self.compute_bytes + 2 * 4) * self.own_keys_values if is_split and strategy.sp_method == "ring" else 0.0
        )
        if on_tpu:
            return round_ring
        sequences = self.tokens * self.mesh.sp / self.workload.seq_len
        side = min(BLOCK, self.workload.seq_len // (self.mesh.sp if is_split else 1) // 2)
        heads = self._num_queries / self.tokens / (1 if is_split else self.mesh.sp)
        return 4 * 4 * sequences * heads * side**2 + round_ring

    @property
    def _kept_scores(self) -> float:
        """Bytes per device of the attention scores that a layer saves; 0 if backward recomputes them.

        In place of scores, a fused kernel saves the float32 softmax sum of each query (arXiv:2205.14135). With cuDNN's
        kernel, JAX saves the result twice: as returned, and as the next matmul reads it.
        """
        if not keeps_read(self.workload.remat) and self.workload.remat != "alternate":
            return 0.0
        if self.strategy.attention != "scores":
            results = (
                sum(self._size(op.query) for op in self.ops.attention) if self.strategy.attention == "cudnn" else 0
            )
            return 4 * self._num_queries + self.compute_bytes * results
        is_whole = num_query_chunks(self.workload.seq_len) == 1 and self.workload.remat == "none"
        return 4 * self.scores if is_whole else 0.0
