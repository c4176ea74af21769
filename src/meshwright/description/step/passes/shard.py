"""Shard pass: assign mesh axes to the dims of every value in a layer, by the sharding rules.

Each op of the layer becomes a `Node`: the values that it reads and writes, and its work on sharded arrays. A change of
sharding becomes a `Move`, whose collectives `notation.reshard` derives.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import lru_cache

from meshwright.description.step.ir import Array, Block, Dim, Pass, Region, Width, axes_of
from meshwright.description.step.layer import (
    LINEAR_HEADS,
    STREAM,
    Add,
    Attention,
    Combine,
    Concat,
    Dispatch,
    Gated,
    GatedDelta,
    Linear,
    LowRank,
    Mix,
    Norm,
    Rotary,
    SigmoidGate,
    Slice,
    Stack,
    vector_dims,
)
from meshwright.description.step.layer import Block as LayerBlock
from meshwright.description.step.layer_inputs import ALTUP_ACTIVE, LAYER_INPUT, STREAMS
from meshwright.description.step.parameter_tree import (
    ALTUP_SCALE,
    DECAY_BIAS,
    DECAY_LOG,
    LORA_A,
    LORA_B,
    LORA_M,
    RANK,
    SINKS,
)
from meshwright.description.step.passes.nodes import (
    IMBALANCE,
    Core,
    Exchange,
    Layout,
    Move,
    Node,
    PassOver,
    Phases,
    Product,
    Tag,
    Vector,
    Work,
    from_outside,
    outermost_first,
    weight_of,
)
from meshwright.description.step.passes.shard_attention import ring, whole_sequences
from meshwright.description.step.passes.shard_delta import delta_work
from meshwright.description.step.passes.shard_experts import combine_moves, dispatch_moves, routing_of_tokens, scale_sum
from meshwright.description.step.passes.shard_low_rank import column_norms, factor


@lru_cache(maxsize=1 << 10)
def shard_stack(stack: Stack, layout: Layout) -> tuple[Node, ...]:
    """Return the nodes of one layer of a stack."""
    region = Region(stack.name)
    nodes: list[Node] = []
    for block in stack.blocks:
        nodes.extend(_BlockSharder(block, stack.name, region, layout).nodes())
    return tuple(nodes)


_Layouts = dict[str, Array]


class _BlockSharder:
    """Builder of the nodes of one block, which tracks the layouts of its values op by op."""

    def __init__(self, block: LayerBlock, stack: str, region: Region, layout: Layout) -> None:
        self.ops, self.name, self.stack, self.region, self.layout = block.ops, block.name, stack, region, layout
        self.block = Block.MLP if block.name in ("mlp", LAYER_INPUT) else Block.ATTENTION
        self.num_additions = block.num_additions
        self.arrays: _Layouts = from_outside(block.ops, layout)
        self.entries: dict[str, str] = {}
        self.parts: set[str] = set()
        self.branches: dict[str, str] = {}

    def nodes(self) -> Iterator[Node]:
        """Yield a node for each op of the block, and for each reshard between ops."""
        for op in self.ops:
            is_second = isinstance(op, Norm) and op.source == STREAM
            is_of_mlp = self.name == "block" and isinstance(op, Linear) and _is_of_mlp(op)
            if (is_second and op is not self.ops[0]) or is_of_mlp:
                # The MLP of a block in parallel with attention starts here, with its norm, or if both share a norm with
                # its first matmul.
                self.block = Block.MLP
            match op:
                case Norm():
                    yield from self._norm(op)
                case Linear():
                    yield from self._linear(op)
                case Rotary():
                    yield from self._rotary(op)
                case Attention():
                    yield from self._attention(op)
                case GatedDelta():
                    yield from self._gated_delta(op)
                case Gated():
                    yield from self._gated(op)
                case Dispatch():
                    yield from self._dispatch(op)
                case Combine():
                    yield from self._combine(op)
                case SigmoidGate():
                    yield from self._sigmoid_gate(op)
                case Add():
                    yield from self._add(op)
                case Slice():
                    source = self.arrays[op.source]
                    self.arrays[op.target] = _resized(source, op.target, op.size)
                    self.parts.add(op.target)
                    yield self._node(reads=(op.source,), writes=op.target)
                case Concat():
                    yield from self._concat(op)
                case Mix():
                    yield from self._mix(op)

    def _node(self, *work: Work, reads: tuple[str, ...] = (), writes: str = "", saved: tuple[str, ...] = (),
              tag: Tag = Tag.OTHER) -> Node:  # fmt: skip
        """Return a node of this block."""
        return Node(region=self.region, block=self.block, work=work, reads=reads, writes=writes, saved=saved, tag=tag)

    def _array(self, name: str) -> Array:
        """Return the sharded array of a value; that of the residual stream if no op has written it yet."""
        if name == STREAM and name not in self.arrays:
            return self._stream(STREAM)
        return self.arrays[name]

    def _stream(self, name: str) -> Array:
        """Return the array `name` with the sharding of the residual stream between blocks."""
        return Array(name, (*self.layout.residual_tokens, Dim("D", self._embed())))

    def _embed(self) -> int:
        """Return the width of the stream, from the block's first norm or matmul."""
        first = next(op for op in self.ops if isinstance(op, Norm | Linear))
        return first.size if isinstance(first, Norm) else first.fan_in

    def _norm(self, op: Norm) -> Iterator[Node]:
        """Yield the nodes of a norm over the last dim. Partial sums of its input are added first."""
        if op.source != STREAM:
            yield from self._summed((op.source,), op.source)
        source = self._array(op.source)
        self.arrays[op.target] = replace(source, name=op.target)
        kind: Pass = "layer_norm" if op.kind == "layer" else "norm"
        dims = op.dims or (("norm", op.size),)
        work: list[Work] = [PassOver(kind=kind, arrays=(source,))]
        if op.has_scale:
            work.append(self._vector(op.name, dims, source))
        if op.has_bias:
            work.append(self._vector(f"{op.name}_bias", dims, source))
        if axes := axes_of(self.layout.used(op.dims)):
            squares = Array("squares", source.dims[:2], width="float32")
            phases: Phases = ("forward", "recompute", "backward")
            work.append(Exchange(name=f"{op.name} squares", kind="all-reduce", axes=axes, array=squares, phases=phases))
        yield self._node(*work, reads=(op.source,), writes=op.target, saved=(op.source,))

    def _vector(self, name: str, dims: tuple[tuple[str, int], ...], value: Array, width: Width = "float32") -> Vector:
        """Return a parameter that is added to or multiplied with `value`.

        Its gradient is summed over the axes that split the tokens, in the dtype `width`: float32 for norms, the
        operand's for a bias.
        """
        used = self.layout.used(dims)
        split = {axis for dim in used for axis in dim.axes}
        batch, *others = (outermost_first(axis for axis in dim.axes if axis not in split) for dim in value.dims)
        array, path = Array(name, used, width=width), f"{self.stack}.{name}"
        return Vector(name=path, array=array, pending=(*others, batch), is_trained=path not in self.layout.frozen)

    def _linear(self, op: Linear) -> Iterator[Node]:
        """Yield the nodes of a matmul with a weight. Its input is gathered over the tokens first (`_entry`)."""
        if op.low_rank and op.low_rank.has_magnitude:
            yield from self._with_magnitude(op, op.low_rank)
            return
        inner, columns = self.layout.used(op.inputs), self.layout.used(op.outputs)
        lead = self._rows(op)
        source = op.source
        if not op.num_experts and not op.is_on_residual:
            source = yield from self._entry(op)
        dims = (*((("expert", op.num_experts),) if op.num_experts else ()), *op.inputs, *op.outputs)
        if not op.num_experts:
            tokens = outermost_first(axes_of(lead))
        else:
            experts = self.layout.axes("expert")
            tokens = outermost_first(axis for dim in self.layout.tokens for axis in dim.axes if axis not in experts)
        path = f"{self.stack}.{op.name}"
        weight = weight_of(path, dims, tokens, self.layout)
        partial = axes_of(inner)
        experts = weight.used.dims[:1] if op.num_experts else ()
        self.arrays[op.target] = Array(op.target, (*experts, *lead, *columns), partial)
        product = Product(
            name=path,
            rows=lead,
            inner=inner,
            columns=columns,
            experts=experts,
            is_summed=columns[-1].letter == "D" and not op.is_on_residual,
            is_rounded=op.is_rounded,
            is_ring=self.layout.collective_matmul and not op.num_experts and not op.is_on_residual,
            source=op.source,
            weight=weight,
        )
        work: list[Work] = [weight, product]
        if op.has_bias and op.num_experts:
            # If the result is a partial sum over tp, one tp device adds the bias; the others' gradients of it are zero.
            summed = outermost_first({*tokens, *partial})
            array, bias = Array(op.name, self.layout.used(op.bias_dims)), f"{path}_bias"
            is_trained = bias not in self.layout.frozen
            work.append(Vector(name=bias, array=array, pending=(summed,), is_trained=is_trained))
        elif op.has_bias:
            # If the result is a partial sum over tp, the bias is added after the sum, in the stream's layout.
            on = self._stream(op.target) if partial else self.arrays[op.target]
            work.append(self._vector(f"{op.name}_bias", op.bias_dims, on, "compute"))
        tag = Tag.OTHER if partial else Tag.PRODUCT
        saved = (source,) if weight.is_trained else ()
        yield self._node(*work, reads=(source,), writes=op.target, saved=saved, tag=tag)
        if op.low_rank:
            yield from self._branch(op, op.low_rank, tag)

    def _branch(self, op: Linear, branch: LowRank, tag: Tag) -> Iterator[Node]:
        """Yield the nodes of a matmul's low-rank branch, which is added to the matmul's result.

        The inner value [tokens, rank] is resharded over tp instead of the branch's input or output, which are larger.
        If tp splits the matmul's outputs, the inner value is computed from the stream between blocks and gathered; if
        tp splits the inputs, it is reduced to the layout of that stream. There, a matmul has its whole branch there.
        """
        layout, rank, path = self.layout, (RANK, branch.rank), f"{self.stack}.{op.name}"
        is_column = op.inputs[0][0] == "embed"
        rows = (layout.residual_tokens, self._rows(op)) if is_column else (self._rows(op), layout.residual_tokens)
        low, split = f"{op.target} in low rank", f"{op.target} in low rank as read"
        weight, product = factor(f"{path}{LORA_A}", rows[0], op.inputs, (rank,), layout)
        read = Array(op.source, (*rows[0], *product.inner))
        dropped = (PassOver(kind="low_rank_dropout", arrays=(read,)),) if branch.dropout else ()
        partial = axes_of(product.inner)
        before = Array(low, (*rows[0], *product.columns), partial)
        saved = (op.source,) if weight.is_trained else ()
        tagged = Tag.OTHER if partial else Tag.PRODUCT
        yield self._node(*dropped, weight, product, reads=(op.source,), writes=low, saved=saved, tag=tagged)
        pending = axes_of(layout.used(op.outputs))
        after = Array(low, (*rows[1], *product.columns))
        move = Move(name=f"{self.name} low rank", before=before, after=after, pending=pending)
        yield self._node(move, reads=(low,), writes=split, tag=Tag.READ if is_column else Tag.PRODUCT)
        out = factor(f"{path}{LORA_B}", rows[1], (rank,), op.outputs, layout)
        added = PassOver(kind="low_rank", arrays=(Array(op.target, (*rows[1], *out[1].columns)),))
        saved = (split,) if out[0].is_trained else ()
        if not partial:
            yield self._node(*out, added, reads=(split, op.target), writes=op.target, saved=saved, tag=tag)
        else:
            # The branch is added after the matmul's sum over tp, because its gradient has another layout (`_summed`).
            self.branches[op.target] = made = f"{op.target} of low rank"
            yield self._node(*out, added, reads=(split,), writes=made, saved=saved)

    def _with_magnitude(self, op: Linear, branch: LowRank) -> Iterator[Node]:
        """Yield the nodes of a matmul with its branch, multiplied by magnitude / column norm of each output (DoRA)."""
        total, norms = f"{op.target} before magnitudes", f"{op.target} norms"
        yield from self._linear(replace(op, target=total, low_rank=replace(branch, has_magnitude=False)))
        yield from self._summed((total,), total)
        of_weight = column_norms(op, branch.rank, norms, f"{self.stack}.{op.name}", self.layout)
        yield self._node(*of_weight, writes=norms, tag=Tag.PRODUCT)
        self.arrays[op.target] = on = replace(self.arrays[total], name=op.target)
        vector = self._vector(f"{op.name}{LORA_M}", vector_dims(op.outputs), on)
        work, both = (PassOver(kind="low_rank", arrays=(on,)), vector), (total, norms)
        yield self._node(*work, reads=both, writes=op.target, saved=both)

    def _rows(self, op: Linear) -> tuple[Dim, ...]:
        """Return the row dims of a matmul: tokens inside blocks, tokens of the residual stream, or an expert's rows."""
        if op.num_experts:
            return (Dim("R", None),)
        return self.layout.residual_tokens if op.is_on_residual else self.layout.tokens

    def _entry(self, op: Linear) -> Generator[Node, None, str]:
        """Yield the gather of a matmul's input over tokens, once for all readers; return the name of the result."""
        array = self._array(op.source)
        is_split = any(dim.axes for dim in array.dims[2:])
        if not is_split and op.source not in self.entries:
            after = replace(array, dims=(*self.layout.tokens, *array.dims[2:]))
            readers = [each for each in self.ops if isinstance(each, Linear) and each.source == op.source]
            columns = [dim for each in readers if not each.is_on_residual for dim in self.layout.used(each.outputs)]
            pending = tuple(dict.fromkeys(axes_of(columns)))
            self.entries[op.source] = name = f"{op.source} as read"
            self.arrays[name] = replace(after, name=name)
            is_stream = array.dims[-1].letter == "D"
            move = Move(
                name=f"{self.name} input" if is_stream else op.source,
                before=array,
                after=after,
                pending=pending,
                is_ring=is_stream and self.layout.collective_matmul,
            )
            yield self._node(move, reads=(op.source,), writes=name, tag=Tag.READ)
        return self.entries.get(op.source, op.source)

    def _summed(self, sources: tuple[str, ...], target: str) -> Iterator[Node]:
        """Yield the nodes that add the partial sums among `sources` and reduce them to the residual stream's layout."""
        partial = tuple(name for name in sources if self.arrays[name].unreduced)
        if not partial:
            return
        before = self.arrays[partial[0]]
        after = self._stream(before.name)
        move = Move(name=f"{self.name} output", before=before, after=after, is_ring=self.layout.collective_matmul)
        for name in partial:
            self.arrays[name] = after
        branches = tuple(self.branches[name] for name in partial if name in self.branches)
        yield self._node(move, reads=partial, writes=target, tag=Tag.OTHER if branches else Tag.PRODUCT)
        if branches:
            yield self._node(reads=(target, *branches), writes=target, tag=Tag.PRODUCT)

    def _rotary(self, op: Rotary) -> Iterator[Node]:
        """Yield the nodes that rotate queries and keys in place."""
        # A slice of a value is counted as rotated where the slices are joined (`_concat`).
        whole = tuple(self.arrays[value] for value in op.values if value not in self.parts)
        for value in op.values:
            passes = (PassOver(kind="rotary", arrays=whole),) if whole and value == op.values[0] else ()
            yield self._node(*passes, reads=(value,), writes=value, tag=Tag.READ)

    def _attention(self, op: Attention) -> Iterator[Node]:
        """Yield the nodes of attention, and of the reshards that bring keys and values to the queries."""
        query, key, value = (self.arrays[name] for name in (op.query, op.key, op.value))
        names = (op.query, op.key, op.value)
        work: list[Work] = []
        if self.layout.sequence and self.layout.sp_method == "gather" and not op.is_sharing:
            whole = Dim("S", None)
            names = (op.query, f"{op.key} gathered", f"{op.value} gathered")
            pairs = ((op.key, names[1], "keys"), (op.value, names[2], "values"))
            for name, gathered, label in pairs:
                array = self.arrays[name]
                after = replace(array, dims=(array.dims[0], whole, *array.dims[2:]))
                self.arrays[gathered] = after
                move = Move(name=label, before=array, after=after, pending=self.layout.sequence)
                yield self._node(move, reads=(name,), writes=gathered, tag=Tag.READ)
            key, value = self.arrays[names[1]], self.arrays[names[2]]
        elif self.layout.sequence and self.layout.sp_method == "ring":
            work.extend(ring(key, value, self.layout))
        output = Array(op.target, (*query.dims[:-1], query.dims[-1]._replace(size=op.value_dim)))
        if self.layout.sequence and self.layout.sp_method == "ulysses":
            work.extend(whole_sequences(op, (query, key, value, output), self.layout))
        self.arrays[op.target] = output
        heads = Dim("N", op.num_heads, self.layout.axes("kv_heads"))
        core = Core(op=op, query=query, key=key, value=value, output=output, num_heads=heads)
        if op.has_sinks:
            groups = (("kv_heads", op.num_kv_heads), ("group", op.num_heads // op.num_kv_heads))
            work.append(self._vector(SINKS, groups, query))
        branch = PassOver(kind="branch", arrays=(self._stream(STREAM),))
        yield self._node(
            core, branch, branch, *work, reads=names, writes=op.target, saved=(*names, op.target), tag=Tag.READ
        )

    def _gated_delta(self, op: GatedDelta) -> Iterator[Node]:
        """Yield the node of linear attention."""
        source = self.arrays[op.value]
        self.arrays[op.target] = replace(source, name=op.target)
        heads = ((LINEAR_HEADS, op.num_heads), ("group", op.group))
        parameters = {name: (("taps", op.taps), *dims) for name, _, dims in op.convolved}
        work: list[Work] = []
        for name, dims in (parameters | dict.fromkeys((DECAY_LOG, DECAY_BIAS), heads)).items():
            vector = self._vector(name, dims, source)
            # All axes that split rows or tokens are summed at once.
            work.append(replace(vector, pending=(outermost_first(itertools.chain(*vector.pending)),)))
        work += delta_work(op, f"{self.stack}.{op.target}", self.arrays, self.layout)
        reads = (op.query, op.key, op.value, op.decay, op.rate)
        yield self._node(*work, reads=reads, writes=op.target, saved=reads)

    def _concat(self, op: Concat) -> Iterator[Node]:
        """Yield the node of a concatenation along the last dim. Its result has the sharding of the first source.

        The gradient of a source that all heads share is summed over the axes that split heads.
        """
        sources = [self.arrays[name] for name in op.sources]
        self.arrays[op.target] = _resized(sources[0], op.target, sum(array.dims[-1].size or 0 for array in sources))
        heads = axes_of(sources[0].dims[2:])
        shared = [array for array in sources if len(array.dims) < len(sources[0].dims)]
        moves = [Move(name=array.name, before=array, after=array, pending=heads) for array in shared]
        rotated = PassOver(kind="rotary", arrays=(self.arrays[op.target],))
        yield self._node(rotated, *moves, reads=op.sources, writes=op.target)

    def _gated(self, op: Gated) -> Iterator[Node]:
        """Yield the node of an MLP's activation."""
        first = self.arrays[op.sources[0]]
        self.arrays[op.target] = replace(first, name=op.target)
        # A layer's own input is there whatever the layer saves.
        kind: Pass = "gated" if len(op.sources) > 1 + op.is_on_residual else "activation"
        work: list[Work] = [PassOver(kind=kind, arrays=(first,))]
        if op.sparsity and (axes := axes_of(first.dims[2:])):
            # A token's mean and variance of gates; in backward that of the cutoff's gradient.
            sums = Array("cutoff", first.dims[:2], width="float32")
            made = Exchange(name="cutoff", kind="all-reduce", axes=axes, array=sums, phases=("backward",))
            work += [made, replace(made, phases=("forward", "recompute"), times=2)]
        yield self._node(*work, reads=op.sources, writes=op.target, saved=op.sources)

    def _mix(self, op: Mix) -> Iterator[Node]:
        """Yield the nodes of AltUp over all streams of a device's tokens, which have no collectives."""
        streams = self.arrays[STREAMS]
        both = (STREAMS, op.source)
        passes = PassOver(kind="residual", arrays=(streams,))
        if op.kind == "add":
            yield self._node(passes, reads=both, writes=STREAMS)
            return
        rows = op.num_streams**2 if op.kind == "predict" else op.num_streams
        factors = self._vector(f"altup_{op.kind}", (("norm", rows), ("router", op.num_streams)), streams)
        both = both if op.kind == "predict" else (*both, STREAM)
        yield self._node(passes, factors, reads=both, writes=STREAMS, saved=both)
        first = STREAM if op.kind == "predict" else ALTUP_ACTIVE
        self.arrays[first] = active = self._stream(first)
        scale = (self._vector(ALTUP_SCALE, (("norm", op.size),), active, "compute"),) if op.kind == "correct" else ()
        yield self._node(*scale, reads=(STREAMS,), writes=first, saved=(STREAMS,) if scale else ())

    def _sigmoid_gate(self, op: SigmoidGate) -> Iterator[Node]:
        """Yield the node that multiplies a value by a sigmoid gate. Partial sums of the value are added first."""
        yield from self._summed((op.source,), op.source)
        self.arrays[op.target] = source = replace(self.arrays[op.source], name=op.target)
        both = (op.source, op.by)
        yield self._node(PassOver(kind="gated", arrays=(source,)), reads=both, writes=op.target, saved=both)

    def _dispatch(self, op: Dispatch) -> Iterator[Node]:
        """Yield the node that sends tokens to experts: all-to-all over ep and gather over tp; without ep, a gather."""
        layout = self.layout
        ep, tp = layout.axes("expert"), layout.axes("mlp")
        self.arrays[op.target] = Array(op.target, (Dim("R", None), Dim("D", self._embed())))
        rows = Array(op.target, (Dim("E", op.num_stored, ep), *self.arrays[op.target].dims))
        work: list[Work] = [PassOver(kind="dispatch", arrays=(rows,))]
        reads = op.source
        if ep:
            work.extend(dispatch_moves(ep, tp, self._embed(), op))
        else:
            array = self._array(op.source)
            after = replace(array, dims=(*layout.tokens, *array.dims[2:]))
            name = "experts input"
            work.append(Move(name=name, before=array, after=after, pending=tp))
            work.extend(routing_of_tokens(tp, layout))
        load = Array("load", (Dim("load", 3 * op.num_experts),), width="float32")
        work.append(Exchange(
            name=IMBALANCE, kind="all-reduce", axes=(*layout.batch, *layout.residual), array=load,
            phases=("forward", "recompute"), is_end=True,
        ))  # fmt: skip
        work.extend(scale_sum(op, self.stack, layout))
        yield self._node(*work, reads=(reads, op.router), writes=op.target, saved=(op.router,), tag=Tag.READ)

    def _combine(self, op: Combine) -> Iterator[Node]:
        """Yield the node that sends the experts' output rows back to their tokens."""
        layout = self.layout
        ep, tp = layout.axes("expert"), layout.axes("mlp")
        self.arrays[op.target] = after = self._stream(op.target)
        count = next(each.num_stored for each in self.ops if isinstance(each, Dispatch))
        rows = Array(op.target, (Dim("E", count, ep), Dim("R", None), after.dims[-1]))
        work: list[Work] = [PassOver(kind="combine", arrays=(rows,))]
        if ep:
            is_normed = any(isinstance(each, Norm) and each.source == op.target for each in self.ops)
            work.extend(combine_moves(ep, tp, self._embed(), is_normed=is_normed))
        else:
            before = Array(op.target, (*layout.tokens, after.dims[-1]), tp)
            work.append(Move(name="experts output", before=before, after=after))
        yield self._node(*work, reads=(op.source,), writes=op.target, tag=Tag.PRODUCT)

    def _add(self, op: Add) -> Iterator[Node]:
        """Yield the nodes that add a block's output to the residual stream."""
        if op.target != STREAM:
            self.arrays[op.target] = total = replace(self.arrays[op.sources[0]], name=op.target)
            yield self._node(PassOver(kind="residual", arrays=(total,)), reads=op.sources, writes=op.target)
            return
        partial = tuple(name for name in op.sources if self.arrays[name].unreduced)
        yield from self._summed(op.sources, "added")
        stream = self._stream(STREAM)
        kinds: list[Pass] = ["residual"]
        if self.layout.dropout:
            kinds.append("dropout")
        kinds *= self.num_additions
        if any(isinstance(each, Gated) and len(each.sources) > 1 + each.is_on_residual for each in self.ops):
            # Backward adds the gradients of gate and up with respect to their shared input.
            kinds.append("branch")
        passes = [PassOver(kind=kind, arrays=(stream,)) for kind in kinds]
        reads = (STREAM, *(name for name in op.sources if name not in partial), *(("added",) if partial else ()))
        yield self._node(*passes, reads=reads, writes=op.target)


def _is_of_mlp(op: Linear) -> bool:
    """Whether a matmul computes the hidden activations of an MLP."""
    return op.outputs[-1][0] == "mlp"


def _resized(array: Array, name: str, size: int) -> Array:
    """Return an array with another name and another size of its last dim."""
    return replace(array, name=name, dims=(*array.dims[:-1], array.dims[-1]._replace(size=size)))
