"""The ops of a step, one by one: forward, what backward makes again, and the gradients of both operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.errors import MeshwrightError
from meshwright.hardware import dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.notation import Chain, Product, ShardedArray, Sizes, Stage
from meshwright.step.op_arrays import INPUTS, LETTERS, RESULTS, Dim, Dims, inner_and_outer, split_axes, stored, used
from meshwright.step.ops import Op, OpPhase
from meshwright.step.parameters import STACKED, Parameter, leaves, parameters
from meshwright.step.routed_tokens import sent_tokens
from meshwright.step.rules import IN_USE, RULES, token_axes
from meshwright.step.sequence import halves_queries
from meshwright.step.workload import REMATS, Workload, num_query_chunks

NEVER_RECOMPUTED = ("down", "expert_down", "shared_down", "unembedding", "embedding")
"""Weights whose product backward never needs again: nothing behind it in its block, or no block at all."""


def step_ops(workload: Workload, mesh: MeshShape) -> tuple[Op, ...]:
    """Every op of a step as `meshwright train` runs it: weights stored over fsdp, the stream split over tp.

    In the order of the forward pass, each followed by its own in the other phases. Moves that communicate nothing are
    left out. Raises for a remat policy that is not one of those that run.
    """
    if workload.remat not in REMATS:
        raise MeshwrightError(f"ops are listed of what runs, with remat {', '.join(REMATS)}, not {workload.remat}")
    return tuple(op for op in _ops(_Step(workload, mesh)) if op.used or op.inference.way.communications)


def _ops(step: _Step) -> Iterator[Op]:
    """Tables and lookup, layers, logits."""
    tree = parameters(step.workload.model)
    ends = _Part(step)
    for name, parameter in leaves(tree):
        if parameter.role == "table":
            yield from ends.table(name, parameter)
    yield from ends.leave("embedding")
    for stack, block in tree.items():
        if not isinstance(block, Parameter):
            declared = dict(leaves(block))
            yield from _layer(_Part(step, stack, next(iter(declared.values())).num_layers), declared)
    yield from ends.enter("logits input")
    for name, parameter in leaves(tree):
        if parameter.role == "product" and not parameter.is_stacked:
            yield from ends.weight(name, parameter)


def _layer(part: _Part, block: dict[str, Parameter]) -> Iterator[Op]:
    """The ops of the layers of one kind: attention and then an mlp or experts, or attention and mlp side by side."""
    weights = {name: parameter for name, parameter in block.items() if parameter.role == "product"}
    mlp = {name: parameter for name, parameter in weights.items() if _is_mlp(name)}
    is_parallel = part.step.workload.model.parallel_blocks
    yield from part.enter("block input" if is_parallel else "attention input")
    for name, parameter in weights.items():
        if name == "output":
            yield from part.scores()
        if name not in mlp:
            yield from part.weight(name, parameter, is_summed=not is_parallel)
    yield from part.latents()
    if not is_parallel:
        yield from part.leave("attention output", is_summed=True)
    if "router" in mlp:
        yield from _experts(part, mlp)
        return
    if not is_parallel:
        yield from part.enter("mlp input")
    # What several products add to the stream together is summed over tp once, after the last of them.
    for name, parameter in mlp.items():
        yield from part.weight(name, parameter, is_summed=not is_parallel)
    yield from part.leave("block output" if is_parallel else "mlp output", is_summed=not is_parallel)


def _experts(part: _Part, mlp: dict[str, Parameter]) -> Iterator[Op]:
    """The router, the experts, and the mlp that works on every token beside them where there is one."""
    # Where experts are split, copies of tokens are gathered over tp, else the tokens.
    is_split = bool(part.step.live(RULES["expert"]))
    yield from part.weight("router", mlp["router"])
    if not is_split:
        yield from part.enter("mlp input")
    yield from part.dispatch()
    for name, parameter in mlp.items():
        if name.startswith("expert_"):
            yield from part.weight(name, parameter)
    yield from part.combine()
    if not is_split:
        yield from part.leave("mlp output")
    if "shared_down" not in mlp:
        return
    yield from part.enter("mlp input")
    for name, parameter in mlp.items():
        if name.startswith("shared_"):
            yield from part.weight(name, parameter, is_summed=True)
    yield from part.leave("mlp output", is_summed=True)


def _is_mlp(name: str) -> bool:
    """Whether a weight of a layer belongs to its mlp or experts."""
    return name in ("gate", "up", "down", "router") or name.startswith(("expert_", "shared_"))


@dataclass(frozen=True)
class _Step:
    """What the arrays of a step share: its tokens, on a mesh."""

    workload: Workload
    mesh: MeshShape

    @cached_property
    def tokens(self) -> Dims:
        """Batch and sequence as products have them."""
        batch, sequence = self.live(RULES["batch"]), self.live(RULES["sequence"])
        return Dim("B", self.workload.batch, batch), Dim("S", self.workload.seq_len, sequence)

    @cached_property
    def residual(self) -> Dims:
        """Batch and sequence as the stream between blocks has them."""
        return self.tokens[0], self.tokens[1]._replace(used=self.live(RULES["residual_sequence"]))

    @cached_property
    def copies(self) -> tuple[Dim, Dim]:
        """Experts, and the tokens sent to one: as many to each, and whole ones from each device."""
        experts = self.workload.model.experts
        assert experts is not None
        ep = self.live(RULES["expert"])
        axes = tuple(axis for axis in self.live(token_axes()) if axis not in ep)
        sent = sent_tokens(self.workload, self.mesh)
        return Dim("E", experts.count, ep), Dim("C", experts.slots(sent) * (self.workload.tokens // sent), axes)

    @cached_property
    def on_their_way(self) -> tuple[Dims, Dims, Dims]:
        """The copies of tokens where the tokens are, at the devices of ep that have their experts, and gathered there.

        Where experts are not split they stay where they are.
        """
        experts, tokens = self.copies
        D = Dim("D", self.workload.model.embed)
        tp = self.live(RULES["mlp"]) if experts.used else ()
        arrived = tokens._replace(used=tokens.used + tp)
        start = arrived._replace(used=arrived.used + experts.used)
        return (experts._replace(used=()), start, D), (experts, arrived, D), (experts, tokens, D)

    def weight_dims(self, parameter: Parameter) -> Dims:
        """The dims of a parameter of one layer."""
        return tuple(
            Dim(LETTERS[name], size, self.live(RULES[IN_USE.get(name, name)]), self.live(RULES[name]))
            for name, size in zip(parameter.axes, parameter.shape, strict=True)
            if name not in STACKED
        )

    def live(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes of a degree above 1."""
        return tuple(axis for axis in axes if self.mesh.degrees[axis] > 1)


@dataclass(frozen=True)
class _Part:
    """The ops of a step that stand in `num_layers` layers of one kind, or outside of them where no stack is named."""

    step: _Step
    stack: str = ""
    num_layers: int = 1

    def weight(self, name: str, parameter: Parameter, *, is_summed: bool = False) -> Iterator[Op]:
        """A product with a weight, and the two of its gradients.

        is_summed: what it adds to the stream is all that its block does, and is summed over tp right away.
        """
        step, dims = self.step, self.step.weight_dims(parameter)
        lead = step.residual if name == "router" else step.copies if "expert" in parameter.axes else step.tokens
        inner, outer = inner_and_outer(name, parameter, dims)
        source, result = INPUTS[inner[0].letter], RESULTS.get(outer[0].letter, name)
        X, Y = used(source, (*lead, *inner)), used(result, (*lead, *outer), split_axes(inner))
        dX, dY = used(f"d{source}", (*lead, *inner), split_axes(outer)), used(f"d{result}", (*lead, *outer))
        W, shards = used(f"W{name}", dims), stored(f"W{name}", dims)
        if is_summed and result == "Y":
            Y = used(result, (*step.residual, *outer))
        op = self._op(name, (*lead, *dims))
        is_again = bool(self.stack) and step.workload.keeps_input_alone and name not in NEVER_RECOMPUTED
        yield op.product("forward", X, shards, Y, W)
        if is_again:
            yield op.product("recompute", X, shards, Y, W)
        # Outside of layers a gathered weight is still there; in them it was gathered to make the product again, or now.
        yield op.product("backward", dY, W if is_again or not self.stack else shards, dX, W)
        yield op.product("backward", X, dY, stored(f"dW{name}", dims), dY)

    def table(self, name: str, parameter: Parameter) -> Iterator[Op]:
        """A table that rows are looked up in: gathered, and its gradient summed over all tokens."""
        dims = self.step.weight_dims(parameter)
        op, gradient = self._op(f"{name} table", dims), used(f"dW{name}", dims, self.step.live(token_axes()))
        yield op.move("forward", stored(f"W{name}", dims), used(f"W{name}", dims))
        yield op.move("backward", gradient, stored(f"dW{name}", dims))

    def scores(self) -> Iterator[Op]:
        """Queries with keys, and what comes of that with values; each with the gradients of both operands.

        Of a sequence in halves these are products of one half with one, three of them: the first queries see no later
        keys.
        """
        step, model = self.step, self.step.workload.model
        parts, times = (2, 3) if halves_queries(step.workload, step.mesh) else (1, 1)
        B, S = step.tokens
        tokens = B, S._replace(size=S.size // parts)
        heads = (Dim("K", model.num_kv_heads, step.live(RULES["kv_heads"])), Dim("G", model.num_groups))
        # Keys and values are split as the sequence is until a product wants all of them.
        T = Dim("T", step.workload.seq_len // parts, (), step.live(RULES["sequence"]))
        query, value = (*tokens, *heads, Dim("H", model.query_key_dim)), Dim("H", model.value_dim)
        yield from self._attend("scores", "query", "key", "scores", query, T, times)
        yield from self._attend("values", "weights", "value", "mixed", (*tokens, *heads, T), value, times)

    def _attend(self, name: str, left: str, right: str, result: str, dims: Dims, new: Dim, times: int) -> Iterator[Op]:
        """One of attention's products: of an array with `dims` and one of keys or values, which brings the dim `new`.

        The second has the dims of batch and kv heads, T, and H, of which `dims` and `new` have one each. times: how
        often a layer makes it.
        """
        workload = self.step.workload
        B, K, last = dims[0], dims[2], dims[-1]
        T, H = (new, last) if new.letter == "T" else (last, new)
        whole, split = (B, T, K, H), (B, T._replace(used=T.stored), K, H)
        made = (*dims[:-1], new)
        once = self._op(name, (*dims, new), has_mask=True)
        op = replace(once, count=times * once.count)
        X, held, Y = used(left, dims), used(right, whole), used(result, made)
        dX, dY = used(f"d{left}", dims), used(f"d{result}", made)
        yield op.product("forward", X, used(right, split), Y, held)
        if not workload.keeps_read:
            yield op.product("recompute", X, used(right, split), Y, held)
        if name == "scores" and (workload.remat == "attention" or num_query_chunks(workload.seq_len) > 1):
            yield op.product("recompute", X, held, Y, held)
        yield op.product("backward", dY, held, dX, held)
        if new.letter == "T":
            yield op.product("backward", dY, X, used(f"d{right}", split), X)
        else:
            yield op.product("backward", X, dY, used(f"d{right}", split), dY)

    def latents(self) -> Iterator[Op]:
        """The gradients of latents, of which each device of tp has what its heads add."""
        latent, step = self.step.workload.model.latent, self.step
        if latent is None:
            return
        widths = {"latent": latent.kv_rank + latent.rope_head_dim, "query_latent": latent.query_rank or 0}
        for name, width in widths.items():
            dims = (*step.tokens, Dim("L", width))
            if width:
                partial = used(f"d{name}", dims, step.live(RULES["kv_heads"]))
                yield self._op(name, dims).move("backward", partial, used(f"d{name}", dims))

    def enter(self, name: str) -> Iterator[Op]:
        """The stream at the input of products that tp splits: whole along the sequence, and split again backward."""
        op, split, whole = self._stream(name)
        yield op.move("forward", used("X", split), used("X", whole))
        if self.stack and not self.step.workload.keeps_read:
            yield op.move("recompute", used("X", split), used("X", whole))
        yield op.move("backward", used("dX", whole, self.step.live(RULES["mlp"])), used("dX", split))

    def leave(self, name: str, *, is_summed: bool = False) -> Iterator[Op]:
        """What is added to the stream, summed over tp and split, where it `is_summed` not yet; its gradient whole."""
        op, split, whole = self._stream(name)
        if not is_summed:
            yield op.move("forward", used("Y", whole, self.step.live(RULES["mlp"])), used("Y", split))
        yield op.move("backward", used("dY", split), used("dY", whole))

    def _stream(self, name: str) -> tuple[_Named, Dims, Dims]:
        """A move of the stream, with its dims between blocks and in them."""
        D = Dim("D", self.step.workload.model.embed)
        whole = (*self.step.tokens, D)
        return self._op(name, whole), (*self.step.residual, D), whole

    def dispatch(self) -> Iterator[Op]:
        """Tokens to their experts, a copy for each that works on one; their gradients come back, summed over tp."""
        start, arrived, gathered = self.step.on_their_way
        op, tp = self._op("experts dispatch", start), self.step.live(RULES["mlp"])
        phases: tuple[OpPhase, ...] = ("forward",) if self.step.workload.keeps_read else ("forward", "recompute")
        for phase in phases:
            yield op.move(phase, used("X", start), used("X", arrived))
            yield op.move(phase, used("X", arrived), used("X", gathered))
        yield from self._return("backward", op, "dX", tp)

    def combine(self) -> Iterator[Op]:
        """What experts made of the copies back to the tokens, summed over tp; the gradients go where the tokens went.

        Backward needs nothing that came back: the share of each copy in its token's result is applied by the experts.
        """
        start, arrived, gathered = self.step.on_their_way
        op, tp = self._op("experts combine", start), self.step.live(RULES["mlp"])
        yield from self._return("forward", op, "Y", tp)
        yield op.move("backward", used("dY", start), used("dY", arrived))
        yield op.move("backward", used("dY", arrived), used("dY", gathered))

    def _return(self, phase: OpPhase, op: _Named, name: str, tp: tuple[str, ...]) -> Iterator[Op]:
        """Copies from the experts' devices to their tokens; where experts are not split tokens are summed after."""
        start, arrived, gathered = self.step.on_their_way
        left = tp if arrived == gathered else ()
        yield op.move(phase, used(name, gathered, tp), used(name, arrived, left))
        yield op.move(phase, used(name, arrived, left), used(name, start, left))

    def _op(self, name: str, dims: Dims, *, has_mask: bool = False) -> _Named:
        """What the ops of one name share."""
        step = self.step
        sizes = Sizes(
            degrees=step.mesh.layout,
            dims={dim.letter: dim.size for dim in dims},
            element_bytes=dtype_bytes(step.workload.compute_dtype),
        )
        return _Named(f"{self.stack}.{name}".lstrip("."), sizes, self.num_layers, bool(self.stack), has_mask)


@dataclass(frozen=True)
class _Named:
    """What the ops of one name share: forward, again, and backward."""

    name: str
    sizes: Sizes
    count: int
    is_in_layers: bool
    has_mask: bool

    def product(
        self, phase: OpPhase, left: ShardedArray, right: ShardedArray, result: ShardedArray, multiplied: ShardedArray
    ) -> Op:
        """The product of two arrays, the second of them first brought to lie as `multiplied`."""
        return self._make(phase, Product((left, right), result), (left, multiplied))

    def move(self, phase: OpPhase, source: ShardedArray, target: ShardedArray) -> Op:
        """The move of an array."""
        return self._make(phase, Chain(source, (Stage(None, (), target),)), ())

    def _make(self, phase: OpPhase, expression: Product | Chain, operands: tuple[ShardedArray, ...]) -> Op:
        """An op of one phase."""
        return Op(
            name=self.name,
            phase=phase,
            expression=expression,
            sizes=self.sizes,
            used=operands,
            count=self.count,
            is_in_layers=self.is_in_layers,
            has_mask=self.has_mask,
        )
